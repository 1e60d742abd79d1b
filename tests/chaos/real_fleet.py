"""Real vLLMs on the CPU that come and go beside the stand-ins: behind proxies and on a database of their own.

A stand-in and a vLLM cannot serve one model, so that no proxy takes both. What a stand-in would know of the versions
that it sampled with is computed here: each stored logprob is compared with those of `transformers` on the version that
the turn names.
"""

import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from chaos import invariants
from chaos.agents import Observed
from chaos.fleet import FLAGS, Fleet
from support.checkpoints import forward_of, with_probe, write_perturbed
from support.control_plane import metric_at
from support.engines import running_engine, small_model

from turnwise.store.turns import TurnView

TOLERANCE = 1e-3
"""Nats between the engine and `transformers`; both compute in float32."""
NUM_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class RealEngine:
    url: str
    pid: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class RealFleet(Fleet):
    """Calls wait where the last engine is being replaced: a vLLM takes half a minute to start."""

    flags = (*FLAGS, "--engine-wait-seconds", "300")
    fields: ClassVar[dict[str, Any]] = {
        "model": "small",
        "temperature": 1.0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }

    def start(self, port: int = 0) -> RealEngine:
        log = self._directory / f"engine-{len(self.all)}.log"
        started = self._running.enter_context(running_engine(small_model(), log, port=port))
        engine = RealEngine(started.url, started.pid)
        self.all.append(engine)
        return engine

    def is_idle(self, engine: RealEngine) -> bool:
        return all(metric_at(engine.url, f"vllm:num_requests_{each}") == 0 for each in ("running", "waiting"))

    def write_version(self, place: Path) -> Path:
        written = write_perturbed(small_model(), place, self.version)
        return with_probe(written, forward_of(written))

    def violations(self, observed: Observed) -> list[str]:
        stored = invariants.stored_turns(self.database)
        return [*invariants.not_whole(observed, stored), *self._wrong_versions(stored)]

    def _wrong_versions(self, stored: Sequence[tuple[str, TurnView]]) -> list[str]:
        """Each token has the logprob of one of the versions that its turn names, and no later token of an older one."""
        logprobs = functools.cache(
            lambda version: forward_of(self._directory / f"v{version}" if version else small_model())
        )
        found = []
        for _, view in stored:
            turn = view.turn
            prompt, ids = view.prompt_token_ids.tolist(), view.turn.token_ids.tolist()
            if not ids:
                continue
            span = range(turn.policy_version_first, turn.policy_version_last + 1)
            theirs = torch.tensor(turn.logprobs)
            fits = [(logprobs(each)(prompt + ids, len(prompt)) - theirs).abs() < TOLERANCE for each in span]
            at = 0
            for token in range(len(ids)):
                while at < len(fits) and not fits[at][token]:
                    at += 1
            if at == len(fits):
                found.append(f"turn {turn.turn_id} has logprobs of another version than {span.start} to {span[-1]}")
        return found
