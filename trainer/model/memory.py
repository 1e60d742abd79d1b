"""What is tried, in which order, where a row does not fit into memory, and what a restart keeps of it.

In this order: activations are recomputed in the backward pass, several processes reduce the gradient after each row,
rows become shorter. Only then is a chain left out. A single process catches a row that does not fit, and goes on.
Several processes cannot: while one fails, the others wait for it in a collective, so all of them end and are started
again. The process that failed writes down what to try, so that the same batch does not end them again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.model.loading import base_of
from turnwise.files import write_whole
from turnwise.types import PolicyKind

if TYPE_CHECKING:
    from trainer.settings import TrainerSettings

log = logging.getLogger(__name__)

FILE = "memory_limits.json"
"""In `policies_dir`. Delete it after a change of hardware or settings that leaves more memory."""
OUT_OF_MEMORY = "out_of_memory"
STATE_BYTES = 16
"""A trained parameter has a weight, a gradient and two moments in float32."""
FROZEN_BYTES = 4
ROW_TOKENS = 8192
ACTIVATIONS_OF_LAYER = 80
"""Bytes that a transformer layer keeps for the backward pass, per token and unit of its hidden size: as measured with
bfloat16 autocast of float32 weights at 0.6B, and more than the 65 at 1.7B."""
GRADIENT_BYTES = 4
"""Each of several processes has the gradient of every parameter: FSDP keeps it until the last row of a step."""


class OutOfMemory(Exception):
    """A row does not fit into the device's memory."""

    def __init__(self, num_tokens: int, units: dict[int, int], *, can_checkpoint: bool = False) -> None:
        super().__init__(f"a row of {num_tokens} tokens does not fit into the device's memory")
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


def note_out_of_memory(directory: Path, error: OutOfMemory, *, is_pairs: bool) -> None:
    """Store what did not fit, for the next start: several processes end together when one runs out of memory."""
    limits = read_limits(directory).after(error, is_pairs=is_pairs)
    write_whole(directory / FILE, json.dumps(dataclasses.asdict(limits)))
    log.error("the trainer ran out of memory; from the next start on: %s", limits)


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


def least_bytes(settings: TrainerSettings, num_parameters: int, num_processes: int) -> int:
    """Return what each process needs on its GPU at least: weights, gradients and moments, without any activations."""
    weight = torch.finfo(getattr(torch, settings.weights_dtype)).bits // 8
    if settings.kind is PolicyKind.LORA:
        each = float(weight)
    else:
        masters = {"device": 8 if weight == GRADIENT_BYTES else 12, "8bit": 2, "host": 0}[settings.optimizer_state]
        each = 2 * weight + masters
    whole_gradient = GRADIENT_BYTES if num_processes > 1 and settings.kind is PolicyKind.FULL else 0
    return int(num_parameters * (each * settings.replicas / num_processes + whole_gradient))


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    return sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.device == device
    )
