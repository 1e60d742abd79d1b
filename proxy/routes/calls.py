"""The endpoint that samples: a call is admitted, read, relayed and answered, with comments while the engine is silent.

It is plain ASGI rather than FastAPI: this is the hot path, the engine validates the body, and a disconnected client
must be noticed at once.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.routing import Route, compile_path
from starlette.types import Receive, Scope, Send

from proxy.auth import OPEN, Principal
from proxy.calls.capture import NOT_YET, Attempt, Running, request_digest
from proxy.calls.earlier import read_turns
from proxy.calls.steps import EVERY_CALL, WITH_KEY
from proxy.dialects.base import MAX_MESSAGES, SESSION_PREFIX, Call, Dialect, WireRoute
from proxy.engines.engine import Engine
from proxy.http import problems
from proxy.http.asgi import JSON, SHORT_DIGITS, cancelled_when_client_leaves, parse_object, read_body, send_whole
from proxy.http.connections import LEFT
from proxy.sessions.conversation import has_media
from proxy.sessions.identities import identify
from turnwise.errors import Overloaded, TurnwiseError
from turnwise.types import Json

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxy.services import Services

log = logging.getLogger(__name__)

MIN_CHECK_SECONDS = 0.01
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Let no server between the proxy and its client keep or collect events; the second is nginx's."""


@dataclasses.dataclass(eq=False)
class ReplySender:
    """One reply: it knows whether its head has been sent, and so how an error can still be reported."""

    _send: Send
    dialect: Dialect
    call: Call = dataclasses.field(init=False, default=NOT_YET)
    """The call of a route that samples, once it is read; its encoder writes the events, and an error at their end."""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    parts: list[bytes] = dataclasses.field(default_factory=list)
    _started: bool = False
    _sent_at: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _commenting: asyncio.Task[None] | None = None
    _loop: asyncio.AbstractEventLoop = dataclasses.field(default_factory=asyncio.get_running_loop)

    async def whole(self, body: bytes, *, status: int = 200, content_type: bytes = JSON) -> None:
        self._started = True
        await send_whole(self._send, status, body, self.headers, content_type)

    async def passed(self, status: int, content_type: str, data: bytes) -> None:
        """Send a part of another server's answer; an empty one is its end."""
        if not self._started:
            self._started = True
            headers = [(b"content-type", content_type.encode("latin-1"))]
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": bool(data)})

    async def part(self, data: bytes, *, is_last: bool = False) -> None:
        if data is not self.call.encoder.keep_alive:
            self.parts.append(data)
        self._sent_at = self._loop.time()
        if not self._started:
            self._started = True
            headers = [(b"content-type", self.call.encoder.content_type.encode()), *STREAM_HEADERS]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    @contextlib.contextmanager
    def kept_alive(self, seconds: float) -> Iterator[None]:
        """Send what clients ignore whenever a call that streams has been silent in the block for this time.

        One timer runs for the whole call, which a feature may let wait for another one before it begins. It calls a
        method: a closure that names itself would keep the events of every stream in memory until the next garbage
        collection.
        """
        if seconds <= 0:
            yield
            return
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._comment_if_silent, seconds)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._commenting is not None:
                self._commenting.cancel()

    def _comment_if_silent(self, seconds: float) -> None:
        silent = self._loop.time() - self._sent_at if self.call is not NOT_YET and self.call.stream else 0.0
        if silent >= seconds and (self._commenting is None or self._commenting.done()):
            self._commenting = self._loop.create_task(self.part(self.call.encoder.keep_alive))
            self._sent_at, silent = self._loop.time(), 0.0
        self._timer = self._loop.call_later(max(seconds - silent, MIN_CHECK_SECONDS), self._comment_if_silent, seconds)

    async def fail(self, error: Exception, services: Services) -> None:
        """Report an error: as the status, or as the last event of a stream that has started. Log an unexpected one."""
        if not isinstance(error, TurnwiseError):
            log.error("a call failed with an unexpected error", exc_info=error)
            error = problems.UNEXPECTED
        status, body, headers = problems.answer(error)
        services.metrics.refused.labels(problems.code_of(error)).inc()
        if not self._started:
            await send_whole(self._send, status, self.dialect.encode_error(status, body), headers)
            return
        if self.call is not None:  # the part of another server's answer that was sent has no end, so it breaks off
            await self.part(self.call.encoder.error(body, status), is_last=True)


class Endpoint(abc.ABC):
    """One endpoint of a dialect. It is plain ASGI; whatever it raises is reported in the dialect's shape."""

    def __init__(self, services: Services, dialect: Dialect, route: WireRoute) -> None:
        self._services = services
        self._dialect = dialect
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ReplySender(send, self._dialect)
        try:
            await self.serve(scope, receive, reply)
        except Exception as error:  # noqa: BLE001  the request's outermost edge: the client must get an answer
            await reply.fail(error, self._services)

    async def _caller(self, headers: dict[bytes, bytes]) -> Principal:
        """Return who calls a route that opens no session.

        Raises:
            Unauthorized: no valid key, or one whose session was deleted.
        """
        principal = await self._services.authenticator.authenticate(headers)
        if principal.session_id is not None:
            await self._services.sessions.cache.find_own(principal)
        return principal

    @abc.abstractmethod
    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None: ...


