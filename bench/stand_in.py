"""A minimal engine for benchmarks: prepared bytes for every POST, with as many prompt ids as the request is long."""

from __future__ import annotations

import argparse
import asyncio

import orjson
import uvloop

MODELS = orjson.dumps({"object": "list", "data": [{"id": "canned", "object": "model", "root": "canned"}]})
NUM_TOKENS = 100
"""Of a reply; a stream has one event for each."""
CHARACTERS_PER_TOKEN = 4
"""Of a prompt, roughly."""
IDS = b",".join(b"%d" % (10_000 + number) for number in range(40_000))
ID_BYTES = len(b"10000,")
MARK = "the prompt's ids"
"""Stands for the prompt's ids in a prepared reply."""


def whole_reply() -> bytes:
    """Return a chat completion of 100 tokens in vLLM's shape."""
    entries = [
        {"token": " word", "logprob": -0.125, "bytes": [32, 119, 111, 114, 100], "top_logprobs": []}
    ] * NUM_TOKENS
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": " word" * NUM_TOKENS, "reasoning": None},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [1234] * NUM_TOKENS,
    }
    usage = {"prompt_tokens": 500, "completion_tokens": NUM_TOKENS, "total_tokens": 500 + NUM_TOKENS}
    head = {"id": "chatcmpl-canned", "object": "chat.completion", "created": 1, "model": "canned"}
    return orjson.dumps({**head, "choices": [choice], "usage": usage, "prompt_token_ids": MARK})


def streamed_reply() -> bytes:
    """Return the same completion as 100 events of one token."""
    head = {"id": "chatcmpl-canned", "object": "chat.completion.chunk", "created": 1, "model": "canned"}
    first = {
        **head,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
        "prompt_token_ids": MARK,
    }
    entry = {"token": " word", "logprob": -0.125, "bytes": [32, 119, 111, 114, 100], "top_logprobs": []}
    choice = {
        "index": 0,
        "delta": {"content": " word"},
        "logprobs": {"content": [entry]},
        "finish_reason": None,
        "token_ids": [1234],
    }
    events = [first, *[{**head, "choices": [choice]}] * (NUM_TOKENS - 1)]
    events.append({**head, "choices": [{**choice, "finish_reason": "stop"}]})
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    """Return a complete HTTP answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


WHOLE, STREAMED = (reply.split(orjson.dumps(MARK)) for reply in (whole_reply(), streamed_reply()))
MODEL_LIST, EMPTY = answer(MODELS), answer(b"{}")


def completion(request: bytes) -> bytes:
    """Return the answer to a request, with an id for every few characters of it."""
    is_stream = b'"stream":true' in request
    before, after = STREAMED if is_stream else WHOLE
    ids = IDS[: len(request) // CHARACTERS_PER_TOKEN * ID_BYTES - 1]
    return answer(b"%b[%b]%b" % (before, ids, after), b"text/event-stream" if is_stream else b"application/json")


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._data = b""

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            self._transport.write(self._answer(head, body))

    @staticmethod
    def _answer(head: bytes, body: bytes) -> bytes:
        if head.startswith(b"post /v1/chat/completions"):
            return completion(body)
        return MODEL_LIST if head.startswith(b"get /v1/models") else EMPTY


async def serve(port: int) -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
