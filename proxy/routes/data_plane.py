"""Routes of all wire formats, also under `/sessions/{session_id}`; model lists, token counts, stored replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.types import Receive, Scope

from proxy.auth import Principal
from proxy.calls.earlier import read_turns
from proxy.dialects import registry
from proxy.dialects.base import Action, Call, WireRoute, template_arguments
from proxy.engines.vllm_forms import data_urls
from proxy.http.asgi import cancelled_when_client_leaves, parse_object
from proxy.http.bodies import read_body
from proxy.http.connections import LEFT
from proxy.routes.calls import DataPlane, Endpoint, ReplySender, SampleEndpoint, admitted, query_of
from proxy.sessions.conversation import has_media
from proxy.sessions.identities import identify
from turnwise.errors import NotFound

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxy.services import Services

COUNTED_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")
"""Fields of a chat request beside its messages that the engine renders a prompt from."""
UNREPEATED_FIELDS = frozenset({"messages", "input", "contents", "prompt", "generateContentRequest"})
"""Fields of a request to count tokens that hold its conversation, which the chat call has."""


class ModelConvertor(StringConvertor):
    """`{name:model}` in a path: the name of a model, with slashes and colons, but without `:someMethod` at its end."""

    regex = r"(?!.*:[a-z]+[A-Z][A-Za-z]*$).+"


class CountEndpoint(Endpoint):
    """An endpoint of one dialect that counts the tokens of a prompt."""

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:
        services, settings = self._services, self._services.settings
        headers = self._dialect.normalise_headers(dict(scope["headers"]), query_of(scope))
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await services.authenticator.authenticate(headers)
            principal.require("call")
            async with admitted(services, principal, scope) as admission:
                with services.bodies.open(principal.tenant, principal.root_key_id, headers) as memory:
                    raw = await read_body(receive, max_bytes=settings.max_body_bytes, memory=memory)
                    call = await self._read(raw, scope)
                await services.pool.name_policy(call, principal)
                identify(call, scope["path_params"].get("session_id"), headers, settings.ignored_ids, principal)
                if has_media(call.messages):
                    await services.take_media(call)
                num_tokens = await services.sessions.continued_length(call, principal)
                if num_tokens is None:
                    num_tokens = await self._rendered_length(call, principal)
                admission.num_tokens = num_tokens
        await reply.whole(orjson.dumps(self._dialect.encode_count(num_tokens)))

    async def _read(self, raw: bytes, scope: Scope) -> Call:
        settings = self._services.settings
        body = await parse_object(raw, settings.max_json_string_bytes)
        body = self._dialect.merge_url(body, self._route, scope["path_params"], query_of(scope))
        chat = self._dialect.count_request(body, failed_tool_text=settings.failed_tool_text)
        call = registry.DIALECTS[0].parse(chat)
        call.original = {field: value for field, value in body.items() if field not in UNREPEATED_FIELDS}
        return call

    async def _rendered_length(self, call: Call, principal: Principal) -> int:
        engine = self._services.pool.route(principal.key_id)
        rendered = {field: call.body[field] for field in COUNTED_FIELDS if field in call.body}
        messages = orjson.Fragment(data_urls(call)) if call.images else call.messages
        rendered |= {"messages": messages, "model": engine.model}
        if arguments := template_arguments(call.body):
            rendered["chat_template_kwargs"] = arguments
        return len(await engine.tokenise(rendered))


class ModelsEndpoint(Endpoint):
    """An endpoint of one dialect that lists the models, or describes the one in its path.

    Several formats have the same path, so the answer is in that of the client.
    """

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:  # noqa: ARG002  it has no body
        services, headers = self._services, dict(scope["headers"])
        reply.dialect = dialect = registry.dialect_of_headers(headers, self._dialect)
        name = scope["path_params"].get("model")
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await self._caller(dialect.normalise_headers(headers, query_of(scope)))
            if name is not None:
                services.pool.find_policy(principal.tenant, name)  # which refuses a name that is not served
            answer = await services.pool.route(principal.key_id).ask("GET", "/v1/models")
        models = services.pool.listed(answer["data"])
        if name is None:
            shown = dialect.encode_models(models)
        else:
            listed = next((model for model in models if model["id"] == name), models[0])
            shown = dialect.encode_model({**listed, "id": name})
        await reply.whole(orjson.dumps(shown))


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
        await reply.whole(self._dialect.encode_stored(view.turn))


ENDPOINTS: dict[Action, type[Endpoint]] = {
    Action.SAMPLE: SampleEndpoint,
    Action.COUNT_TOKENS: CountEndpoint,
    Action.LIST_MODELS: ModelsEndpoint,
    Action.GET_MODEL: ModelsEndpoint,
    Action.GET_REPLY: StoredReplyEndpoint,
}


def data_plane(app: FastAPI, services: Services) -> DataPlane:
    """Return what serves the routes of the data plane; it passes other requests to the app."""
    register_url_convertor("model", ModelConvertor())
    served: list[tuple[WireRoute, Endpoint]] = [
        (route, ENDPOINTS[route.action](services, dialect, route))
        for dialect in registry.DIALECTS
        for route in dialect.routes
    ]
    served += [each for make in app.state.endpoints for each in make(services)]
    return DataPlane(app, served)
