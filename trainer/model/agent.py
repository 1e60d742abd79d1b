"""The policy with its loss: one call is one optimizer step.

The gradient comes with the logprobs of its forward pass, to compare them with the engine's before a weight changes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm, loss_of
from trainer.algorithms.trial import try_algorithm
from trainer.batch.batch import Batch, Reals, Row, pack
from trainer.batch.ratios import Gauges, TrainedTokens
from trainer.model.heads import Head
from trainer.model.inputs import RowInputs, ahead, on_device
from trainer.model.model import Policy, Whole
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError

RowData = tuple[RowInputs, functools.partial[TrainedTokens]]
"""A row's inputs, and its tokens but for what the model computes of them."""


class PolicyAgent:
    """A policy and how it learns."""

    def __init__(self, policy: Policy, settings: TrainerSettings, heads: Sequence[Head] = ()) -> None:
        self.policy = policy
        self.settings = settings
        self.heads = heads
        self.algorithm: Algorithm = settings.algorithm
        self.world = policy.place.world()
        self._gauge_names = try_algorithm(self.algorithm)

    @property
    def row_tokens(self) -> int:
        """Tokens of one packed row. On a CPU attention over a long row costs more than another row does."""
        return self.settings.row_tokens or (8192 if self.policy.device.type == "cuda" else 512)

    def rows(self, batch: Batch, members: Sequence[int]) -> list[Row]:
        packed = pack(batch, members, self.row_tokens if self.policy.shares_rows else None)
        return [self.policy.with_parts(batch, row) for row in packed] if self.policy.terms else packed

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.policy.parameters(), *(each for head in self.heads for each in head.parameters())]

    def shard(self, place: Whole) -> None:
        """Hold policy and reference in this way; before `load`.

        Raises:
            SettingsError: There is a critic, which one process trains.
        """
        for head in self.heads:
            head.shard(place)
        self.policy.place = place
        self.world = place.world()

    def load(self, seed: int, *, with_weights: bool = True) -> None:
        """Load the policy afresh, unless a saved state replaces its weights, and what its loss needs beside it."""
        self.world = self.policy.place.world()
        self.policy.load(seed, with_weights=with_weights)
        for head in self.heads:
            head.load(seed)

    def find_room(self, *, is_new: bool) -> None:
        """Prepare for rows, before the first one; `is_new` says that the optimizer has allocated no moments yet."""

    def finish(self, num_trained: int, reasons: Collection[str]) -> None:
        """Take the end of a batch: its trained groups, and why others are not trained."""

    def computing(self, batch: Batch, row: Row) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return the context in which a row is prepared and computed."""
        return contextlib.nullcontext()

    def logprobs_of(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the logprobs of the members' sampled tokens under the present weights, 0 for the other tokens. [M].

        Raises:
            Unfit: Some of them cannot be computed.
        """
        found: Reals = self.without_gradient(lambda inputs: self.policy.logprobs(inputs)[0], batch, members)[0]
        return found

    def column_of(self, name: str, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the column that a head computes of the members' trained tokens, 0 for the other tokens. [M].

        Raises:
            Unfit: Some of them cannot be computed.
        """
        head = next(head for head in self.heads if head.column == name)
        found: Reals = self.without_gradient(
            lambda inputs: head.of(inputs, self.policy.output(inputs)), batch, members
        )[0]
        return found

    def gradient(
        self, optimizer: torch.optim.Optimizer, batch: Batch, members: Sequence[int], proximal: Reals | None = None
    ) -> tuple[Gauges, Reals]:
        """Compute the gradient of one optimizer step; return gauges, and the logprobs of the members' tokens. [M].

        Raises:
            Unfit: Some of them cannot be computed. The gradient is cleared.
        """
        self.clear_gradients(optimizer)
        return self.accumulate_gradient(batch, members, proximal=proximal)

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        """Update the weights; return the gradient's norm before clipping. A gradient that is not finite gives NaN."""
        own = [(head.optimizer, head.parameters()) for head in self.heads if head.optimizer is not None]
        trained = [(optimizer, self.policy.parameters()), *own]
        norms = [self._clip(parameters) for _, parameters in trained]
        if not np.isfinite(norms).all():
            return np.nan
        for each, _ in trained:
            each.step()
        return norms[0]

    def _clip(self, parameters: list[torch.nn.Parameter]) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        return float(getattr(norm, "full_tensor", lambda: norm)().item())

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for each in (optimizer, *(head.optimizer for head in self.heads)):
            if each is not None:
                each.zero_grad(set_to_none=True)

    def accumulate_gradient(
        self, batch: Batch, members: Sequence[int], *, proximal: Reals | None = None
    ) -> tuple[Gauges, Reals]:
        """Add the gradient of these experiences' loss to the parameters, row by row; return gauges and logprobs. [M].

        `proximal` has the logprobs under the weights at the start of the batch, where a ratio needs them. [M]
        """
        weights, gauges = self.algorithm.weights(batch, members), Gauges(self._gauge_names)
        logprobs = torch.zeros(len(batch.table), dtype=torch.float32, device=self.policy.device)
        own = self.world.own(self.rows(batch, members), self.policy.operations)

        def prepare(item: tuple[Row, bool]) -> RowData:
            row, counts = item
            weighed = weights if counts else np.zeros_like(weights)
            with self.computing(batch, row):
                return row_data(self.policy, batch, row, weighed, proximal)

        for number, ((row, counts), data) in enumerate(ahead(own, prepare), 1):
            self.policy.place.sync_gradients(self.policy, is_last=number == len(own))
            with self.computing(batch, row):
                every = self.tokens(*data)
                (tokens, _), *others = parts = self.algorithm.parts(every, batch, row)
                loss = functools.reduce(torch.add, (loss_of(*part) for part in parts))
                whole = functools.reduce(lambda known, head: head.with_loss(known, tokens), self.heads, loss)
                # Processes take the mean of their gradients; the loss is a sum over them.
                (whole * self.world.size).backward()  # type: ignore[no-untyped-call]
            if counts:
                with torch.no_grad():
                    of_tokens = self.algorithm.gauges(tokens)
                gauges.observe(tokens, loss, of_tokens, *(each for each, _ in others))
                logprobs[on_device(torch.from_numpy(row.token), self.policy.device)] = every.logprobs.detach()
        gauges.reduce(self.world)
        return gauges, self.world.sum(logprobs).cpu().numpy()

    def tokens(self, inputs: RowInputs, known: functools.partial[TrainedTokens]) -> TrainedTokens:
        logprobs, entropy, output = self.policy.outputs(inputs)
        columns = {head.column: head.of(inputs, output) for head in self.heads}
        return known(logprobs=logprobs, entropy=entropy, **columns)

    def without_gradient(
        self, compute: Callable[[RowInputs], Tensor], batch: Batch, members: Sequence[int], num_columns: int = 1
    ) -> Reals:
        """Return what is computed of each trained token, each column in a row. [C, M]."""
        gathered = torch.zeros(num_columns, len(batch.table), dtype=torch.float32, device=self.policy.device)
        own = self.world.own(self.rows(batch, members), self.policy.operations)
        with torch.no_grad():
            for (row, counts), inputs in ahead(own, lambda item: inputs_of(self.policy, batch, item[0])):
                with self.computing(batch, row):
                    found = compute(inputs)
                if counts:
                    gathered[:, torch.from_numpy(row.token).to(self.policy.device)] = found
        result: Reals = self.world.sum(gathered).cpu().numpy()
        return result


class Schedule:
    """The learning rate of each optimizer step: a linear warm-up by steps, then constant, or a fall to zero by batches.

    A batch of few groups takes fewer steps than `num_minibatches`, and one that is refused takes none. By steps a decay
    would end above zero; a run ends after `total_batches` batches, whatever they were. The rate is a function of the
    run's counts, so a run can resume under another schedule or rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainerSettings) -> None:
        if settings.schedule != "constant" and settings.total_batches is None:
            raise SettingsError(
                f"schedule={settings.schedule!r} needs total_batches: set it, or use schedule='constant'"
            )
        self._optimizer = optimizer
        self.base_rates = [group["lr"] for group in optimizer.param_groups]
        self._kind = settings.schedule
        self._warmup = settings.num_warmup_updates
        self._steps_of_batch = settings.num_minibatches * settings.reuse_epochs
        self._length = max((settings.total_batches or 0) * self._steps_of_batch - self._warmup, 1)

    def set(self, num_updates: int, num_batches: float) -> None:
        """Set the rates of the next step: after these steps and batches, of the present one the part that is done."""
        factor = self.factor(num_updates, num_batches)
        for group, rate in zip(self._optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    def factor(self, num_updates: int, num_batches: float) -> float:
        risen = min((num_updates + 1) / (self._warmup + 1), 1.0)
        if self._kind == "constant":
            return risen
        done = min(max((num_batches * self._steps_of_batch - self._warmup) / self._length, 0.0), 1.0)
        return min(risen, 1.0 - done if self._kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2)


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
    )
    return inputs_of(policy, batch, row), known
