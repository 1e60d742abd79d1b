"""Routes of some formats that sample nothing: how many tokens a prompt has, and a stored reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter
from starlette.types import Receive, Scope

from proxy.auth import Principal
from proxy.calls.earlier import read_turns
from proxy.dialects.base import Action, Call, WireRoute
from proxy.features.formats.responses import Responses
from proxy.features.formats.translated import Translated
from proxy.features.lengths import prompt_length
from proxy.http.asgi import cancelled_when_client_leaves, parse_object, read_body
from proxy.http.connections import LEFT
from proxy.routes.calls import Endpoint, ReplySender, admitted, query_of
from proxy.routes.declared import Routes, endpoints
from proxy.sessions.identities import identify
from turnwise.errors import NotFound
from turnwise.types import Json

if TYPE_CHECKING:
    from proxy.services import Services

UNREPEATED_FIELDS = frozenset({"messages", "input", "contents", "prompt", "generateContentRequest"})
"""Fields of a request to count tokens that hold its conversation, which the chat call has."""


class CountEndpoint(Endpoint):
    """An endpoint of one dialect that counts the tokens of a prompt."""

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:
        services, settings = self._services, self._services.settings
        headers = self._dialect.normalise_headers(dict(scope["headers"]), query_of(scope))
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await services.authenticator.authenticate(headers)
            principal.require("call")
            async with admitted(services, principal, scope) as admission:
                with services.open_body(principal.tenant, principal.root_key_id, headers) as memory:
                    raw = await read_body(receive, max_bytes=settings.max_body_bytes, memory=memory)
                    call = await self._read(raw, scope)
                await services.models.choose(call, principal)
                identify(
                    call,
                    scope["path_params"].get("session_id"),
                    headers,
                    settings.ignored_ids,
                    principal,
                    services.native_ids,
                )
                admission.num_tokens, answer = await self.count(call, principal)
        await reply.whole(orjson.dumps(answer))

    async def count(self, call: Call, principal: Principal) -> tuple[int, Json]:
        """Return the number of tokens of a call's prompt, and the answer."""
        assert isinstance(self._dialect, Translated)
        num_tokens = await prompt_length(self._services, call, principal)
        return num_tokens, self._dialect.encode_count(num_tokens)

    async def _read(self, raw: bytes, scope: Scope) -> Call:
        settings = self._services.settings
        body = await parse_object(raw, settings.max_json_string_bytes)
        body = self._dialect.merge_url(body, self._route, scope["path_params"], query_of(scope))
        assert isinstance(self._dialect, Translated)
        chat = self._dialect.count_request(body, failed_tool_text=settings.failed_tool_text)
        call = self._services.dialects[0].parse(chat)
        call.original = {field: value for field, value in body.items() if field not in UNREPEATED_FIELDS}
        return call


class StoredReplyEndpoint(Endpoint):
    """An endpoint of one dialect that returns a stored reply to who may continue it."""

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:  # noqa: ARG002  it has no body
        params, headers = scope["path_params"], dict(scope["headers"])
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await self._caller(headers)
            principal.require("call")
            if (named := params.get("session_id")) is not None:
                principal.require_session(named)
            turn_id = params["response_id"]
            wanted = [turn_id] if turn_id.isprintable() else []  # PostgreSQL takes no NUL
            view = (await read_turns(self._services.database, wanted, principal)).get(turn_id)
        if view is None or (named is not None and view.turn.session_id != named):
            raise NotFound(f"response {turn_id!r:.80} is not stored", code="response_not_found")
        assert isinstance(self._dialect, Responses)
        await reply.whole(self._dialect.encode_stored(view.turn))


ENDPOINTS: dict[Action, type[Endpoint]] = {
    Action.COUNT_TOKENS: CountEndpoint,
    Action.GET_REPLY: StoredReplyEndpoint,
}


def _endpoints(services: Services) -> list[tuple[WireRoute, Endpoint]]:
    return endpoints(services, ENDPOINTS)


ROUTES = Routes(router=APIRouter(), actions={}, endpoints=_endpoints)