CHUNKED = b"unknown"
"""Length of a body that declares none."""
SESSION = "x-session-id"
"""Reply header that names the session of the call, also where the proxy found it by itself."""
POLICY_VERSION = "x-policy-version"
"""Reply header of a whole reply: the policy version that sampled its first token."""


async def admit(services: Services, running: Running) -> None:
    """Count a call among those that run.

    Raises:
        Overloaded: too many run.
        TurnwiseError: why a feature refuses it.
    """
    if services.num_calls >= services.max_calls:
        services.metrics.limited.labels("proxy").inc()
        raise Overloaded("the proxy is at its limit; retry after 1 s", retry_after_seconds=1)
    running.is_admitted = True
    services.num_calls += 1
    services.idle.clear()
    found = (EVERY_CALL,) if running.principal.root_key_id == OPEN else (EVERY_CALL, WITH_KEY)
    for marks, step in services.steps.admitted:
        if not marks.isdisjoint(found):
            await step(running)


def end(services: Services, running: Running) -> None:
    """Return all that a call holds, and count its tokens."""
    if running.place is not NOT_YET:
        services.sessions.release(running.place, has_failed=running.answer is None)
        choices = running.choices.values()
        running.num_tokens += running.num_prompt_tokens + sum(len(choice.token_ids) for choice in choices)
    if running.body is not None:
        running.body.close()
    if running.is_admitted:
        services.num_calls -= 1
        if not services.num_calls:
            services.idle.set()
    for marks, step in services.steps.ended:
        if not marks.isdisjoint(running.kept):
            step(running)


@contextlib.asynccontextmanager
async def admitted(services: Services, principal: Principal, scope: Scope) -> AsyncIterator[Running]:
    """Count a request that samples nothing as a call, with the tokens that it sets.

    Raises:
        TurnwiseError: as `admit`.
    """
    running = Running(principal=principal, left=scope["extensions"][LEFT])
    try:
        await admit(services, running)
        yield running
    finally:
        end(services, running)


