"""What is tried, in which order, where a row does not fit into memory, and what a restart keeps of it.

In this order: activations are recomputed in the backward pass, several processes reduce the gradient after each row,
rows become shorter. Only then is a chain left out. A single process catches a row that does not fit, and goes on.
Several processes cannot: while one fails, the others wait for it in a collective, so all of them end and are started
again. The process that failed writes down what to try, so that the same batch does not end them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.batch.batch import Batch, Reals, Row
from trainer.batch.forest import side_by_side
from trainer.batch.ratios import Gauges
from trainer.batch.selection import TOO_LONG, Unfit
from trainer.features.devices import Sharded, least_bytes
from trainer.features.gap import Verdicts
from trainer.features.optimizers import state_of
from trainer.model.agent import PolicyAgent
from trainer.model.inputs import RowInputs
from trainer.model.loading import base_of, model_class, prepared, trainable_config
from trainer.model.model import Policy
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.files import write_whole
from turnwise.settings import Settings
from turnwise.types import PolicyKind

log = logging.getLogger(__name__)

RECOMPUTED = "from now on activations are recomputed, as gradient_checkpointing=true does from the start"
SHORTEST_ROW = 16

FILE = "memory_limits.json"
"""In `policies_dir` of the process that failed. Delete it after a change that leaves more memory."""
OUT_OF_MEMORY = "out_of_memory"
STATE_BYTES = 16
"""A trained parameter has a weight, a gradient and two moments in float32."""
FROZEN_BYTES = 4
ROW_TOKENS = 8192
ACTIVATIONS_OF_LAYER = 80
"""Bytes that a transformer layer keeps for the backward pass, per token and unit of its hidden size: as measured with
bfloat16 autocast of float32 weights at 0.6B, and more than the 65 at 1.7B."""
RECOMPUTED_OF_HIDDEN, RECOMPUTED_OF_INNER, KEPT_OF_HIDDEN = 90, 24, 4
"""Bytes per token that the backward pass needs where activations are recomputed: for each unit of the hidden size and
of the inner one in the layer that it is at, and for each unit of the hidden size in all others. Of float32."""
LOSS_BYTES = 2**30
"""What a chunk of logits takes, and what torch keeps for itself."""
GRADIENT_BYTES = 4
"""Each of several processes has the gradient of every parameter: FSDP keeps it until the last row of a step."""


class MemorySettings(Settings):
    """How memory is saved."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. By default where the weights,
    the optimizer and the activations of a row of 8192 tokens would not fit into the free memory of the GPU; and, also
    if this is false, once a row does not fit."""


class OutOfMemory(Unfit):
    """A row does not fit into the device's memory."""

    def __init__(self, num_tokens: int, units: dict[int, int], *, can_checkpoint: bool = False) -> None:
        problem = f"a row of {num_tokens} tokens does not fit into the device's memory"
        super().__init__(problem, units.values(), f"{OUT_OF_MEMORY}: {problem}; set max_chain_tokens below that")
        self.num_tokens = num_tokens
        self.units = units
        """The chains, or pairs, of the row, each with one of its experiences. A row of one of them cannot be cut."""
        self.can_checkpoint = can_checkpoint
        """Whether less memory would do if activations were recomputed."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The limits that hold from the next start on."""

    checkpoints_layers: bool = False
    """Recompute activations, whatever `gradient_checkpointing` says."""
    syncs_every_row: bool = False
    """Reduce the gradient after each row: until then each process holds 4 bytes for each parameter of the model."""
    row_tokens: int | None = None
    """Tokens of a packed row; None where nothing failed."""
    chain_tokens: int | None = None
    """Tokens of a chain; longer ones are not trained. None where nothing failed."""

    def after(self, error: OutOfMemory, *, is_pairs: bool) -> MemoryLimits:
        """Return the limits after a row failed: the first step that was not taken yet.

        The last two steps: several chains or pairs get a shorter row, and one that is too long is left out from now on.
        """
        if error.can_checkpoint:
            return dataclasses.replace(self, checkpoints_layers=True)
        if not self.syncs_every_row:
            return dataclasses.replace(self, syncs_every_row=True)
        if len(error.units) > 1:
            return dataclasses.replace(self, row_tokens=_smaller(self.row_tokens, error.num_tokens // 2))
        # The longer chain of a pair has at least half of its tokens.
        longest = (error.num_tokens - 1) // 2 if is_pairs else error.num_tokens - 1
        return dataclasses.replace(self, chain_tokens=_smaller(self.chain_tokens, longest))


def read_limits(directory: Path) -> MemoryLimits:
    path = directory / FILE
    if not path.is_file():
        return MemoryLimits()
    limits = MemoryLimits(**json.loads(path.read_text(encoding="utf-8")))
    log.info("memory limits of an earlier start hold: %s; delete %s to lift them", limits, path)
    return limits


def strictest(found: Sequence[MemoryLimits]) -> MemoryLimits:
    """Return what holds for processes of which each has read its own directory."""
    rows = [limits.row_tokens for limits in found if limits.row_tokens is not None]
    chains = [limits.chain_tokens for limits in found if limits.chain_tokens is not None]
    return MemoryLimits(
        checkpoints_layers=any(limits.checkpoints_layers for limits in found),
        syncs_every_row=any(limits.syncs_every_row for limits in found),
        row_tokens=min(rows, default=None),
        chain_tokens=min(chains, default=None),
    )


def note_out_of_memory(directory: Path, limits: MemoryLimits) -> None:
    """Store what holds from the next start on: several processes end together when one runs out of memory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / FILE, json.dumps(dataclasses.asdict(limits)))
    log.error("the trainer ran out of memory; from the next start on: %s", limits)


class SavingAgent(PolicyAgent):
    """A policy agent that saves memory where a row does not fit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self.settings, MemorySettings)
        self._wants_checkpoints = self.settings.gradient_checkpointing
        self.limits: MemoryLimits | None = None
        """None before the first `load`."""
        self._verdicts = Verdicts()

    @property
    def row_tokens(self) -> int:
        bound = None if self.limits is None else self.limits.row_tokens
        return super().row_tokens if bound is None else min(super().row_tokens, bound)

    @property
    def can_checkpoint(self) -> bool:
        base = self.policy.base
        return bool(base.supports_gradient_checkpointing) and not base.is_gradient_checkpointing

    def load(self, seed: int, *, with_weights: bool = True) -> None:
        super().load(seed, with_weights=with_weights)
        if self.limits is None:
            self._limit(strictest(self.world.gather(read_limits(self.settings.policies_dir))))
        assert self.limits is not None
        wanted = self.limits.checkpoints_layers or self._wants_checkpoints
        if needs_checkpointing(self.policy.model, self.policy.device) if wanted is None else wanted:
            checkpoint_layers(self.policy)

    def find_room(self, *, is_new: bool) -> None:
        """Find rows that fit into memory beside the moments that the optimizer of a new run allocates later.

        Where a row does not fit, activations are recomputed; then rows are halved.

        Raises:
            SettingsError: Not even a very short row fits.
        """
        if not self._probes_rows():
            return
        has_moments = is_new and state_of(self.settings) == "device"
        reserved_bytes = 8 * sum(parameter.numel() for parameter in self.parameters()) if has_moments else 0
        while not self._fits(self.row_tokens, reserved_bytes):
            if self.can_checkpoint:
                log.warning("a row of %d tokens does not fit into memory: %s", self.row_tokens, RECOMPUTED)
                checkpoint_layers(self.policy)
                continue
            shorter = self.row_tokens // 2
            if shorter < SHORTEST_ROW:
                raise SettingsError(
                    f"a row of {self.row_tokens} tokens does not fit into the memory of {self.policy.device} beside "
                    f"weights and optimizer: set weights_dtype='bfloat16' or optimizer_state='host', use more "
                    "devices, or lower gpu_memory in [engine]"
                )
            log.warning("a row of %d tokens does not fit into memory, trying %d", self.row_tokens, shorter)
            self._limit(dataclasses.replace(self._known_limits, row_tokens=shorter))
        log.info("rows of %d tokens fit into memory", self.row_tokens)

    def gradient(
        self, optimizer: torch.optim.Optimizer, batch: Batch, members: Sequence[int], proximal: Reals | None = None
    ) -> tuple[Gauges, Reals]:
        """Compute the gradient; each time that a row does not fit into memory, the next step is taken that saves some.

        Raises:
            OutOfMemory: A single chain, or pair, does not fit into memory. The gradient is cleared.
        """
        while True:
            try:
                return super().gradient(optimizer, batch, members, proximal)
            except OutOfMemory as error:
                self.clear_gradients(optimizer)
                self._take_less_memory(error)

    def without_gradient(
        self, compute: Callable[[RowInputs], torch.Tensor], batch: Batch, members: Sequence[int], num_columns: int = 1
    ) -> Reals:
        while True:
            try:
                return super().without_gradient(compute, batch, members, num_columns)
            except OutOfMemory as error:
                self._take_less_memory(error)

    @contextlib.contextmanager
    def computing(self, batch: Batch, row: Row) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            members = np.unique(batch.table.experience[row.token]).tolist()
            units = {batch.unit_of[member]: member for member in members}
            can_checkpoint = torch.is_grad_enabled() and self.can_checkpoint
            raise OutOfMemory(len(row.layout.tokens), units, can_checkpoint=can_checkpoint) from error

    def finish(self, num_trained: int, reasons: Collection[str]) -> None:
        """Take the end of a batch: its trained groups, and why others are not trained.

        Raises:
            SettingsError: Nearly all of the latest groups do not fit into memory.
        """
        bounds_chains = self._known_limits.chain_tokens is not None
        left_out = (OUT_OF_MEMORY, TOO_LONG) if bounds_chains else (OUT_OF_MEMORY,)
        check_fitting(self._verdicts, num_trained, reasons, left_out)

    @property
    def _known_limits(self) -> MemoryLimits:
        return self.limits or MemoryLimits()

    def _limit(self, limits: MemoryLimits) -> None:
        longest, wanted = limits.chain_tokens, self.settings.max_chain_tokens
        if longest is not None and (wanted is None or longest < wanted):
            self.settings = self.settings.model_copy(update={"max_chain_tokens": longest})
        self.limits = limits
        if isinstance(self.policy.place, Sharded):
            self.policy.place.syncs_every_row = limits.syncs_every_row

    def _probes_rows(self) -> bool:
        return self.policy.device.type == "cuda" and self.world.size == 1

    def _fits(self, num_tokens: int, reserved_bytes: int) -> bool:
        layout, (places,) = side_by_side([np.arange(num_tokens, dtype=np.int32) % self.policy.config.vocab_size])
        row = Row(layout=layout, predictor=places, token=places)
        try:
            reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=self.policy.device)
            inputs = self.policy.inputs(row, torch.ones(num_tokens), torch.zeros(num_tokens))
            logprobs, entropy, output = self.policy.outputs(inputs)
            columns = [logprobs, entropy, *(head.of(inputs, output) for head in self.heads)]
            torch.stack([each.sum() for each in columns]).sum().backward()  # type: ignore[no-untyped-call]
            del reserved
        except torch.OutOfMemoryError:
            return False
        finally:
            for parameter in self.parameters():
                parameter.grad = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return True

    def _take_less_memory(self, error: OutOfMemory) -> None:
        """Recompute activations from now on, or else halve the rows; raise the error where neither can help.

        With several processes the others already wait in a collective: they all end, and are started again.
        """
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.world.size > 1:
            limits = self._known_limits.after(error, is_pairs=self.algorithm.trains_pairs)
            note_out_of_memory(self.settings.policies_dir, limits)
            raise error
        if error.can_checkpoint:
            log.warning("%s: %s", error, RECOMPUTED)
            checkpoint_layers(self.policy)
        elif len(error.units) > 1:
            self._limit(dataclasses.replace(self._known_limits, row_tokens=max(error.num_tokens // 2, 1)))
            log.warning("%s; rows hold at most %d tokens from now on", error, self.row_tokens)
        else:
            raise error


def checkpoint_layers(policy: Policy) -> None:
    """Recompute the activations of a model's layers in the backward pass."""
    policy.base.gradient_checkpointing_enable({"use_reentrant": False})
    if policy.base is not policy.model:
        policy.base.enable_input_require_grads()  # with frozen embeddings no input of a layer would need a gradient


def check_fitting(latest: Verdicts, num_trained: int, reasons: Iterable[str], left_out: tuple[str, ...]) -> None:
    """Take a batch: its trained groups, why others are not trained, and how reasons of memory begin.

    Raises:
        SettingsError: Nearly all of the latest groups do not fit into memory.
    """
    num_large = sum(reason.startswith(left_out) for reason in reasons)
    if (most := latest.add([*[False] * num_trained, *[True] * num_large])) is not None:
        raise SettingsError(
            f"{most} do not fit into the device's memory, although activations are "
            "recomputed and a row holds one chain: use larger devices or more of them (multi_devices), "
            "weights_dtype='bfloat16', optimizer_state='host', or a lower gpu_memory in [engine], and delete "
            f"{FILE!r} in policies_dir; to train short chains only, set max_chain_tokens"
        )


def _smaller(limit: int | None, found: int) -> int:
    return max(found if limit is None else min(limit, found), 2)


def needs_checkpointing(model: nn.Module, device: torch.device) -> bool:
    """Return whether training the model would not fit into the device's free memory without checkpointing."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    # Weights that are on the device already are not in `free`, and those of an empty model are sharded.
    shards = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return memory_of_training(model, shards) > free + _bytes_on(model, device)


def memory_of_training(model: nn.Module, num_shards: int = 1) -> int:
    """Return an estimate of the bytes that each process needs.

    They are its share of weights and optimizer, the gradient that several processes keep whole, and the activations of
    a row.
    """
    config: Any = base_of(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    state = (STATE_BYTES * trained + FROZEN_BYTES * frozen) // num_shards
    whole_gradient = GRADIENT_BYTES * trained if num_shards > 1 else 0
    activations = ACTIVATIONS_OF_LAYER * ROW_TOKENS * int(text.hidden_size) * int(text.num_hidden_layers)
    return state + whole_gradient + activations


def longest_chain(settings: TrainerSettings, num_bytes: int) -> int:
    """Return about how many tokens of one chain a process trains with this memory; at most those of the model.

    It counts weights, optimizer and gradient, and what is recomputed; 0 where not even the former fit.
    """
    config = trainable_config(settings)
    with torch.device("meta"):
        model = prepared(model_class(config).from_config(config), settings)
    text = config.get_text_config()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    state = least_bytes(settings, sum(parameter.numel() for parameter in base_of(model).parameters()), 1)
    if settings.kind is PolicyKind.LORA:
        state += STATE_BYTES * trained
    most = int((num_bytes - state - LOSS_BYTES) // bytes_of_token(text))
    return max(0, min(most, getattr(text, "max_position_embeddings", None) or most))


def bytes_of_token(text: Any) -> int:
    """Return the bytes per token that the backward pass needs where activations are recomputed, by a configuration."""
    experts = getattr(text, "moe_intermediate_size", None) or 0
    inner = max(
        getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        experts * (getattr(text, "num_experts_per_tok", None) or 0),
    )
    kept = KEPT_OF_HIDDEN * text.hidden_size * text.num_hidden_layers
    return int(kept + RECOMPUTED_OF_HIDDEN * text.hidden_size + RECOMPUTED_OF_INNER * inner)


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    return sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.device == device
    )
