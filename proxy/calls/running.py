"""The state of one call while it runs."""

from __future__ import annotations

import dataclasses
import datetime
import time

from proxy.calls.capture import Timing
from proxy.calls.replays import RequestIdentity
from proxy.continuation.memory import Placement
from proxy.continuation.plan import Plan
from proxy.dialects.base import Call
from proxy.dialects.captured import Captured
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
    has_waited: bool = False
    """Whether the call has waited in vain for the proxy's first engine."""
    lane: Lane | None = None
    """The engine and weights that serve the call; None until the call is admitted."""
    captured: Captured = dataclasses.field(default_factory=Captured)
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    num_prompt_tokens: int = 0
    """Prompt tokens that the engine has echoed; counted when the turns are built, because a long prompt takes time."""
    first_token_at: float | None = None
    has_sent: bool = False
    """Whether events of a stream were sent to the client."""
    version_first: int = 0
    version_last: int = 0

    @property
    def session(self) -> Session:
        """The session that the call belongs to."""
        return self.placement.live.session

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason."""
        choices = self.captured.choices.values()
        return len(choices) >= self.call.num_choices and all(each.finish_reason is not None for each in choices)

    @property
    def turn_id(self) -> str:
        """The completion's id, as the engine derives it from the request id."""
        return f"{self.call.dialect.id_prefix}{self.call_id}"

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens so far."""
        return self.num_prompt_tokens + sum(len(choice.token_ids) for choice in self.captured.choices.values())

    def timing(self) -> Timing:
        """Return the times and policy versions of the call so far."""
        first = self.first_token_at
        return Timing(
            created_at=self.created_at,
            ttft_seconds=None if first is None else first - self.started,
            duration_seconds=time.perf_counter() - self.started,
            policy_version_first=self.version_first,
            policy_version_last=self.version_last,
            sampling=self.call.sampling if self.lane is None else self.lane.engine.effective_sampling(self.call),
        )
