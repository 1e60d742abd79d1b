"""Rows that do not fit into memory: what is tried before data is left out, and what is kept of it across restarts.

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

from turnwise.files import write_whole

log = logging.getLogger(__name__)

FILE = "memory_limits.json"
"""In `policies_dir`. Delete it after a change of hardware or settings that leaves more memory."""
OUT_OF_MEMORY = "out_of_memory"


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
