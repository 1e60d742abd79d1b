"""Rows that do not fit into memory: the error, and the lengths to avoid across restarts of several processes.

A single process catches a row that does not fit, and computes shorter ones. Several processes cannot: while one fails,
the others wait for it in a collective, so all of them end and are started again. The process that failed writes down
what to avoid, so that the same batch does not end them again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

FILE = "memory_limits.json"
"""In `policies_dir`. Delete it after a change of hardware or settings that leaves more memory."""


class OutOfMemory(Exception):
    """A row does not fit into the device's memory."""

    def __init__(self, num_tokens: int, units: dict[int, int]) -> None:
        super().__init__(f"a row of {num_tokens} tokens does not fit into the device's memory")
        self.num_tokens = num_tokens
        self.units = units
        """The chains, or pairs, of the row, each with one of its experiences. A row of one of them cannot be cut."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bounds that hold from the next start on; None where nothing failed."""

    row_tokens: int | None = None
    """Tokens of a packed row."""
    chain_tokens: int | None = None
    """Tokens of a chain; longer ones are not trained."""

    def after(self, num_tokens: int, num_units: int, *, is_pairs: bool) -> MemoryLimits:
        """Return the limits after a row failed: of several chains or pairs a shorter row, of one nothing as long."""
        if num_units > 1:
            return dataclasses.replace(self, row_tokens=_smaller(self.row_tokens, num_tokens // 2))
        # The longer chain of a pair has at least half of its tokens.
        longest = (num_tokens - 1) // 2 if is_pairs else num_tokens - 1
        return dataclasses.replace(self, chain_tokens=_smaller(self.chain_tokens, longest))


def read_limits(directory: Path) -> MemoryLimits:
    """Return the limits of earlier starts."""
    path = directory / FILE
    if not path.is_file():
        return MemoryLimits()
    limits = MemoryLimits(**json.loads(path.read_text(encoding="utf-8")))
    log.info("memory limits of an earlier start hold: %s; delete %s to lift them", limits, path)
    return limits


def note_out_of_memory(directory: Path, error: OutOfMemory, *, is_pairs: bool) -> None:
    """Store what did not fit, for the next start: several processes end together when one runs out of memory."""
    limits = read_limits(directory).after(error.num_tokens, len(error.units), is_pairs=is_pairs)
    staging = directory / f".{FILE}.{os.getpid()}"  # several processes may run out of memory at the same time
    staging.write_text(json.dumps(dataclasses.asdict(limits)), encoding="utf-8")
    staging.replace(directory / FILE)
    log.error("the trainer ran out of memory; from the next start on: %s", limits)


def _smaller(limit: int | None, found: int) -> int:
    return max(found if limit is None else min(limit, found), 2)
