"""The data plane: the routes of all registered dialects, each also under `/sessions/{session_id}`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import orjson
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.routing import Route, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.auth import Principal
from proxy.dialects import registry
from proxy.dialects.base import Action, Call, Dialect, WireRoute, template_arguments
from proxy.http.asgi import cancelled_when_client_leaves, parse_object, read_body
from proxy.http.connections import LEFT
from proxy.routes import upstream
from proxy.routes.calls import SampleEndpoint, identify, query_of
from proxy.routes.reply_sender import ReplySender
from turnwise.types import Json

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


Answer = Callable[[Scope, Receive, Principal, Dialect], Awaitable[Json]]


class QueryEndpoint:
    """An endpoint of one dialect that answers without sampling."""

    def __init__(self, services: Services, dialect: Dialect, route: WireRoute) -> None:
        self._services = services
        self._dialect = dialect
        self._route = route
        answers: dict[Action, Answer] = {
            Action.COUNT_TOKENS: self._count_tokens,
            Action.LIST_MODELS: self._list_models,
            Action.GET_MODEL: self._get_model,
        }
        self._answer = answers[route.action]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = dict(scope["headers"])
        dialect = registry.dialect_of_headers(headers, self._dialect)
        reply = ReplySender(send, dialect)
        try:
            headers = dialect.normalise_headers(headers, query_of(scope))
            with cancelled_when_client_leaves(scope["extensions"][LEFT]):
                principal = await self._services.authenticator.authenticate(headers)
                answer = await self._answer(scope, receive, principal, dialect)
            await reply.whole(orjson.dumps(answer))
        except Exception as error:  # noqa: BLE001  the request's outermost edge: the client must get an answer
            await reply.fail(error, self._services)

    async def _count_tokens(self, scope: Scope, receive: Receive, principal: Principal, _: Dialect) -> Json:
        """Return the length of a prompt, continued from a stored turn or rendered by the engine."""
        principal.require("call")
        services, settings = self._services, self._services.settings
        headers = dict(scope["headers"])
        with await services.bodies.reserve(principal, headers):
            call = await self._read_counted(await read_body(receive, max_bytes=settings.max_body_bytes), scope)
        await services.model_names.name_policy(call, principal)
        identify(call, scope, headers, settings.ignored_ids)
        continued = await services.sessions.continued_length(call, principal)
        if continued is not None:
            return self._dialect.encode_count(continued)
        engine = services.pool.route(principal.key_id)
        rendered = {field: call.body[field] for field in COUNTED_FIELDS if field in call.body}
        rendered |= {"messages": call.messages, "model": engine.model}
        if arguments := template_arguments(call.body):
            rendered["chat_template_kwargs"] = arguments
        return self._dialect.encode_count(len(await engine.tokenise(rendered)))

    async def _read_counted(self, raw: bytes, scope: Scope) -> Call:
        """Return the chat call whose prompt is counted."""
        settings = self._services.settings
        body = await parse_object(raw, **settings.json_limits)
        body = self._dialect.merge_url(body, self._route, scope.get("path_params", {}), query_of(scope))
        chat = self._dialect.count_request(body)
        call = registry.DIALECTS[0].parse(chat, max_choices=1, max_messages=settings.max_messages)
        call.original = {field: value for field, value in body.items() if field not in UNREPEATED_FIELDS}
        return call

    async def _list_models(self, scope: Scope, receive: Receive, principal: Principal, dialect: Dialect) -> Json:  # noqa: ARG002
        return dialect.encode_models(await self._models(principal))

    async def _get_model(self, scope: Scope, receive: Receive, principal: Principal, dialect: Dialect) -> Json:  # noqa: ARG002
        name = scope["path_params"]["model"]
        if self._services.pool.find_policy(principal.tenant, name) is None:
            self._services.model_names.check(name)
        models = await self._models(principal)
        listed = next((model for model in models if model["id"] == name), models[0])
        return dialect.encode_model({**listed, "id": name})

    async def _models(self, principal: Principal) -> list[Json]:
        """Return the models to list, as OpenAI describes them."""
        answer = await self._services.pool.route(principal.key_id).ask("GET", "/v1/models")
        return self._services.model_names.listed(answer["data"])


class DataPlane:
    """Serves all routes of the data plane, with and without the session's prefix, and passes other requests to the app.

    An endpoint is found by one dictionary lookup; the framework would try all routes one by one.
    """

    def __init__(self, app: FastAPI, services: Services) -> None:
        self._app = app
        self._exact: dict[tuple[str, str], ASGIApp] = {}
        self._patterns: list[tuple[str, re.Pattern[str], ASGIApp]] = []
        register_url_convertor("model", ModelConvertor())
        served: list[tuple[WireRoute, ASGIApp]] = [
            (route, (SampleEndpoint if route.action is Action.SAMPLE else QueryEndpoint)(services, dialect, route))
            for dialect in registry.DIALECTS
            for route in dialect.routes
        ]
        served += [
            (WireRoute(path=path, summary="Passed to the upstream"), upstream.Upstream(services, path))
            for path in upstream.PATHS
        ]
        for route, endpoint in served:
            if "{" in route.path:
                # The framework's own pattern matches no line feed, which a client may send as `%0A`.
                pattern = re.compile(compile_path(route.path)[0].pattern, re.DOTALL)
                self._patterns.append((route.method, pattern, endpoint))
            else:
                self._exact[route.method, route.path] = endpoint
        app.router.routes[:0] = [
            Route(prefix + route.path, endpoint, methods=[route.method])
            for route, endpoint in served
            for prefix in ("", registry.SESSION_PREFIX)
        ]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a request here, or pass it to the app."""
        endpoint = self._find(scope) if scope["type"] == "http" else self._app
        return endpoint(scope, receive, send)

    def _find(self, scope: Scope) -> ASGIApp:
        """Return the endpoint of a request, and set the request's path parameters; the app for another route."""
        path, method, params = scope["path"], scope["method"], {}
        if path.startswith("/sessions/"):
            session_id, slash, rest = path.removeprefix("/sessions/").partition("/")
            path, params = slash + rest, {"session_id": session_id}
        if endpoint := self._exact.get((method, path)):
            scope["path_params"] = params
            return endpoint
        for served_method, pattern, endpoint in self._patterns:
            if method == served_method and (match := pattern.match(path)):
                scope["path_params"] = {**match.groupdict(), **params}
                return endpoint
        return self._app
