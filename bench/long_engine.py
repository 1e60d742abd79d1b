"""A stand-in engine for long prompts: `python bench/long_engine.py --port 8000 --tokenizer DIR`.

It echoes the token ids of a prompt as the bytes that were sent and parses no number of them, so that it costs little.
A prompt without ids is tokenised with the tokenizer and the template of the directory; with `--any-ids` it gets one id
for every four bytes. A reply has as many tokens as `max_tokens` says, or the default number. With tools in the request
it calls the first tool. `GET /bench/times` returns how long it worked on each reply, by the reply's id.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import orjson
import uvloop
from transformers import AutoTokenizer, PreTrainedTokenizerBase

IDS = b'"prompt_token_ids":['
WORD_ID = 1234
MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
ASKS_FOR_IDS = b'"return_token_ids":'
ASKS_FOR_LOGPROBS = b'"logprobs":'
SEARCHED_BYTES = 64 * 2**10
"""Bytes before the ids, or the end, of a request in which `max_tokens` is looked for."""
NUM_EVENTS = 20
"""Chunks of a streamed reply."""


LOGPROB = orjson.dumps({"token": " word", "logprob": -0.125, "bytes": [32, 119, 111, 114, 100], "top_logprobs": []})


def is_on(body: bytes, field: bytes) -> bool:
    """Return whether a field of a request is true; the search costs less than a regular expression's."""
    at = body.rfind(field)
    return at >= 0 and body[at + len(field) : at + len(field) + 8].lstrip().startswith(b"true")


