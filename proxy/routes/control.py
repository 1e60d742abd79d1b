"""What the routes of the control plane share: the caller, checked requests, and the JSON of records.

The caller is authenticated before anything of the request is read. The body is read and decoded by the data plane's
functions before FastAPI sees it, so both planes reject the same bodies with the same messages. Unknown query parameters
are rejected like unknown fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from proxy.auth import DEFAULT_TENANT, Principal, session_deleted
from proxy.http.asgi import cancelled_when_client_leaves, check_limits, read_body
from proxy.http.connections import LEFT
from proxy.services import Services, services_of
from proxy.settings import ProxySettings
from turnwise.errors import NotFound
from turnwise.json_text import dumps, loads
from turnwise.parts import turn_fields
from turnwise.store import extensions, keys, selection
from turnwise.store.database import Connection
from turnwise.store.turns import TurnView
from turnwise.types import MAX_REWARD, Json, Policy, PolicyVersion, Reward, Session, Turn, UpdateRecord

HIDDEN: dict[type, frozenset[str]] = {
    Session: frozenset({"policy_id"}),
    Reward: frozenset({"tenant", "digest"}),
    Policy: frozenset({"policy_id"}),
    PolicyVersion: frozenset({"policy_id"}),
    UpdateRecord: frozenset({"policy_id"}),
    keys.Key: frozenset({"policy_id"}),
    Turn: frozenset(
        {
            "tenant",
            "prompt_delta",
            "history_digest",
            "messages_digest",
            "dialogue_digest",
            "request_key",
            "request_digest",
            "inferred_by",
            "parts",
            "digest",
            "policy_id",
        }
    ),
}


PUBLIC: dict[type, tuple[str, ...]] = {
    record: tuple(each.name for each in dataclasses.fields(record) if each.name not in hidden)
    for record, hidden in HIDDEN.items()
}

PRINCIPAL = "turnwise.principal"


async def caller(request: Request) -> Principal:
    """Return the caller's principal, if the caller may use the route; it is determined once for each request.

    Raises:
        Unauthorized: no key, or one that is unknown, expired or revoked, or whose session was deleted.
        Forbidden: the key's role does not allow the route's action, or the key is for another session than the path's.
    """
    known: Principal | None = request.scope.get(PRINCIPAL)
    if known is not None:
        return known
    principal = await services_of(request).authenticator.authenticate(dict(request.scope["headers"]))
    principal.require(request.app.state.actions[f"{request.method} {request.scope['route'].path}"])
    if session_id := request.path_params.get("session_id"):
        principal.require_session(session_id)
    if principal.session_id is not None:
        await services_of(request).database.fetch(_check_own_session, principal, principal.session_id)
    request.scope[PRINCIPAL] = principal
    return principal


async def is_operator(services: Services, principal: Principal) -> bool:
    """Return whether the caller's tenant owns the model, which all tenants share.

    It may change the model, name files of the proxy's machine, and read what names other tenants' policies. The owner
    is the tenant in `policy_tenant`, and without this setting `default`, or a tenant beside which no other has keys or
    policies.
    """
    if (owner := services.settings.policy_tenant) is not None:
        return owner == principal.tenant

    return principal.tenant == DEFAULT_TENANT or await services.database.fetch(keys.tenants) <= {principal.tenant}


def _check_own_session(connection: Connection, principal: Principal, session_id: str) -> None:
    with contextlib.suppress(NotFound):
        stored = selection.session_row(
            connection, principal.tenant, session_id
        )  # without its rewards: it may have many
        if stored.created_at == principal.session_created_at:
            return
    raise session_deleted(session_id)


Here = Annotated[Services, Depends(services_of)]
Caller = Annotated[Principal, Depends(caller)]


def record_json(record: Session | Turn | Reward | Policy | PolicyVersion | UpdateRecord | keys.Key) -> Json:
    return {name: getattr(record, name) for name in PUBLIC[type(record)]}


async def sessions_json(found: Sequence[Session], services: Services) -> list[Json]:
    """Return sessions as the API's JSON, with the names of their policies, which are read again if one is new."""
    if not {session.policy_id for session in found} <= services.pool.policy_names.keys():
        await services.pool.refresh()
    names = services.pool.policy_names
    rows = [{**record_json(session), "policy": names.get(session.policy_id)} for session in found]
    tenant = found[0].tenant if found else ""
    return await with_columns(rows, "session", [each.session_id for each in found], services, tenant)


