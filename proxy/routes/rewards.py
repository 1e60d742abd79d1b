"""Routes that write rewards, each request once."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import pickle
from typing import Annotated

import orjson
from fastapi import APIRouter, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from proxy.auth import Principal
from proxy.http.asgi import MAX_STRINGS
from proxy.routes.control import Body, Caller, CheckedRoute, Count, Here, Id, RewardValue, Text, describe_answer, page
from proxy.services import Services
from proxy.settings import ProxySettings
from proxy.writer.process import add_pickled
from turnwise.json_text import loads
from turnwise.store import selection
from turnwise.store import updates as stored_updates
from turnwise.types import Reward

MAX_LINES = 1_000
MAX_LINES_BYTES = 4 * 2**20
"""A line has at most 1,800 characters in its fields."""
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=256)]
"""A request that is repeated with the same key writes once."""


class RewardLine(Body):
    """One reward: for a turn, a step of a session, or a whole session."""

    session_id: Id | None = None
    turn_id: Id | None = None
    step: Count | None = None
    value: RewardValue
    name: Id = "reward"
    source: Text | None = None

    @model_validator(mode="after")
    def _one_target(self) -> RewardLine:
        if self.turn_id is None and self.session_id is None:
            raise ValueError("give `turn_id`, or `session_id` with or without `step`")
        if self.turn_id is not None and self.step is not None:
            raise ValueError("give `turn_id` or `step`, not both")
        return self


@dataclasses.dataclass(slots=True)
class Reached:
    """What a reward line reached."""

    turns: int
    """How many turns it is for."""
    trained_in: int | None
    """The last update that trained its session before this reward came; null if none did. What was trained is not
    trained again, unless `retrain_revised` is set."""


RewardLines = Annotated[
    list[RewardLine],
    Field(min_length=1, max_length=MAX_LINES, fail_fast=True),
    BeforeValidator(
        lambda lines: lines if isinstance(lines, list) else [lines],
        json_schema_input_type=RewardLine | list[RewardLine],
    ),
]
"""One line or many. Lines that the route has checked are not checked again."""
_lines: TypeAdapter[list[RewardLine]] = TypeAdapter(RewardLines)


class RewardsRoute(CheckedRoute):
    """A route whose body may be long: it is decoded and checked in a thread."""

    def limits(self, settings: ProxySettings) -> tuple[int, int]:
        return min(settings.max_body_bytes, MAX_LINES_BYTES), MAX_STRINGS

    async def decode(self, raw: bytes) -> list[RewardLine] | None:
        """Return the lines; None leaves a body that is not JSON to FastAPI, which names the error.

        Raises:
            RequestValidationError: naming the line and its field.
        """
        return await asyncio.to_thread(read_lines, raw)


def read_lines(raw: bytes) -> list[RewardLine] | None:
    """Decode and check reward lines; None for a body that is not JSON. Other threads run between two lines."""
    try:
        decoded = loads(raw)
    except orjson.JSONDecodeError:
        return None
    try:
        return _lines.validate_python(decoded)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found, body=decoded) from error


router = APIRouter(prefix="/v1", route_class=RewardsRoute, tags=["rewards"])


@router.post("/rewards", responses=describe_answer("RewardsAnswer"))
async def post_rewards(
    wanted: RewardLines,
    request: Request,
    services: Here,
    principal: Caller,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Append all reward lines or none; a later line with the same target and name replaces an earlier one.

    A request that is repeated with its `Idempotency-Key` writes once. A key is unique within a session, or within the
    requests for several sessions.
    """
    reached = await services.writer.do(
        add_pickled,
        await asyncio.to_thread(_pickle_rewards, wanted, principal),
        idempotency_key=idempotency_key,
        body_digest=body_digest(await request.body()),
        retrain=services.settings.retrain_revised,
    )
    return await asyncio.to_thread(_answer_rewards, services, principal.tenant, wanted, reached)


def body_digest(raw: bytes) -> bytes:
    """Return what tells another request under a used `Idempotency-Key` from the first one."""
    return hashlib.blake2b(raw, digest_size=16).digest()


def _pickle_rewards(lines: list[RewardLine], principal: Principal) -> bytes:
    for line in lines:
        if line.session_id is not None:
            principal.require_session(line.session_id)
    return pickle.dumps([_reward(line, principal) for line in lines], pickle.HIGHEST_PROTOCOL)


def _reward(line: RewardLine, principal: Principal) -> Reward:
    return Reward(
        # A session key may only reward turns of its own session.
        session_id=line.session_id or principal.session_id or "",
        tenant=principal.tenant,
        written_by=principal.key_id,
        **line.model_dump(exclude={"session_id"}),
    )


def _answer_rewards(services: Services, tenant: str, lines: list[RewardLine], reached: list[int]) -> Response:
    targets = ("turn" if line.turn_id else "step" if line.step is not None else "session" for line in lines)
    for target, num_lines in collections.Counter(targets).items():
        services.metrics.rewards.labels(target).inc(num_lines)
    with services.database.read() as connection:
        of_turns = selection.sessions_of_turns(connection, tenant, {line.turn_id for line in lines if line.turn_id})
        session_ids = [of_turns.get(line.turn_id, "") if line.turn_id else line.session_id or "" for line in lines]
        updates = stored_updates.last_updates(connection, tenant, session_ids)
    return page(Reached(num, updates.get(each)) for num, each in zip(reached, session_ids, strict=True))
