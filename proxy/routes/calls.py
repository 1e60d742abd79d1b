"""The data plane: what an OpenAI client calls, each route also under `/sessions/{session_id}`.

Plain ASGI rather than FastAPI: this is the hot path, the body is the engine's to judge, and a client that leaves must
be seen at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import orjson
from starlette.routing import Route

from proxy import problems
from proxy.asgi import STREAM_HEADERS, App, Receive, Scope, Send, parse_object, read_body, send_whole
from proxy.auth import Principal
from proxy.calls.relay import ClientLeft
from proxy.calls.replays import Key, rebuilt_answer, replay_key
from proxy.connections import LEFT
from proxy.continuation.sessions import check_id
from proxy.dialects.base import Call, Dialect, Encoder
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.completions import TextCompletions
from proxy.dialects.messages import Messages, chat_body
from proxy.dialects.responses import Responses
from proxy.dialects.resuming import resume
from proxy.dialects.sse import Verbatim
from turnwise.errors import InvalidRequest, NotFound, StoreError, TurnwiseError
from turnwise.store import queries
from turnwise.store.lineage import TurnView

if TYPE_CHECKING:
    from fastapi import FastAPI

    from proxy.services import Services

log = logging.getLogger(__name__)
MAX_STEP = 2**31 - 1
MAX_STEP_DIGITS = 10
MAX_KEY_LENGTH = 256
COUNTED_FIELDS = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
"""What a prompt is rendered from."""


class Completions:
    """A route that samples, in one dialect."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = Reply(send, self._dialect)
        try:
            await self._serve(scope, receive, reply)
        except ClientLeft:
            log.debug("the client left before its reply was whole")
        except TurnwiseError as error:
            await reply.fail(error, self._services)
        except Exception:  # the request's outermost edge: the client must get an answer, and the log the traceback
            log.exception("a call failed in a way that nobody foresaw")
            await reply.fail(
                StoreError("the proxy failed to serve this call; its log has the traceback, retry"), self._services
            )

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        services = self._services
        headers = dict(scope["headers"])
        principal = await services.authenticator.authenticate(headers)
        principal.require("call")
        settings = services.settings
        raw = await read_body(
            receive, max_bytes=settings.max_body_bytes, timeout_seconds=settings.header_timeout_seconds
        )
        call = self._read_call(raw, scope, headers)
        reply.encoder = call.encoder
        if call.previous_turn_id is not None:
            await self._resume(call, principal.tenant)
        if call.session_id is not None:
            principal.require_session(call.session_id)
        await self._answer(call, principal, replay_key(call, principal, raw), reply, scope["extensions"][LEFT])

    async def _answer(
        self, call: Call, principal: Principal, key: Key, reply: Reply, left: asyncio.Future[None]
    ) -> None:
        """Answer a repetition from the call that it repeats, anything else from the engine."""
        services = self._services
        earlier = services.replays.find(call, key)
        if earlier is not None:
            await earlier.settled.wait()
            if earlier.answer is not None:
                services.metrics.coalesced.inc()
                await reply.again(earlier.answer, stream=call.stream)
                return
        attempt = services.replays.begin(key, os.urandom(16).hex())
        answer = None
        try:
            answer = await self._sample(call, principal, attempt.call_id, reply, left)
        finally:
            services.replays.settle(attempt, answer)

    async def _sample(
        self, call: Call, principal: Principal, call_id: str, reply: Reply, left: asyncio.Future[None]
    ) -> bytes:
        relay = self._services.relay
        running = await relay.begin(call, principal, call_id)
        stored = await relay.stored_turns(running)
        if stored:
            self._services.metrics.coalesced.inc()
            answer = rebuilt_answer(call, stored)
            await reply.again(answer, stream=call.stream)
            return answer
        if call.stream:
            await relay.stream(running, reply.part, left)
            await reply.end()
            return b"".join(reply.parts)
        answer = await relay.whole(running, left)
        await reply.whole(answer)
        return answer

    async def _resume(self, call: Call, tenant: str) -> None:
        """Put the conversation of the turn that the call goes on from in front of it, and the call into its session."""

        def read(turn_id: str) -> TurnView:
            with self._services.database.read() as connection:
                return queries.turn(connection, tenant, turn_id)

        assert call.previous_turn_id is not None
        try:
            earlier = await asyncio.to_thread(read, call.previous_turn_id)
        except NotFound as error:
            raise NotFound(
                f"previous response {call.previous_turn_id!r} is not stored; send the whole conversation",
                code="previous_response_not_found",
            ) from error
        resume(call, earlier)
        call.session_id = call.session_id or earlier.turn.session_id

    def _read_call(self, raw: bytes, scope: Scope, headers: dict[bytes, bytes]) -> Call:
        settings = self._services.settings
        body = parse_object(raw, max_depth=settings.max_json_depth)
        call = self._dialect.parse(body, max_choices=settings.max_choices, max_messages=settings.max_messages)
        identify(call, scope, headers)
        return call


