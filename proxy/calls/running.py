"""The state of one call while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import time

from proxy.calls.capture import Timing
from proxy.calls.replays import RequestIdentity
from proxy.continuation.live import Placement
from proxy.continuation.plan import Plan
from proxy.dialects.base import Call, Captured
from proxy.dialects.engine_reply import LONG_ECHO_BYTES, LongEcho, cut_echo, cut_long_echo
from proxy.engines.engine import Lane
from turnwise.types import SHADOW, Session, utc_now

log = logging.getLogger(__name__)


class WrongPrompt(Exception):
    """An engine that did not get all messages sampled after another prompt than the ids that it got."""


@dataclasses.dataclass(slots=True)
class Running:
    """A call with its session, its prompt and what the engine has answered so far."""

    call: Call
    placement: Placement
    plan: Plan
    identity: RequestIdentity
    call_id: str
    sent_ids: list[bytes] | None = None
    """The pieces of the JSON array of the prompt's ids that was sent; None where the engine renders the messages."""
    num_omitted: int = 0
    """How many of the first messages were not sent."""
    needs_all_messages: bool = False
    """Whether all messages must be sent, because a request without the first ones has failed."""
    has_checked_prompt: bool = False
    """Whether the engine was found to sample after the ids that it got instead of messages."""
    has_waited: bool = False
    """Whether the call has waited in vain for the proxy's first engine."""
    lane: Lane | None = None
    """The engine and weights that serve the call; None until the call is admitted."""
    captured: Captured = dataclasses.field(default_factory=Captured)
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    has_cut_echo: bool = False
    """Whether echoed prompt ids were cut out of the reply."""
    long_echo: LongEcho | None = None
    """Echoed prompt ids of a prompt that the engine rendered, if they are long."""
    num_prompt_tokens: int = 0
    """Prompt tokens that the engine has echoed; counted when the turns are built, because a long prompt takes time."""
    first_token_at: float | None = None
    version_first: int = 0
    version_last: int = 0

    @property
    def session(self) -> Session:
        """The session that the call belongs to."""
        return self.placement.live.session

    @property
    def is_shadow(self) -> bool:
        """Whether this is a shadow sample, which is counted apart from the calls of clients."""
        return self.session.opened_by == SHADOW

    @property
    def turn_id(self) -> str:
        """The completion's id, as the engine derives it from the request id."""
        return f"{self.call.dialect.id_prefix}{self.call_id}"

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens so far."""
        return self.num_prompt_tokens + sum(len(choice.token_ids) for choice in self.captured.choices.values())

    @property
    def echoes_prompt(self) -> bool:
        """Whether the engine has echoed the prompt's ids as they were sent, so that they were not decoded."""
        return self.has_cut_echo and not self.captured.prompt_ids

    @property
    def awaits_echo(self) -> bool:
        """Whether the echoed prompt ids are still to be cut out; they stay for a client that asked for them."""
        return self.sent_ids is not None and not self.has_cut_echo and not self.call.wants_token_ids

    def cut_echo(self, reply: bytes) -> bytes:
        """Return a reply or chunk without the echoed prompt ids, if they are as sent."""
        sent = self.sent_ids
        if sent is None or self.has_cut_echo:
            return reply
        rest, self.has_cut_echo = cut_echo(reply, sent)
        return rest

    async def cut_long_echo(self, replies: list[bytes]) -> list[bytes]:
        """Return replies or chunks without long prompt ids that the engine rendered; they are checked in a thread."""
        if self.sent_ids is not None or self.call.wants_token_ids:
            return replies
        kept = []
        for reply in replies:
            is_long = self.long_echo is None and len(reply) >= LONG_ECHO_BYTES
            found = await asyncio.to_thread(cut_long_echo, reply) if is_long else None
            self.long_echo = found or self.long_echo
            kept.append(reply if found is None else found.rest)
        self.restore_long_echo()
        return kept

    def restore_long_echo(self) -> None:
        """Put the prompt ids that were cut out into what was captured."""
        if self.long_echo is not None:
            self.captured.prompt_ids, self.captured.num_prompt_ids = self.long_echo.ids, self.long_echo.num_ids

    @property
    def is_prompt_right(self) -> bool:
        """Whether the reply may be sent: the engine got all messages, or was found to sample after the ids."""
        return not self.num_omitted or self.has_checked_prompt

    def check_prompt(self) -> None:
        """Check, once the engine has answered, that it sampled after the ids that it got instead of messages.

        Raises:
            WrongPrompt: it did not.
        """
        prompt = self.plan.prompt
        if self.is_prompt_right or prompt is None or not self.captured.choices:
            return
        if not self.echoes_prompt and self.captured.prompt_ids != prompt.json()[1:-1]:
            raise WrongPrompt
        self.has_checked_prompt = True

    def send_all_messages(self) -> None:
        """Begin again after `WrongPrompt`: this call, and all later ones on its engine, send all messages."""
        self.needs_all_messages, self.has_cut_echo = True, False
        self.captured, self.first_token_at = Captured(), None
        self.call.restart_encoder()
        if self.lane is not None:
            self.lane.engine.needs_all_messages = True
            log.error(
                "the engine at %s did not sample after the token ids that it got, and the call is repeated with all "
                "messages; check that all engines behind this address run vLLM 0.32 or newer",
                self.lane.engine.url,
            )

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
