"""Shadow samples: further replies to the prompt of a live turn, so that single sessions give groups to compare.

A chosen turn of a session without a group becomes a group of steps: a copy of the real turn, and `shadow_replies`
sessions in which the same prompt ids are sampled again. The agent never sees those replies. They are sampled one at a
time after this proxy has had no call for `shadow_idle_seconds`, and a call that arrives ends them at once. Their tokens
stay below a share of those sampled for calls. A reward source rates the sessions of the group as it rates all ended
sessions.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import uuid
from hashlib import blake2b

from proxy.calls.client_left import ClientLeft
from proxy.calls.relay import Relay
from proxy.calls.replays import RequestIdentity
from proxy.calls.running import Running
from proxy.continuation.memory import Placement
from proxy.continuation.sessions import Sessions
from proxy.dialects.base import Call
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.errors import TurnwiseError
from turnwise.store import ledger
from turnwise.types import SHADOW, Outcome, Role, Session, Split

log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Chosen turns that wait for idle engines; the oldest one is dropped for a newer one."""
POLL_SECONDS = 0.02
"""How often it is checked whether engines are idle."""
MAX_INTERRUPTIONS = 20
"""Interruptions of one reply after which its group is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """A live turn whose prompt is sampled again."""

    call: Call
    session: Session
    turn_id: str


class Shadows:
    """Chooses live turns, and samples further replies to their prompts."""

    def __init__(
        self,
        relay: Relay,
        pool: EnginePool,
        sessions: Sessions,
        writer: Writer,
        settings: ProxySettings,
        metrics: Metrics,
    ) -> None:
        self._relay = relay
        self._pool = pool
        self._sessions = sessions
        self._writer = writer
        self._settings = settings
        self._metrics = metrics
        self._waiting: collections.deque[Chosen] = collections.deque(maxlen=MAX_WAITING)
        self._arrived = asyncio.Event()
        self._num_real_tokens = 0
        self._num_shadow_tokens = 0

    def observe(self, running: Running, outcome: Outcome, role: Role) -> None:
        """Count the tokens of a stored call, and choose its turn for shadow samples or not."""
        num_tokens = sum(len(choice.token_ids) for choice in running.captured.choices.values())
        if running.is_shadow:
            self._num_shadow_tokens += num_tokens
            return
        self._num_real_tokens += num_tokens
        if outcome in TRAINABLE_OUTCOMES and role is Role.MAIN and self._is_chosen(running):
            if len(self._waiting) == MAX_WAITING:  # the oldest makes room
                self._metrics.shadow_turns.labels("dropped").inc()
            self._waiting.append(Chosen(running.call, running.session, running.turn_id))
            self._arrived.set()

    def _is_chosen(self, running: Running) -> bool:
        session = running.session
        is_single = session.split is Split.TRAIN and session.group_id is None and running.call.num_choices == 1
        if not (self._settings.shadow_replies and is_single):
            return False
        digest = blake2b(running.turn_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._settings.shadow_turns * 2**64

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self._arrived.wait()
            if not self._waiting:
                self._arrived.clear()
                continue
            chosen = self._waiting.pop()  # the newest: the served version has sampled it
            try:
                await self._form_group(chosen)
            except TurnwiseError as error:
                self._metrics.shadow_turns.labels("failed").inc()
                log.warning("the shadow samples of turn %s were given up: %s", chosen.turn_id, error)

    async def _form_group(self, chosen: Chosen) -> None:
        """Sample the further replies, then end their sessions and that of the copy of the real turn."""
        members = [self._member(chosen, number) for number in range(self._settings.shadow_replies + 1)]
        for member in members[1:]:
            await self._sessions.fork(member, chosen.turn_id, before=True)
            if not await self._sample(chosen, member):
                return
        await self._sessions.fork(members[0], chosen.turn_id, before=False, is_sampled_here=True)
        for member in members:
            await self._writer.do(ledger.end_session, member.tenant, member.session_id, SHADOW)
            self._sessions.forget(member.tenant, member.session_id)

    def _member(self, chosen: Chosen, number: int) -> Session:
        """Return a session of the group; number 0 holds the copy of the real turn."""
        group_id = f"{SHADOW}-{chosen.turn_id}"
        shadowed = {"session_id": chosen.session.session_id, "turn_id": chosen.turn_id, "is_copy": number == 0}
        return Session(
            session_id=f"{group_id}-{number}",
            tenant=chosen.session.tenant,
            task_id=chosen.session.task_id,
            run=number,
            group_id=group_id,
            group_size=self._settings.shadow_replies + 1,
            sampling=chosen.session.sampling,
            user_id=chosen.session.user_id,
            metadata={SHADOW: shadowed},
            opened_by=SHADOW,
        )

    async def _sample(self, chosen: Chosen, member: Session) -> bool:
        """Sample one further reply while no call runs; return whether it is stored."""
        for _ in range(MAX_INTERRUPTIONS):
            while not self._may_sample():  # noqa: ASYNC110  engines of other workers cannot wake it
                await asyncio.sleep(POLL_SECONDS)
            if await self._sample_once(chosen, member):
                self._metrics.shadow_turns.labels("sampled").inc()
                return True
            self._metrics.shadow_turns.labels("interrupted").inc()
        return False

    def _may_sample(self) -> bool:
        """Return whether no call has run for a while, and the shadow samples' share of tokens is below its bound."""
        is_quiet = not self._pool.num_calls and self._pool.idle_seconds >= self._settings.shadow_idle_seconds
        is_idle = is_quiet and bool(self._pool.serving)
        return is_idle and self._num_shadow_tokens <= self._settings.shadow_tokens * self._num_real_tokens

    async def _sample_once(self, chosen: Chosen, member: Session) -> bool:
        """Sample one reply; return False if a call arrived before it was complete, which stops it."""
        self._pool.call_arrived.clear()
        running = await self._begin(chosen, member)
        if self._pool.call_arrived.is_set():
            self._relay.end(running)
            return False
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arriving = asyncio.create_task(self._pool.call_arrived.wait())
        sampling = asyncio.create_task(self._relay.reply(running, left))
        try:
            await asyncio.wait({arriving, sampling}, return_when=asyncio.FIRST_COMPLETED)
            left.set_result(None)  # has no effect on a complete reply
            with contextlib.suppress(ClientLeft):
                await sampling
                return True
            return False
        finally:
            arriving.cancel()
            sampling.cancel()  # where this task is cancelled: the proxy stops, and stores what was sampled
            await asyncio.gather(arriving, sampling, return_exceptions=True)
            self._relay.end(running)

    async def _begin(self, chosen: Chosen, member: Session) -> Running:
        """Plan the same prompt in the session of a member."""
        call = dataclasses.replace(
            chosen.call,
            body={field: value for field, value in chosen.call.body.items() if field not in ("seed", "stream")},
            stream=False,
            session_id=member.session_id,
            idempotency_key=None,
            is_retry=False,
            previous_turn_id=None,
        )
        placement = Placement(await self._sessions.open(member))
        plan = await self._sessions.plan(placement, call, await self._sessions.read_conversation(call))
        identity = RequestIdentity(member.tenant, SHADOW, member.session_id, None, b"", (call.dialect.name, False))
        return Running(call, placement, plan, identity, uuid.uuid4().hex)
