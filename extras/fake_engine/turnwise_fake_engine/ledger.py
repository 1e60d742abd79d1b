"""The calls that a fake engine received, and the state that its control routes change.

Tests compare the turns that the proxy stored with the calls that the engine received, so all calls are listed,
including those that a fault broke or whose client disconnected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

from turnwise_fake_engine.script import Script

Json = dict[str, Any]


@dataclasses.dataclass(slots=True)
class SeenCall:
    """One call of a sampling route."""

    index: int
    reply_id: str
    path: str
    headers: dict[str, str]
    body: Any
    outcome: str = "running"
    """One of running, finished, refused, faulted, or aborted (the client disconnected)."""
    fault: str | None = None
    token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    """The sampled token ids of each choice."""
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    versions: list[str] = dataclasses.field(default_factory=list)
    """The labels of the weights at its first token and at its last one."""
    at: float = dataclasses.field(default_factory=time.monotonic)
    """When it arrived, on the monotonic clock."""


class EngineState:
    """The state of a fake engine."""

    def __init__(self, script: Script, model_path: str) -> None:
        self.script = script
        self.model_path = model_path
        """Directory with the tokenizer; the `root` of `/v1/models`."""
        self.calls: list[SeenCall] = []
        self.weights_path = model_path
        self.weight_version = "default"
        self.reloads: list[str] = []
        """Every directory that weights were loaded from, in order."""
        self.receiver: Any = None
        """Receives versions from a trainer's memory, from the first transfer on."""
        self.is_updating = False
        """Whether a weight update was started and not finished."""
        self.received: dict[str, Any] = {}
        """The tensors of the version that was loaded from a trainer's memory last, by name."""
        self.adapters: dict[str, str] = {}
        """LoRA adapters by name, with the directories they came from."""
        self.asleep: set[str] = set()
        """What it gave up to sleep, of `weights` and `kv_cache`."""
        self.sleep_levels: list[int] = []
        """The levels that it was brought to sleep at."""
        self.running = asyncio.Event()
        """Set while sampling is not paused."""
        self.running.set()

    def see(self, reply_id: str, path: str, headers: dict[str, str], body: Any) -> SeenCall:
        """Add a call to the list."""
        call = SeenCall(len(self.calls), reply_id, path, headers, body)
        self.calls.append(call)
        return call

    def logprob_shift(self, model: str | None) -> float:
        """Return the logprob shift of the weights of a model name."""
        return self.script.logprob_shifts.get(Path(self.adapters.get(model or "", self.weights_path)).name, 0.0)

    def summary(self) -> Json:
        """Return all calls, and the number of calls by outcome."""
        outcomes = [call.outcome for call in self.calls]
        return {
            "num_calls": len(self.calls),
            "num_by_outcome": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "data": [dataclasses.asdict(call) for call in self.calls],
        }
