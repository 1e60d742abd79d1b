"""The certificate of a model: what the whole product did with it on this machine, stored beside its weights.

`turnwise certify` writes it, `turnwise up` reads it, and docs/models.md is made from such rows. It belongs to the
digest of the weights: other weights in the same directory have no certificate.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Self

from turnwise.errors import SettingsError
from turnwise.types import Json, PolicyKind
from turnwise.verify.records import Verification
from turnwise.version_directory import base_version, read_json

FILE = "turnwise-certificate.json"
LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest gap in float32, and the mean one in bfloat16, up to which what is compared is the same, in nats."""


class Gaps(Verification):
    """A verification that keeps every difference, whatever the tolerance."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def compare_logprobs(self, stored: float, now: float, *_: object) -> None:
        self.found.append(abs(stored - now) if not math.isnan(now) else math.inf)

    def as_row(self) -> Json:
        """Return the largest and the mean difference, and of how many tokens."""
        return {
            "max": max(self.found, default=math.inf),
            "mean": sum(self.found) / len(self.found) if self.found else math.inf,
            "tokens": len(self.found),
        }


@dataclasses.dataclass(slots=True)
class KindResult:
    """What training of one kind came to."""

    kind: str
    stages: dict[str, Json] = dataclasses.field(default_factory=dict)
    """By what was played: the policy version that sampled it, and the gaps to a forward pass of its files."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """How rows are shared, and what the adapter changes."""
    refused: str | None = None
    """Why it was given up, in the words of the process that did; None where all stages were played."""

    def gap(self, dtype: str) -> float:
        """Return the number that is held against the limit."""
        field = "max" if dtype == "float32" else "mean"
        return max((float(stage[field]) for stage in self.stages.values()), default=math.inf)

    def verdict(self, dtype: str) -> str:
        if self.refused is not None:
            return "refused"
        return "right" if self.gap(dtype) <= LIMITS[dtype] else "wrong"


@dataclasses.dataclass(slots=True)
class Certificate:
    """A model and the results of each kind of training."""

    model_digest: str
    architecture: str
    dtype: str
    """Of the engine."""
    made_with: dict[str, str]
    """Versions of the packages."""
    kinds: list[KindResult]

    @classmethod
    def read(cls, model: str) -> Self | None:
        """Return the certificate of a model; None where it has none, or one of other weights."""
        path = Path(model) / FILE
        if not path.is_file():
            return None
        found = read_json(path)
        made = cls(**{**found, "kinds": [KindResult(**each) for each in found["kinds"]]})
        return made if made.model_digest == base_version(model).model_digest else None

    def write(self, model: str) -> Path:
        path = Path(model) / FILE
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        return path

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rows(self) -> list[str]:
        """Return a sentence for each kind."""
        found = []
        for each in self.kinds:
            verdict, stages = each.verdict(self.dtype), ", ".join(each.stages)
            text = each.refused or f"largest gap {each.gap(self.dtype):.2g} nats in {self.dtype} ({stages})"
            notes = "".join(f"; {name}: {note}" for name, note in each.notes.items())
            found.append(f"{self.architecture}, {each.kind}: {verdict}: {text}{notes}")
        return found

    def check(self, kind: PolicyKind) -> None:
        """Refuse a kind of training that was tried with this model and did not come out right.

        Raises:
            SettingsError: It was.
        """
        for each in self.kinds:
            if each.kind == kind.value and (verdict := each.verdict(self.dtype)) != "right":
                reason = each.refused or f"a gap of {each.gap(self.dtype):.2g} nats"
                raise SettingsError(
                    f"the certificate of this model ({FILE}) says that kind={each.kind!r} is {verdict}: {reason}; set "
                    "another kind, or run `turnwise certify` again"
                )
