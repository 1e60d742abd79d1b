"""The state of one call while it runs."""

from __future__ import annotations

import dataclasses
import datetime
import time

from proxy.calls.capture import Timing
from proxy.calls.replays import RequestIdentity
from proxy.continuation.live import Placement
from proxy.continuation.plan import Plan
from proxy.dialects.base import Call, Captured
from proxy.engines.engine import Lane
from turnwise.types import Session, utc_now


@dataclasses.dataclass(slots=True)
class Running:
    """A call with its session, its prompt and what the engine has answered so far."""

    call: Call
    placement: Placement
    plan: Plan
    identity: RequestIdentity
    call_id: str
    lane: Lane | None = None
    """The engine and weights that serve the call; None until the call is admitted."""
    captured: Captured = dataclasses.field(default_factory=Captured)
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    version_first: int = 0
    version_last: int = 0

    @property
    def session(self) -> Session:
        """The session that the call belongs to."""
        return self.placement.live.session

    @property
    def turn_id(self) -> str:
        """The completion's id, as the engine derives it from the request id."""
        return f"{self.call.dialect.id_prefix}{self.call_id}"

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens so far."""
        sampled = sum(len(choice.token_ids) for choice in self.captured.choices.values())
        return len(self.captured.prompt_token_ids) + sampled

    def timing(self) -> Timing:
        """Return the times and policy versions of the call so far."""
        first = self.first_token_at
        return Timing(
            created_at=self.created_at,
            ttft_seconds=None if first is None else first - self.started,
            duration_seconds=time.perf_counter() - self.started,
            policy_version_first=self.version_first,
            policy_version_last=self.version_last,
            sampling_defaults={} if self.lane is None else self.lane.engine.sampling_defaults,
        )
