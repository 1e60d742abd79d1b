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
from proxy.calls.capture import Running
from proxy.calls.resuming import read_turns, resume
from proxy.calls.retries import Attempt, request_digest
from proxy.dialects.base import MAX_MESSAGES, Call, Dialect, WireRoute
from proxy.dialects.registry import HOSTED_TOOLS, ITEM_TYPES, SESSION_PREFIX
from proxy.engines.engine import Engine
from proxy.http import problems
from proxy.http.asgi import JSON, cancelled_when_client_leaves, parse_object, send_whole
from proxy.http.bodies import SHORT_DIGITS, Body, read_body
from proxy.http.connections import LEFT
from proxy.limits.calls import Scope as LimitedScope
from proxy.sessions.conversation import has_media
from proxy.sessions.which import identify, next_prefix
from turnwise.engine_plugin.images import FIELD
from turnwise.errors import TurnwiseError
from turnwise.store import consent

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxy.services import Services

log = logging.getLogger(__name__)

MIN_CHECK_SECONDS = 0.01


@dataclasses.dataclass(eq=False)
class ReplySender:
    """One reply: it knows whether its head has been sent, and so how an error can still be reported."""

    _send: Send
    dialect: Dialect
    call: Call = dataclasses.field(init=False)
    """The call, set once it is read; its encoder writes the events, and the error at the end of a failed stream."""
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

    async def part(self, data: bytes, *, is_last: bool = False) -> None:
        if data is not self.call.encoder.keep_alive:
            self.parts.append(data)
        self._sent_at = self._loop.time()
        if not self._started:
            self._started = True
            headers = [(b"content-type", self.call.encoder.content_type.encode()), (b"cache-control", b"no-cache")]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    @contextlib.contextmanager
    def kept_alive(self, seconds: float) -> Iterator[None]:
        """Send what clients ignore whenever a stream has been silent in the block for this time.

        One timer runs for the whole stream. It calls a method: a closure that names itself would keep the events of
        every stream in memory until the next garbage collection.
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
        silent = self._loop.time() - self._sent_at
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
        await self.part(self.call.encoder.error(body), is_last=True)


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

    @abc.abstractmethod
    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None: ...


MAX_TOOL_NAME = 64
CHUNKED = b"unknown"
"""Length of a body that declares none."""
SESSION = "x-session-id"
"""Reply header that names the session of the call, also where the proxy found it by itself."""
POLICY_VERSION = "x-policy-version"
"""Reply header of a whole reply: the policy version that sampled its first token."""
DROPPED_TOOLS = "x-turnwise-dropped-tools"
"""Reply header that names the tools which were removed from the request."""
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")


@dataclasses.dataclass(slots=True)
class Admission:
    """The places and the memory that one call holds until its end."""

    services: Services
    principal: Principal
    left: asyncio.Future[None]
    """Done when the client has closed its connection."""
    limited: list[LimitedScope] | None = None
    """Its place under all limits, taken before its body is read; None until then."""
    body: Body | None = None
    """The memory of the request's body; None for a short one."""
    attempt: Attempt | None = None
    """What a retry of the call refers to; None for a call that is itself answered as a retry."""
    running: Running | None = None
    """The call in its session; None until that is found."""
    answer: bytes | None = None
    """What was sent to the client; None for a call that failed."""
    num_tokens: int = 0
    """Tokens that were counted or copied for a request that samples none."""

    async def take(self) -> None:
        """Check the budgets and take a place, after waiting in the queue if there is none.

        Raises:
            BudgetSpent: the budget of the caller's key or tenant is spent.
            Overloaded: there is no place, or none within the queue's time.
        """
        services, principal = self.services, self.principal
        if services.budgets.are_set or principal.has_budget:
            await services.budgets.check(principal)
        limits = services.limits
        if limits.num_calls >= limits.max_calls:
            raise limits.full()
        self.limited = await limits.admit(principal) if limits.are_set else []
        limits.num_calls += 1
        limits.idle.clear()

    def release(self) -> None:
        """Return all of it, and count the call's tokens."""
        services, num_tokens = self.services, self.num_tokens
        if self.running is not None:
            services.sessions.release(self.running.place, has_failed=self.answer is None)
            choices = self.running.captured.choices.values()
            num_tokens = self.running.num_prompt_tokens + sum(len(choice.token_ids) for choice in choices)
        if self.attempt is not None:
            services.retries.settle(self.attempt, self.answer)
        if self.body is not None:
            self.body.close()
        if self.limited is not None:
            services.limits.num_calls -= 1
            if not services.limits.num_calls:
                services.limits.idle.set()
            if self.limited:
                services.limits.leave(self.limited, num_tokens)
            if services.budgets.are_set or self.principal.root_key_id != OPEN:
                services.budgets.charge(self.principal, num_tokens)


@contextlib.asynccontextmanager
async def admitted(services: Services, principal: Principal, scope: Scope) -> AsyncIterator[Admission]:
    """Count a request that samples nothing as a call, under all limits and budgets.

    Raises:
        BudgetSpent, Overloaded: as `Admission.take`.
    """
    admission = Admission(services, principal, scope["extensions"][LEFT])
    try:
        await admission.take()
        yield admission
    finally:
        admission.release()