class SampleEndpoint(Endpoint):
    """An endpoint of one dialect that samples."""

    def __init__(self, services: Services, dialect: Dialect, route: WireRoute) -> None:
        super().__init__(services, dialect, route)
        self._asked = services.steps.asked_in(dialect.name)
        self._names_turns = type(dialect).referenced_turns is not Dialect.referenced_turns

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:
        """Answer a call, or repeat the answer to the call that it retries."""
        services = self._services
        headers = dict(scope["headers"])
        if self._dialect.reads_url:
            headers = self._dialect.normalise_headers(headers, query_of(scope))
        principal = await services.authenticator.authenticate(headers)
        principal.require("call")
        if principal.session_id is not None and (named := scope["path_params"].get("session_id")):
            principal.require_session(named)  # before the body is read
        running = Running(
            principal=principal,
            left=scope["extensions"][LEFT],
            request_headers=headers,
            reply_headers=reply.headers,
        )
        try:
            with reply.kept_alive(services.settings.stream_keep_alive_seconds):
                with cancelled_when_client_leaves(running.left):
                    earlier = await self._begin(scope, receive, running, reply)
                answer = b"" if earlier is not None else await services.relay.reply(running, reply.part)
            if earlier is not None:
                services.metrics.coalesced.inc()
                reply.headers = {**earlier.headers}
                assert earlier.answer is not None
                await (reply.part(earlier.answer, is_last=True) if reply.call.stream else reply.whole(earlier.answer))
            elif running.call.stream:
                await reply.part(answer, is_last=True)
                running.answer = b"".join(reply.parts)
            else:
                reply.headers[POLICY_VERSION] = str(running.version_first)
                await reply.whole(answer)
                running.answer = answer
        finally:
            end(services, running)

    async def _begin(self, scope: Scope, receive: Receive, running: Running, reply: ReplySender) -> Attempt | None:
        """Read a call, and find its session; return the earlier call whose answer it gets, None if it is sampled."""
        services, principal, headers = self._services, running.principal, running.request_headers
        is_marked = headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")  # an SDK says that it is a retry
        may_be_answered = b"idempotency-key" in headers or (is_marked and services.attempts.has_undelivered(principal))
        if not may_be_answered:  # the answer of a retry may be known, and needs no place
            await admit(services, running)
        if len(headers.get(b"content-length", CHUNKED)) > SHORT_DIGITS:
            running.body = services.open_body(principal.tenant, principal.root_key_id, headers)
        call, digest = await self._read(scope, receive, running)
        reply.call = running.call = call
        call.is_retry = is_marked
        found = {EVERY_CALL, *headers, *(call.body.get("metadata") or ())}
        for marks, step in self._asked:
            if not marks.isdisjoint(found):
                await step(running)
        attempt = await services.attempts.begin(call, principal, digest, running.left)
        if attempt.answer is not None:
            running.session_key = principal.tenant, attempt.headers[SESSION]
            for step in services.steps.denied if not call.train else ():
                await step(running)
            return attempt
        running.attempt, attempt.headers = attempt, reply.headers
        if not running.is_admitted:
            await admit(services, running)
        if running.body is not None:
            running.body.close()
        if has_media(call.messages):
            await services.take_media(call)
        # Until the first engine has served, the chat template is unknown and no call could extend a stored turn.
        must_wait = services.sessions.template is None and not services.pool.serving
        running.has_waited = must_wait and not await services.pool.wait_for_first()
        running.place = await services.sessions.find(call, principal, digest)
        live = running.place.live
        running.session_key = live.key
        reply.headers[SESSION] = live.session.session_id
        return None

    async def _read(self, scope: Scope, receive: Receive, running: Running) -> tuple[Call, bytes]:
        settings, principal = self._services.settings, running.principal
        raw = await read_body(receive, max_bytes=settings.max_body_bytes, memory=running.body)
        body = await parse_object(raw, settings.max_json_string_bytes)
        if self._dialect.reads_url:
            body = self._dialect.merge_url(body, self._route, scope["path_params"], query_of(scope))
        if self._names_turns and (turn_ids := self._dialect.referenced_turns(body)[:MAX_MESSAGES]):
            views = await read_turns(self._services.database, turn_ids, principal)
            replies = {turn_id: view.turn.response for turn_id, view in views.items()}
            body = self._dialect.resolve_references(body, replies)
        call = self._dialect.parse(body, failed_tool_text=settings.failed_tool_text)
        if not Engine.own_fields.isdisjoint(call.body):
            call.body = self._without(Engine.own_fields, call.body)
        arguments = call.body.get("chat_template_kwargs")
        if isinstance(arguments, dict) and not self._services.own_arguments.isdisjoint(arguments):
            call.body["chat_template_kwargs"] = self._without(self._services.own_arguments, arguments)
        call.dialect = self._dialect
        session_id = scope["path_params"].get("session_id")
        native = self._services.native_ids
        identify(call, session_id, running.request_headers, settings.ignored_ids, principal, native)
        digest = request_digest(call, raw)
        call.policy_id, pool = principal.policy_id, self._services.pool
        is_own = any(engine.model == call.model for engine in pool.engines)
        if not is_own or len(pool.policies) > 1:  # the name of an engine's model may be a policy's
            await self._services.models.choose(call, principal)
        return call, digest

    def _without(self, own: frozenset[str] | set[str], fields: Json) -> Json:
        for field in sorted(own.intersection(fields)):
            self._services.metrics.dropped_fields.labels(field).inc()
        return {field: value for field, value in fields.items() if field not in own}


def query_of(scope: Scope) -> dict[str, str]:
    raw: bytes = scope["query_string"]
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True)) if raw else {}


class DataPlane:
    """Serves all routes of the data plane, with and without the session's prefix, and passes other requests to the app.

    An endpoint is found by one dictionary lookup; the framework would try all routes one by one. Of two endpoints for
    one route the later one serves, which is a feature's.
    """

    def __init__(self, app: FastAPI, served: Sequence[tuple[WireRoute, Endpoint]]) -> None:
        self._app = app
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._patterns: dict[tuple[str, str], tuple[re.Pattern[str], Endpoint]] = {}
        for route, endpoint in served:
            if "{" in route.path:
                # The framework's own pattern matches no line feed, which a client may send as `%0A`.
                pattern = re.compile(compile_path(route.path)[0].pattern, re.DOTALL)
                self._patterns[route.method, route.path] = pattern, endpoint
            else:
                self._exact[route.method, route.path] = endpoint
        app.router.routes[:0] = [
            Route(prefix + route.path, endpoint, methods=[route.method])
            for route, endpoint in served
            for prefix in ("", SESSION_PREFIX)
        ]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the endpoint of a request, with the path's parameters in its scope; the app for another route."""
        path, method, params = scope["path"], scope["method"], {}
        if path.startswith("//"):  # of a base URL with a slash at its end
            path = scope["path"] = "/" + path.lstrip("/")
            scope["raw_path"] = b"/" + scope.get("raw_path", path.encode()).lstrip(b"/")
        if path.startswith("/sessions/"):
            session_id, slash, rest = path.removeprefix("/sessions/").partition("/")
            path, params = slash + rest, {"session_id": session_id}
        if endpoint := self._exact.get((method, path)):
            scope["path_params"] = params
            return endpoint(scope, receive, send)
        for (served_method, _), (pattern, endpoint) in self._patterns.items():
            if method == served_method and (match := pattern.match(path)):
                scope["path_params"] = {**match.groupdict(), **params}
                return endpoint(scope, receive, send)
        return self._app(scope, receive, send)