class LongEngine:
    """Answers requests."""

    def __init__(self, tokenizer_path: str, num_tokens: int, *, any_ids: bool = False) -> None:
        self._any_ids = any_ids
        self._path = tokenizer_path
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer_path)
        self._default_tokens = self._num_tokens = num_tokens
        self._num_calls = 0
        self._seconds: dict[str, float] = {}

    def answer(self, path: bytes, body: bytes, request_id: bytes) -> tuple[bytes, bytes]:
        """Return content type and body of the answer to a request."""
        if path.startswith(b"/v1/chat/completions"):
            started = time.perf_counter()
            answer = self._chat(body, request_id or b"%d" % self._num_calls)
            self._seconds[f"chatcmpl-{request_id.decode() or self._num_calls - 1}"] = time.perf_counter() - started
            return answer
        if path.startswith(b"/bench/times"):
            return b"application/json", orjson.dumps(self._seconds)
        if path.startswith(b"/tokenize"):
            request = orjson.loads(body)
            ids = self._encode(request["messages"], request.get("tools"))
            return b"application/json", orjson.dumps({"tokens": ids, "count": len(ids)})
        if path.startswith(b"/v1/models"):
            model = {"id": "long", "object": "model", "root": self._path}
            return b"application/json", orjson.dumps({"object": "list", "data": [model]})
        return b"application/json", b"{}"

    def _encode(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        for message in messages:
            for call in message.get("tool_calls") or ():
                if isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
            content = message.get("content") or ""
            message["content"] = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(str(text), add_special_tokens=False)
        return ids

    def _chat(self, body: bytes, request_id: bytes) -> tuple[bytes, bytes]:
        at = body.find(IDS)
        self._num_calls += 1
        end = at if at >= 0 else len(body)  # the proxy writes the ids behind what its client has sent
        asked = MAX_TOKENS.search(body, max(0, end - SEARCHED_BYTES), end)
        self._num_tokens = int(asked[1]) if asked else self._default_tokens
        if at >= 0:
            prompt = body[at + len(IDS) - 1 : body.index(b"]", at) + 1]
            has_tools = b'"tools":[' in body
        elif self._any_ids:
            has_tools = b'"tools":[' in body
            prompt = b"[%d" % WORD_ID + b",%d" % WORD_ID * (len(body) // 4 - 1) + b"]"
        else:
            request = orjson.loads(body)
            has_tools = bool(request.get("tools"))
            prompt = orjson.dumps(self._encode(request["messages"], request.get("tools")))
        reply_id = b"chatcmpl-" + request_id
        if b'"stream":true' in body:
            return b"text/event-stream", b"".join(self._events(reply_id, prompt, has_tools=has_tools))
        head = b'{"id":"%b","object":"chat.completion","created":1,"model":"long","choices":' % reply_id
        message = {"role": "assistant", "content": self._text(), "tool_calls": self._calls() if has_tools else []}
        asks_for_logprobs, asks_for_ids = is_on(body, ASKS_FOR_LOGPROBS), is_on(body, ASKS_FOR_IDS)
        logprobs = b'{"content":[%b]}' % (LOGPROB + (b"," + LOGPROB) * (self._num_tokens - 1))
        parts = [
            head,  # the order of the fields is vLLM's
            b'[{"index":0,"message":',
            orjson.dumps(message),
            b',"logprobs":',
            logprobs if asks_for_logprobs else b"null",
            b',"finish_reason":"%b"' % (b"tool_calls" if has_tools else b"stop"),
            b',"token_ids":' + orjson.dumps(self._ids()) if asks_for_ids else b"",
            b"}]",
            b',"prompt_token_ids":' + prompt if asks_for_ids else b"",
            b"}",
        ]
        return b"application/json", b"".join(parts)

    def _events(self, reply_id: bytes, prompt: bytes, *, has_tools: bool) -> Iterator[bytes]:
        head = b'data: {"id":"%b","object":"chat.completion.chunk","created":1,"model":"long","choices":' % reply_id
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        yield head + orjson.dumps([opening]) + b',"prompt_token_ids":' + prompt + b"}\n\n"
        ids = self._ids()
        each = max(1, len(ids) // NUM_EVENTS)
        for start in range(0, len(ids), each):
            part = ids[start : start + each]
            is_last = start + each >= len(ids)
            delta: dict[str, Any] = {"content": " word" * len(part)}
            if is_last and has_tools:
                delta["tool_calls"] = [{**call, "index": 0} for call in self._calls()]
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": {"content": self._logprobs(len(part))},
                "finish_reason": ("tool_calls" if has_tools else "stop") if is_last else None,
                "token_ids": part,
            }
            yield head + orjson.dumps([choice]) + b"}\n\n"
        yield b"data: [DONE]\n\n"

    def _text(self) -> str:
        return " word" * self._num_tokens

    def _calls(self) -> list[dict[str, Any]]:
        arguments = orjson.dumps({"command": f"sed -n 1,80p src/module_{self._num_calls}.py"}).decode()
        return [
            {
                "id": f"call_{self._num_calls}",
                "type": "function",
                "function": {"name": "shell", "arguments": arguments},
            }
        ]

    def _ids(self) -> list[int]:
        return [WORD_ID] * (self._num_tokens - 1) + [int(self._tokenizer.eos_token_id)]  # type: ignore[arg-type]

    def _logprobs(self, number: int) -> list[dict[str, Any]]:
        return [{"token": " word", "logprob": -0.125, "bytes": [32, 119, 111, 114, 100], "top_logprobs": []}] * number


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, engine: LongEngine) -> None:
        self._engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n", 0, 8192)) >= 0:
            head = bytes(self._data[:end]).lower()
            length = int(_header(head, b"content-length") or 0)
            if len(self._data) < end + 4 + length:
                return
            body = bytes(memoryview(self._data)[end + 4 : end + 4 + length])
            del self._data[: end + 4 + length]
            kind, answer = self._engine.answer(head.split(b" ", 2)[1], body, _header(head, b"x-request-id"))
            start = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(answer))
            self._transport.writelines([start, answer])


def _header(head: bytes, name: bytes) -> bytes:
    at = head.find(b"\r\n" + name + b": ")
    return head[at + len(name) + 4 :].split(b"\r\n", 1)[0] if at >= 0 else b""


async def serve(port: int, engine: LongEngine) -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--reply-tokens", type=int, default=100)
    parser.add_argument("--any-ids", action="store_true")
    given = parser.parse_args()
    uvloop.run(serve(given.port, LongEngine(given.tokenizer, given.reply_tokens, any_ids=given.any_ids)))