def identify(call: Call, scope: Scope, headers: dict[bytes, bytes]) -> None:
    """Fill in which session and step a call says it belongs to.

    Raises:
        InvalidRequest: a session id or a step that cannot be one, or an idempotency key that is too long.
    """
    metadata = call.body.get("metadata") or {}
    in_path = scope.get("path_params", {}).get("session_id")
    in_header = headers.get(b"x-session-id", b"").decode("latin-1")
    call.session_id = in_path or in_header or metadata.get("session_id") or None
    if call.session_id is not None:
        check_id(call.session_id)
    call.step = _step(headers.get(b"x-step", b"").decode("latin-1") or metadata.get("step"))
    if key := headers.get(b"idempotency-key"):
        call.idempotency_key = _idempotency_key(key)
    call.is_retry = headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")


def _step(given: object) -> int | None:
    if given is None:
        return None
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= MAX_STEP_DIGITS:
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MAX_STEP:
        raise InvalidRequest(f"a step is a number from 0 to {MAX_STEP}, not {given!r:.80}", param="step")
    return given


def _idempotency_key(raw: bytes) -> str:
    if len(raw) > MAX_KEY_LENGTH:
        raise InvalidRequest(
            f"an Idempotency-Key has at most {MAX_KEY_LENGTH} characters, not {len(raw)}", param="Idempotency-Key"
        )
    return raw.decode("latin-1")


class Reply:
    """One reply on its way: it knows whether its head has been sent, and so how it can still fail."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._started = False
        self.encoder: Encoder = Verbatim()
        """Writes the error that a stream ends with."""
        self.parts: list[bytes] = []
        """The events that were sent."""

    async def again(self, answer: bytes, *, stream: bool) -> None:
        """Send an answer that was given before."""
        if not stream:
            await self.whole(answer)
            return
        await self.part(answer)
        await self.end()

    async def whole(self, body: bytes) -> None:
        """Send all of it."""
        self._started = True
        await send_whole(self._send, 200, body)

    async def part(self, data: bytes) -> None:
        """Send some events."""
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        self.parts.append(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Close a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: TurnwiseError, services: Services) -> None:
        """Answer an error: with its status, or as the stream's last event."""
        status, body, headers = problems.answer(error)
        services.metrics.refused.labels(problems.lookup(error)[2]).inc()
        if not self._started:
            await send_whole(self._send, status, self._dialect.encode_error(status, body), headers)
            return
        await self.part(self.encoder.error(body))
        await self.end()


class Models:
    """`GET /v1/models`: what the engine serves."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's signature
        """Serve one request."""
        reply = Reply(send, ChatCompletions())
        try:
            principal: Principal = await self._services.authenticator.authenticate(dict(scope["headers"]))
            engine = self._services.pool.route(principal.key_id)
            await reply.whole(orjson.dumps(await engine.ask("GET", "/v1/models")))
        except TurnwiseError as error:
            await reply.fail(error, self._services)


class TokenCount:
    """`POST /v1/messages/count_tokens`: how long the prompt would be, by the engine's own template and tokenizer."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = Reply(send, Messages())
        try:
            await reply.whole(orjson.dumps({"input_tokens": await self._count(scope, receive)}))
        except TurnwiseError as error:
            await reply.fail(error, self._services)

    async def _count(self, scope: Scope, receive: Receive) -> int:
        services, settings = self._services, self._services.settings
        principal = await services.authenticator.authenticate(dict(scope["headers"]))
        principal.require("call")
        raw = await read_body(
            receive, max_bytes=settings.max_body_bytes, timeout_seconds=settings.header_timeout_seconds
        )
        asked = chat_body(parse_object(raw, max_depth=settings.max_json_depth))
        rendered = {field: asked[field] for field in COUNTED_FIELDS if field in asked}
        answer = await services.pool.route(principal.key_id).ask("POST", "/tokenize", rendered)
        return int(answer["count"])


def endpoints(services: Services) -> dict[tuple[str, str], App]:
    """Return what serves the data plane, by method and path."""
    dialects: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Messages(), Responses())
    found: dict[tuple[str, str], App] = {("POST", each.route): Completions(services, each) for each in dialects}
    return found | {
        ("GET", "/v1/models"): Models(services),
        ("POST", "/v1/messages/count_tokens"): TokenCount(services),
    }


def routes(served: dict[tuple[str, str], App]) -> list[Route]:
    """Return the endpoints as routes, each also under `/sessions/{session_id}`, for all that is asked of a router."""
    return [
        Route(prefix + path, endpoint, methods=[method])
        for prefix in ("", "/sessions/{session_id}")
        for (method, path), endpoint in served.items()
    ]


class Shortcut:
    """The app, with the data plane's endpoints found by their path alone: a framework tries its routes one by one."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request here, or pass it on to the framework."""
        endpoint = self._find(scope) if scope["type"] == "http" else None
        await (endpoint or self._app)(scope, receive, send)

    def _find(self, scope: Scope) -> App | None:
        path: str = scope["path"]
        served: dict[tuple[str, str], App] = self._app.state.endpoints
        if not path.startswith("/sessions/"):
            return served.get((scope["method"], path))
        session_id, slash, rest = path.removeprefix("/sessions/").partition("/")
        scope["path_params"] = {"session_id": session_id}
        return served.get((scope["method"], slash + rest))
