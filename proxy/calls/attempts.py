"""One attempt of a client to get a reply: each is sampled, unless a feature finds that it repeats an earlier one."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Mapping

import orjson
from blake3 import blake3

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.sessions.template import ChatTemplate
from turnwise.json_text import dumps
from turnwise.store.database import Database
from turnwise.types import Session

DIGEST_BYTES = 16
FORM_FIELDS = frozenset({"stream", "stream_options"})
"""Request fields that decide how an answer is sent, not what is sampled."""


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One call that a retry may refer to."""

    caller: tuple[str, str, str]
    """Tenant, key, and the session that the request names; empty without one."""
    idempotency_key: str | None
    digest: bytes
    """Digest of the request; under an `Idempotency-Key` without the fields that decide the answer's form."""
    form: tuple[str, bool]
    """Dialect, and whether the answer is streamed."""
    found_by: tuple[object, ...]
    """The part of the request that retries have in common with it."""
    call_id: str
    turn_id: str
    """The completion's id, as the engine derives it from the call's id."""
    left: asyncio.Future[None]
    """Done once the client has closed its connection."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the answer's headers say of the call: its session, its version."""
    answer: bytes | None = None
    """The whole reply, or all events of a stream; None until it was sent, and for an answer that is not kept."""
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set once the call has ended, whether or not it has an answer."""

    def stored_key(self, index: int) -> str:
        """Return the name under which a choice is stored, of a call under an `Idempotency-Key`."""
        _, key_id, _ = self.caller
        return f"{key_id}\n{self.idempotency_key}#{index}"  # neither id has a line feed


def request_digest(call: Call, raw: bytes) -> bytes:
    """Return the digest of a request; under an `Idempotency-Key` without the fields that decide the answer's form.

    It does not depend on the turns that the call continues without repeating them: a later attempt may find more.
    """
    if call.idempotency_key is not None:
        fields = {field: value for field, value in call.body.items() if field not in FORM_FIELDS}
        named = [call.dialect.name, call.num_choices, call.previous_turn_id, fields]
        raw = dumps(named, option=orjson.OPT_SORT_KEYS)
    return blake3(raw).digest(DIGEST_BYTES)


class Attempts:
    """The attempts of all calls; what sees that one repeats another extends it."""

    def __init__(self, database: Database, max_bytes: int) -> None:
        self._database = database
        self._max_bytes = max_bytes
        """Memory of the answers that may be kept."""

    def has_undelivered(self, principal: Principal) -> bool:  # noqa: ARG002
        """Return whether a client of the caller's key has left before it got its answer, which a retry may get."""
        return False

    async def begin(self, call: Call, principal: Principal, digest: bytes, left: asyncio.Future[None]) -> Attempt:
        """Return the attempt of a call, under a new id, or the earlier one whose answer it gets.

        The id is the milliseconds since 1970, and 80 random bits: a database writes the index of such ids at its end
        only. Random ids change another page of the index for each row.

        Args:
            call: the call.
            principal: its caller.
            digest: the digest of its request.
            left: done once its client has closed its connection.

        Raises:
            Conflict: the `Idempotency-Key` was used with another request.
        """
        caller, form = (principal.tenant, principal.key_id, call.session_id or ""), (call.dialect.name, call.stream)
        key, call_id = call.idempotency_key, f"{time.time_ns() // 1_000_000:012x}{random.getrandbits(80):020x}"
        found_by = (*caller, digest, form) if key is None else (*caller, key)
        return Attempt(caller, key, digest, form, found_by, call_id, f"{call.dialect.id_prefix}{call_id}", left)

    def settle(self, attempt: Attempt, answer: bytes | None) -> None:
        """Record the end of a call, right after its answer was sent; without one it has failed."""

    async def stored_answer(
        self,
        call: Call,  # noqa: ARG002
        attempt: Attempt,  # noqa: ARG002
        session: Session,  # noqa: ARG002
        template: ChatTemplate | None,  # noqa: ARG002
    ) -> tuple[bytes, int] | None:
        """Return the stored answer to an earlier call under the same `Idempotency-Key`, and its version."""
        return None