class SampleEndpoint(Endpoint):
    """An endpoint of one dialect that samples."""

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
        admission = Admission(services, principal, scope["extensions"][LEFT])
        try:
            with cancelled_when_client_leaves(admission.left):
                earlier = await self._begin(scope, receive, headers, admission, reply)
            call, running = reply.call, admission.running
            if earlier is not None and earlier.answer is not None:
                services.metrics.coalesced.inc()
                reply.headers = {**earlier.headers}
                await self._deny(call, principal.tenant, reply.headers[SESSION])
                await (reply.part(earlier.answer, is_last=True) if call.stream else reply.whole(earlier.answer))
            elif running is not None and call.stream:
                with reply.kept_alive(services.settings.stream_keep_alive_seconds):
                    held = await services.relay.reply(running, reply.part)
                await reply.part(held, is_last=True)
                admission.answer = b"".join(reply.parts)
            elif running is not None:
                answer = await services.relay.reply(running)
                reply.headers[POLICY_VERSION] = str(running.version_first)
                await reply.whole(answer)
                admission.answer = answer
        finally:
            admission.release()

    async def _begin(
        self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], admission: Admission, reply: ReplySender
    ) -> Attempt | None:
        """Read a call, and find its session; return the earlier call whose answer it gets, None if it is sampled."""
        services, principal = self._services, admission.principal
        is_marked = headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")  # an SDK says that it is a retry
        may_be_answered = b"idempotency-key" in headers or (is_marked and services.retries.has_undelivered(principal))
        if not may_be_answered:  # the answer of a retry may be known, and needs no place
            await admission.take()
        if len(headers.get(b"content-length", CHUNKED)) > SHORT_DIGITS:
            admission.body = services.bodies.open(principal.tenant, principal.root_key_id, headers)
        call, digest = await self._read(scope, receive, headers, admission)
        reply.call, call.is_retry = call, is_marked
        await services.pool.name_policy(call, principal)
        if call.dropped_fields or call.dropped_tools or call.dropped_items:
            self._report_dropped(call, reply)
        if call.previous_turn_id is not None or call.conversation_id is not None:
            await resume(services.database, call, principal)
        attempt = await services.retries.begin(call, principal, digest, admission.left)
        if attempt.answer is not None:
            return attempt
        admission.attempt, attempt.headers = attempt, reply.headers
        if admission.limited is None:
            await admission.take()
        if admission.body is not None:
            admission.body.close()
        if has_media(call.messages):
            await services.images.take(call)
        # Until the first engine has served, the chat template is unknown and no call could extend a stored turn.
        must_wait = services.sessions.template is None and not services.pool.serving
        has_waited = must_wait and not await services.pool.wait_for_first()
        place = await services.sessions.find(call, principal, digest)
        admission.running = Running(call, place, attempt, has_waited, key_id=principal.root_key_id)
        live = place.live
        if not call.train and (live.session.train or live.session.record > call.record):
            await self._deny(call, live.session.tenant, live.session.session_id)
            live.session = dataclasses.replace(live.session, train=False, record=live.session.record and call.record)
        reply.headers[SESSION] = live.session.session_id
        return None

    async def _deny(self, call: Call, tenant: str, session_id: str) -> None:
        if not call.train:
            of = tenant, session_id, next_prefix(session_id), call.record
            await self._services.restrict(consent.restrict_session, *of)

    def _report_dropped(self, call: Call, reply: ReplySender) -> None:
        metrics = self._services.metrics
        for field in call.dropped_fields:
            metrics.dropped_fields.labels(field).inc()
        for kind in call.dropped_items:
            metrics.dropped_items.labels(kind if kind in ITEM_TYPES else "other").inc()
        names = [_NOT_A_NAME.sub("", tool)[:MAX_TOOL_NAME] or "unknown" for tool in call.dropped_tools]
        for name in names:
            metrics.dropped_tools.labels(name if name in HOSTED_TOOLS else "other").inc()
        if names:
            reply.headers[DROPPED_TOOLS] = ", ".join(names)

    async def _read(
        self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], admission: Admission
    ) -> tuple[Call, bytes]:
        settings, principal = self._services.settings, admission.principal
        raw = await read_body(receive, max_bytes=settings.max_body_bytes, memory=admission.body)
        body = await parse_object(raw, settings.max_json_string_bytes)
        if self._dialect.reads_url:
            body = self._dialect.merge_url(body, self._route, scope["path_params"], query_of(scope))
        if turn_ids := self._dialect.referenced_turns(body)[:MAX_MESSAGES]:
            views = await read_turns(self._services.database, turn_ids, principal)
            replies = {turn_id: view.turn.response for turn_id, view in views.items()}
            body = self._dialect.resolve_references(body, replies)
        call = self._dialect.parse(body, failed_tool_text=settings.failed_tool_text)
        own_fields = Engine.own_fields
        if not own_fields.isdisjoint(call.body):
            call.dropped_fields = sorted(own_fields.intersection(call.body))
            call.body = {field: value for field, value in call.body.items() if field not in own_fields}
        arguments = call.body.get("chat_template_kwargs")
        if isinstance(arguments, dict) and FIELD in arguments:
            call.dropped_fields = [*call.dropped_fields, FIELD]
            call.body["chat_template_kwargs"] = {name: arguments[name] for name in arguments if name != FIELD}
        call.dialect = self._dialect
        identify(call, scope["path_params"].get("session_id"), headers, settings.ignored_ids, principal)
        return call, request_digest(call, raw)


def query_of(scope: Scope) -> dict[str, str]:
    raw: bytes = scope["query_string"]
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True)) if raw else {}


class DataPlane:
    """Serves all routes of the data plane, with and without the session's prefix, and passes other requests to the app.

    An endpoint is found by one dictionary lookup; the framework would try all routes one by one.
    """

    def __init__(self, app: FastAPI, served: Sequence[tuple[WireRoute, Endpoint]]) -> None:
        self._app = app
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._patterns: list[tuple[str, re.Pattern[str], Endpoint]] = []
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
        for served_method, pattern, endpoint in self._patterns:
            if method == served_method and (match := pattern.match(path)):
                scope["path_params"] = {**match.groupdict(), **params}
                return endpoint(scope, receive, send)
        return self._app(scope, receive, send)
