"""The canned mode: one reply, encoded before the server starts, for benchmarks of a proxy in front of the engine.

Only the reply's id and the echoed prompt are inserted for each call, so that the engine takes almost no time.
"""

from __future__ import annotations

import uuid

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from turnwise.fake_engine import chat_wire
from turnwise.fake_engine.ledger import EngineState
from turnwise.fake_engine.sampling import sample
from turnwise.fake_engine.script import Reply

PATH = "/v1/chat/completions"
_ID = "@@reply-id@@"
_PROMPT = 987654321
"""A token id that no tokenizer has; marks the place of the prompt."""
_TEXT = "The quick brown fox jumps over the lazy dog. "


class CannedChat:
    """Answers the chat route with prepared bytes; all other requests go to the wrapped application."""

    def __init__(self, app: ASGIApp, state: EngineState) -> None:
        self._app = app
        self._state = state
        self._prompt = [ord("a")] * 32
        num_tokens = state.script.canned_tokens or 1
        self._plain = self._encode(num_tokens, stream=False)
        self._streamed = self._encode(num_tokens, stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; read only the parts of the request that the reply depends on."""
        if scope["type"] != "http" or scope["path"] != PATH or not self._state.running.is_set():
            await self._app(scope, receive, send)
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = orjson.loads(raw)
        self._state.num_canned_calls += 1
        streamed = bool(request.get("stream"))
        body = self._fill(self._streamed if streamed else self._plain, scope, request)
        kind = b"text/event-stream; charset=utf-8" if streamed else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _encode(self, num_tokens: int, *, stream: bool) -> tuple[bytes, list[bytes]]:
        """Return the encoded reply in two parts: before and after the prompt."""
        text = (_TEXT * (num_tokens // len(_TEXT) + 1))[: num_tokens - 1]
        request = {"return_token_ids": True, "logprobs": True, "stream": stream}
        call = chat_wire.Call(_ID, 0, self._state.script.model, request, [_PROMPT], 1.0)
        sampled = [sample(Reply(text=text), request, max_tokens=num_tokens)]
        if stream:
            per_chunk = -(-num_tokens // self._state.script.canned_chunks)
            chunks = chat_wire.chunks(call, sampled, per_chunk)
            whole = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
        else:
            whole = orjson.dumps(chat_wire.completion(call, sampled))
        return whole, whole.split(_ID.encode())

    def _fill(self, encoded: tuple[bytes, list[bytes]], scope: Scope, request: dict[str, object]) -> bytes:
        sent = request.get("kv_transfer_params")
        prompt = (sent.get("prompt_token_ids") if isinstance(sent, dict) else None) or self._prompt
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        reply_id = b"chatcmpl-" + (request_id or uuid.uuid4().hex.encode())
        body = reply_id.join(encoded[1])
        return body.replace(b"[987654321]", orjson.dumps(prompt), 1)