async def with_columns(rows: list[Json], by: str, names: list[Any], services: Services, tenant: str) -> list[Json]:
    """Return rows of sessions, keys, policies or updates with the columns of the features that are on."""
    known = {each.name: each for each in (*extensions.always_on(), *services.steps.columns)}  # a step's own comes first
    wanted = [each for each in known.values() if by in each.of]
    if not wanted:
        return rows
    values = await services.database.fetch(extensions.read_columns, by, tenant, names, wanted=wanted)
    return [values.add(row, name) for row, name in zip(rows, names, strict=True)]


async def session_json(session: Session, services: Services) -> Json:
    (shown,) = await sessions_json([session], services)
    return shown


def turn_json(view: TurnView) -> Json:
    return record_json(view.turn) | {
        "messages": view.messages,
        "tools": view.tools,
        "prompt_token_ids": view.prompt_token_ids,
        "trained_in": view.trained_in,
        "rewards": [record_json(reward) for reward in view.rewards],
        "logprobs": view.turn.logprobs.astype(float),
        **turn_fields(view.turn.parts),
    }


def describe_answer(*models: str) -> dict[int | str, dict[str, Any]]:
    """Return the argument `responses` of a route's decorator, which documents its answer.

    The names are of models in `proxy.routes.models`, which only the OpenAPI document imports; the answer is of one of
    them.
    """
    schemas = [{"$ref": f"#/components/schemas/{model}"} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {200: {"content": {"application/json": {"schema": schema}}}}


def page(rows: Iterable[Any], *, has_more: bool = False, **others: Any) -> Response:
    """Answer with a page; each row is encoded by itself, so that in a thread it does not hold the event loop."""
    encoded = b",".join([dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows])
    rest = dumps({"has_more": has_more, **others})
    return Response(b'{"object":"list","data":[%b],%b' % (encoded, rest[1:]), media_type="application/json")


def answer(content: object, *, status: int = 200) -> Response:
    encoded = dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(encoded, status_code=status, media_type="application/json")


TEXT = r"^[^\x00-\x1f\x7f]*$"
"""Text without control characters; PostgreSQL cannot store NUL."""
Id = Annotated[str, Field(min_length=1, max_length=256, pattern=TEXT)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
RewardValue = Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00]*$")]


class Body(BaseModel):
    """Base of all request bodies: a field that the model does not name is an error."""

    model_config = ConfigDict(extra="forbid")


def _check_parameters(request: Request, known: list[str]) -> None:
    """Reject query parameters that the route does not declare, because a misspelt filter would return everything."""
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            near = near or [each for each in known if each.startswith(name)][:1]
            hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(known) or 'none'}"
            raise RequestValidationError(
                [{"type": "unknown_parameter", "loc": ("query", name), "msg": f"no such query parameter; {hint}"}]
            )


MAX_BYTES = 2**20
MAX_CONTROL_STRINGS = 8_192
"""Bounds of a control-plane body, which is decoded on the event loop."""


class CheckedRequest(Request):
    """A request with strict decoding of its body."""

    decoded: Any = None

    async def json(self) -> Any:
        return loads(await self.body()) if self.decoded is None else self.decoded


class CheckedRoute(APIRoute):
    """A route that reads its body under the proxy's limits."""

    def limits(self, settings: ProxySettings) -> tuple[int, int]:
        """Return the limits of the body's bytes and of its strings."""
        return min(settings.max_body_bytes, MAX_BYTES), MAX_CONTROL_STRINGS

    async def authorise(self, request: Request) -> None:
        await caller(request)

    async def decode(self, raw: bytes) -> Any:  # noqa: ARG002
        return None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, preceded by the checks of the caller and of the limits."""
        handle = super().get_route_handler()
        declared = itertools.chain(self.dependant.query_params, *(d.query_params for d in self.dependant.dependencies))
        known = sorted(parameter.alias for parameter in declared)

        async def handle_checked(request: Request) -> Response:
            await self.authorise(request)
            _check_parameters(request, known)
            services = services_of(request)
            checked = CheckedRequest(request.scope, request.receive)
            if request.method not in ("POST", "PUT"):
                return await handle(checked)
            with contextlib.ExitStack() as held:
                with cancelled_when_client_leaves(request.scope["extensions"][LEFT]):
                    by = await caller(request)
                    headers = dict(request.scope["headers"])
                    memory = held.enter_context(services.open_body(by.tenant, by.root_key_id, headers))
                    max_bytes, max_strings = self.limits(services.settings)
                    raw = await read_body(request.receive, max_bytes=max_bytes, memory=memory)
                    await check_limits(raw, services.settings.max_json_string_bytes, max_strings)
                checked._body = raw  # noqa: SLF001  Starlette's cache of the body
                checked.decoded = await self.decode(raw)
                return await handle(checked)

        return handle_checked
