"""What a verification found: how much was checked, what could not be, and every mismatch with its exact place."""

from __future__ import annotations

import collections
import dataclasses

from turnwise.types import Json

MISMATCHES_KEPT = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One value that is not what it must be."""

    check: str
    place: str
    """Where: a session and turn with the field, or a file."""
    problem: str


@dataclasses.dataclass(slots=True)
class Verification:
    """The result of a verification."""

    checked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    not_checked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_mismatches: int = 0
    mismatches: list[Mismatch] = dataclasses.field(default_factory=list)
    largest_gap: float = 0.0

    def add(self, check: str, place: str, problem: str) -> None:
        self.num_mismatches += 1
        if len(self.mismatches) < MISMATCHES_KEPT:
            self.mismatches.append(Mismatch(check, place, problem))

    def compare_logprobs(self, stored: float, now: float, tolerance: float, place: str, source: str) -> None:
        """Count a stored logprob and the recomputed one; record a difference over the tolerance, and NaN."""
        self.checked["logprobs"] += 1
        gap = abs(stored - now)
        if gap <= tolerance:
            self.largest_gap = max(self.largest_gap, gap)
        else:
            self.add("logprobs", place, f"{stored:.6g} is stored, {source} {now:.6g}")

    def as_json(self) -> Json:
        return {
            "checked": dict(self.checked),
            "not_checked": dict(self.not_checked),
            "num_mismatches": self.num_mismatches,
            "mismatches": [dataclasses.asdict(mismatch) for mismatch in self.mismatches],
            "largest_logprob_gap": self.largest_gap,
        }
