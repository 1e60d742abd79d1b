"""Which calls deny training or recording, and how the sessions that they deny it for are marked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from proxy.calls.steps import CallStep
from proxy.sessions.identities import next_prefix
from turnwise.errors import InvalidRequest
from turnwise.features import consent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.dialects.base import Call
    from proxy.metrics import Counted
    from proxy.services import Services
    from proxy.sessions.identities import Headers
    from turnwise.types import Json, Session

Restrict = Callable[..., Coroutine[Any, Any, int]]


class ConsentStep(CallStep):
    """Marks the sessions of calls that deny training or recording."""

    session_fields: ClassVar[Mapping[str, Callable[[Any], None]]] = {"record": lambda _: None}
    marks = frozenset({b"x-train", b"x-record", "train", "record"})
    counters: ClassVar[Mapping[str, Counted]] = {
        "restricted": (
            "turnwise_restricted_sessions",
            "Sessions that were marked `train = false` after they were created",
            (),
        )
    }
    restricted: Counter

    def __init__(self, services: Services) -> None:
        self._writer = services.writer
        services.reopened.append(self.narrow)

    async def asked(self, running: Running) -> None:
        _deny(running.call, running.request_headers, running.call.body.get("metadata") or {})

    async def denied(self, running: Running) -> None:
        call = running.call
        if not running.place:  # it repeats the answer of an earlier call
            await self._restrict_session(*running.session_key, record=call.record)
            return
        live = running.place.live
        if live.session.train or live.session.record > call.record:
            await self._restrict_session(*live.key, record=call.record)
            live.session = dataclasses.replace(live.session, train=False, record=live.session.record and call.record)

    async def narrow(self, wanted: Session, stored: Session) -> Session:
        """Return a stored session with what a request for it denies, stored as well."""
        if stored.train <= wanted.train and stored.record <= wanted.record:
            return stored
        await self._restrict_session(stored.tenant, stored.session_id, record=wanted.record)
        return dataclasses.replace(stored, train=wanted.train, record=wanted.record and stored.record)

    async def _restrict_session(self, tenant: str, session_id: str, *, record: bool) -> None:
        await self.restrict(consent.restrict_session, tenant, session_id, next_prefix(session_id), record)

    async def restrict(self, change: Callable[..., consent.Restricted], *of: Any) -> int:
        """Mark sessions as not to be trained, in short transactions; return how many were marked.

        They stay in memory: the writing process reads `record` with each turn that it stores.
        """
        number = after = 0
        while True:
            async with self._writer.slices:
                found, after = await self._writer.do(change, *of, after)
            if not found:
                break
            number += len(found)
        self.restricted.inc(number)
        return number


def restrict_by(services: Services) -> Restrict:
    return services.steps.of(ConsentStep).restrict


def _deny(call: Call, headers: Headers, metadata: Json) -> None:
    """Take `X-Train` and `X-Record`, or `train` and `record` of the metadata, whose other values are the application's.

    Raises:
        InvalidRequest: a header has another value than true and false: it may not be taken for consent.
    """
    denied = set()
    for name in ("train", "record"):
        header = headers.get(f"x-{name}".encode(), b"true").decode("latin-1").strip().lower()
        if header not in ("true", "false"):
            raise InvalidRequest(f"X-{name.capitalize()} is `true` or `false`, not {header!r:.80}", param=f"x-{name}")
        if header == "false" or str(metadata.get(name)).lower() == "false":
            denied.add(name)
    call.record = call.record and "record" not in denied
    call.train = call.train and call.record and "train" not in denied
