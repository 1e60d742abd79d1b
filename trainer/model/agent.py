"""The policy with its loss: one call is one optimizer step; rows become shorter where memory is short.

The gradient comes with the logprobs of its forward pass, to compare them with the engine's before a weight changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm, loss_of, parts, step_weights
from trainer.algorithms.trial import try_algorithm
from trainer.batch.batch import Batch, Reals, Row, pack
from trainer.batch.forest import side_by_side
from trainer.batch.ratios import Gauges, TrainedTokens
from trainer.model.adapters import Adapter
from trainer.model.critic import Critic
from trainer.model.inputs import RowInputs, ahead, on_device
from trainer.model.memory import MemoryLimits, OutOfMemory
from trainer.model.model import Policy
from trainer.parallel import World
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.types import PolicyKind

log = logging.getLogger(__name__)

NO_SHARDED_CRITIC = (
    "algorithm={!r} trains its critic in one process: set multi_devices=false, or an algorithm without a critic"
)
RECOMPUTED = "from now on activations are recomputed, as gradient_checkpointing=true does from the start"
SHORTEST_ROW = 16

RowData = tuple[RowInputs, functools.partial[TrainedTokens]]
"""A row's inputs, and its tokens but for what the model computes of them."""


class PolicyAgent:
    """A policy and how it learns."""

    def __init__(
        self, policy: Policy, settings: TrainerSettings, reference: Policy | None = None, critic: Critic | None = None
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.critic = critic
        self.algorithm: Algorithm = settings.algorithm
        self._reference = reference
        self.start: Adapter | None = None
        """The adapter that the policy started from, as the reference; None for the base model."""
        self.world = World()
        self._gauge_names = try_algorithm(self.algorithm)
        self._memory = MemoryLimits()

    @property
    def row_tokens(self) -> int:
        """Tokens of one packed row. On a CPU attention over a long row costs more than another row does."""
        wanted = self.settings.row_tokens or (8192 if self.policy.device.type == "cuda" else 512)
        bound = self._memory.row_tokens
        return wanted if bound is None else min(wanted, bound)

    def rows(self, batch: Batch, members: Sequence[int]) -> list[Row]:
        packed = pack(batch, members, self.row_tokens if self.policy.shares_rows else None)
        return [self.policy.with_parts(batch, row) for row in packed] if self.policy.terms else packed

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.policy.parameters() + ([] if self.critic is None else self.critic.parameters())

    def save_memory(self, limits: MemoryLimits) -> None:
        self._memory = limits
        self.policy.is_checkpointed |= limits.checkpoints_layers

    def find_row_tokens(self, reserved_bytes: int) -> None:
        """Find rows that fit into memory beside the reserved bytes, which the optimizer allocates later.

        Where a row does not fit, activations are recomputed; then rows are halved.

        Raises:
            SettingsError: Not even a very short row fits.
        """
        if not self._probes_rows():
            return
        while not self._fits(self.row_tokens, reserved_bytes):
            if self.policy.can_checkpoint:
                log.warning("a row of %d tokens does not fit into memory: %s", self.row_tokens, RECOMPUTED)
                self.policy.checkpoint()
                continue
            shorter = self.row_tokens // 2
            if shorter < SHORTEST_ROW:
                raise SettingsError(
                    f"a row of {self.row_tokens} tokens does not fit into the memory of {self.policy.device} beside "
                    f"weights and optimizer: set weights_dtype='bfloat16' or optimizer_state='host', use more "
                    "devices, or lower gpu_memory in [engine]"
                )
            log.warning("a row of %d tokens does not fit into memory, trying %d", self.row_tokens, shorter)
            self._shorten_rows(shorter)
        log.info("rows of %d tokens fit into memory", self.row_tokens)

    def _probes_rows(self) -> bool:
        return self.policy.device.type == "cuda" and self.world.size == 1

    def _fits(self, num_tokens: int, reserved_bytes: int) -> bool:
        layout, (places,) = side_by_side([np.arange(num_tokens, dtype=np.int32) % self.policy.config.vocab_size])
        row = Row(layout=layout, predictor=places, token=places)
        try:
            reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=self.policy.device)
            inputs = self.policy.inputs(row, torch.ones(num_tokens), torch.zeros(num_tokens))
            outputs = (each for each in self._outputs_of(inputs, with_values=True) if each is not None)
            torch.stack([each.sum() for each in outputs]).sum().backward()  # type: ignore[no-untyped-call]
            del reserved
        except torch.OutOfMemoryError:
            return False
        finally:
            for parameter in self.parameters():
                parameter.grad = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return True

    def shard(self, axis: str) -> None:
        """Shard policy and reference over the mesh's dimension of this name; before `load`.

        Raises:
            SettingsError: There is a critic, which one process trains.
        """
        if self.critic is not None:
            raise SettingsError(NO_SHARDED_CRITIC.format(str(self.algorithm)))
        self.policy.mesh_axis = axis
        if self._reference is not None:
            self._reference.mesh_axis = axis

    def load(self, seed: int, *, with_weights: bool = True) -> None:
        """Load the policy afresh, unless a saved state replaces its weights; reference and critic where needed."""
        self.world = World()
        self.policy.load(seed, with_weights=with_weights)
        if self._reference is not None:
            self._reference.load(seed)
            self._reference.model.requires_grad_(requires_grad=False)
        if self.critic is not None:
            self.critic.load()

    def logprobs_of(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the logprobs of the members' sampled tokens under the present weights, 0 for the other tokens. [M].

        Raises:
            OutOfMemory: A single chain, or pair, does not fit into memory.
        """
        return self._without_gradient(lambda inputs: self.policy.logprobs(inputs)[0], batch, members)

    def values_of(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the critic's values of the members' trained tokens, 0 for the other tokens. [M].

        Raises:
            OutOfMemory: A single chain does not fit into memory.
        """
        assert self.critic is not None, "the algorithm needs a critic and none was built"
        return self._without_gradient(self.critic.values, batch, members)

    def gradient(
        self, optimizer: torch.optim.Optimizer, batch: Batch, members: Sequence[int], proximal: Reals | None = None
    ) -> tuple[Gauges, Reals]:
        """Compute the gradient of one optimizer step; return gauges, and the logprobs of the members' tokens. [M].

        Each time that a row does not fit into memory, the next step is taken that saves some.

        Raises:
            OutOfMemory: A single chain, or pair, does not fit into memory. The gradient is cleared.
        """
        while True:
            self._clear_gradients(optimizer)
            try:
                return self.accumulate_gradient(batch, members, proximal=proximal)
            except OutOfMemory as error:
                self._clear_gradients(optimizer)
                self._take_less_memory(error)

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        """Update the weights; return the gradient's norm before clipping. A gradient that is not finite gives NaN."""
        norm = self._clip(self.policy.parameters())
        own_norm = 0.0 if self.critic is None else self._clip(self.critic.parameters())
        if not (np.isfinite(norm) and np.isfinite(own_norm)):
            return np.nan
        optimizer.step()
        if self.critic is not None:
            self.critic.optimizer.step()
        return norm

    def _clip(self, parameters: list[torch.nn.Parameter]) -> float:
        return float(_full(torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)).item())

    def _clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)

    def _take_less_memory(self, error: OutOfMemory) -> None:
        """Recompute activations from now on, or else halve the rows; raise the error where neither can help."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        # With several processes the others already wait in a collective: only a restart brings them back together.
        if self.world.size > 1 or not (error.can_checkpoint or len(error.units) > 1):
            raise error
        if error.can_checkpoint:
            log.warning("%s: %s", error, RECOMPUTED)
            self.policy.checkpoint()
            return
        self._shorten_rows(max(error.num_tokens // 2, 1))
        log.warning("%s; rows hold at most %d tokens from now on", error, self.row_tokens)

    def _shorten_rows(self, num_tokens: int) -> None:
        self._memory = dataclasses.replace(self._memory, row_tokens=num_tokens)

    @contextlib.contextmanager
    def _reporting_memory(self, batch: Batch, row: Row) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            members = np.unique(batch.table.experience[row.token]).tolist()
            units = {batch.unit_of[member]: member for member in members}
            can_checkpoint = torch.is_grad_enabled() and self.policy.can_checkpoint
            raise OutOfMemory(len(row.layout.tokens), units, can_checkpoint=can_checkpoint) from error

    def accumulate_gradient(
        self, batch: Batch, members: Sequence[int], *, proximal: Reals | None = None
    ) -> tuple[Gauges, Reals]:
        """Add the gradient of these experiences' loss to the parameters, row by row; return gauges and logprobs. [M].

        `proximal` has the logprobs under the weights at the start of the batch, where a ratio needs them. [M]
        """
        weights, gauges = step_weights(batch, members, self.algorithm), Gauges(self._gauge_names)
        logprobs = torch.zeros(len(batch.table), dtype=torch.float32, device=self.policy.device)
        own = self.world.own(self.rows(batch, members), self.policy.operations)

        def prepare(item: tuple[Row, bool]) -> RowData:
            row, counts = item
            weighed = weights if counts else np.zeros_like(weights)
            with self._reporting_memory(batch, row):
                return row_data(self.policy, batch, row, weighed, proximal)

        for number, ((row, counts), data) in enumerate(ahead(own, prepare), 1):
            self.policy.sync_gradients(is_wanted=self._memory.syncs_every_row or number == len(own))
            with self._reporting_memory(batch, row):
                every = self._tokens(*data)
                tokens, imported = parts(every)
                loss = loss_of(tokens, self.algorithm)
                if imported is not None and self.algorithm.imitation is not None:
                    loss = loss + loss_of(imported, self.algorithm.imitation.algorithm)
                whole = loss
                if tokens.values is not None:
                    whole = loss + (tokens.weights * self.algorithm.critic_loss(tokens)).sum()
                # FSDP takes the mean of the processes' gradients; the loss is a sum over them.
                (whole * self.world.size).backward()  # type: ignore[no-untyped-call]
            if counts:
                with torch.no_grad():
                    of_tokens = self.algorithm.gauges(tokens)
                gauges.observe(tokens, loss, of_tokens, imported)
                logprobs[on_device(torch.from_numpy(row.token), self.policy.device)] = every.logprobs.detach()
        gauges.reduce(self.world)
        return gauges, self.world.sum(logprobs).cpu().numpy()

    def _tokens(self, inputs: RowInputs, known: functools.partial[TrainedTokens]) -> TrainedTokens:
        with_values = known.keywords["old_values"] is not None
        logprobs, entropy, values = self._outputs_of(inputs, with_values=with_values)
        reference = self._reference_logprobs(inputs) if self.algorithm.needs_reference else None
        return known(logprobs=logprobs, entropy=entropy, reference=reference, values=values)

    def _outputs_of(self, inputs: RowInputs, *, with_values: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.critic is None or not with_values:
            return *self.policy.logprobs(inputs), None
        logprobs, entropy, hidden_UH = self.policy.outputs(inputs)
        return logprobs, entropy, self.critic.values_of(hidden_UH[inputs.which])

    def _reference_logprobs(self, inputs: RowInputs) -> Tensor:
        if self.policy.settings.kind is PolicyKind.LORA:
            with self.policy.as_reference(self.start):
                return self.policy.logprobs(inputs)[0]
        assert self._reference is not None, "the loss needs a reference and none was built"
        with torch.no_grad():
            return self._reference.logprobs(inputs)[0]

    def _without_gradient(self, compute: Callable[[RowInputs], Tensor], batch: Batch, members: Sequence[int]) -> Reals:
        while True:
            try:
                return self._computed(compute, batch, members)
            except OutOfMemory as error:
                self._take_less_memory(error)

    def _computed(self, compute: Callable[[RowInputs], Tensor], batch: Batch, members: Sequence[int]) -> Reals:
        gathered = torch.zeros(len(batch.table), dtype=torch.float32, device=self.policy.device)
        own = self.world.own(self.rows(batch, members), self.policy.operations)
        with torch.no_grad():
            for (row, counts), inputs in ahead(own, lambda item: inputs_of(self.policy, batch, item[0])):
                with self._reporting_memory(batch, row):
                    found = compute(inputs)
                if counts:
                    gathered[torch.from_numpy(row.token).to(self.policy.device)] = found
        result: Reals = self.world.sum(gathered).cpu().numpy()
        return result


def _full(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def inputs_of(policy: Policy, batch: Batch, row: Row) -> RowInputs:
    temperature = torch.from_numpy(batch.table.temperature[row.token])
    return policy.inputs(
        row, temperature, torch.from_numpy(batch.table.target[row.token]), policy.on_logits(batch, row)
    )


def row_data(policy: Policy, batch: Batch, row: Row, weights: Reals, proximal: Reals | None) -> RowData:
    """Return a row's inputs and tokens; may be called in a thread while another row is computed.

    `weights` and `proximal` are of each token of the table. [M]
    """
    table = batch.table
    members, sequence = np.unique(table.experience[row.token], return_inverse=True)
    _, pair = np.unique(np.array(batch.unit_of)[members], return_inverse=True)

    def present(values: npt.NDArray[np.generic]) -> Tensor:
        return on_device(torch.from_numpy(values), policy.device)

    def column(values: npt.NDArray[np.generic] | None) -> Tensor | None:
        return None if values is None else present(values[row.token])

    known = functools.partial(
        TrainedTokens,
        behaviour=present(table.behaviour[row.token]),
        advantages=present(table.advantages[row.token]),
        weights=present(weights[row.token]),
        sequence=present(sequence),
        proximal=column(proximal),
        old_values=column(table.values),
        returns=column(table.returns),
        pair=present(pair),
        chosen=present(np.array(batch.chosen)[members]),
        is_imported=column(table.experience >= batch.num_sampled if batch.has_imported else None),
    )
    return inputs_of(policy, batch, row), known
