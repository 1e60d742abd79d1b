"""`/v1/messages`: Anthropic's Messages, translated to a chat call.

The engine and the store see the chat conversation: a tool result is a message of its own, thinking is the reply's
reasoning. The reply goes back as blocks. The same blocks in the next request become the same chat message, so the next
call extends the turn.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from proxy.dialects.base import MESSAGES, STREAM, Action, Call, WireRoute
from proxy.dialects.blocks import Block, BlockEncoder, blocks_of, embedded, own_id, read_error
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.messages_request import chat_body, is_server_tool, previous_message_id, server_tool_name
from proxy.dialects.sse import named_event
from turnwise.errors import InvalidRequest
from turnwise.json_text import json_object
from turnwise.store.turns import TurnView
from turnwise.types import Json

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status → Anthropic's error type; any other status is an `api_error`."""


class Messages(ChatCompletions):
    """Anthropic's Messages."""

    name = "messages"
    routes: ClassVar[Sequence[WireRoute]] = (
        WireRoute(
            path="/v1/messages",
            summary="Sample a reply, as Anthropic's messages",
            required=("messages", "max_tokens"),
            properties={
                "messages": MESSAGES,
                "max_tokens": {"type": "integer", "minimum": 1},
                "stream": STREAM,
            },
        ),
        WireRoute(
            path="/v1/messages/count_tokens",
            action=Action.COUNT_TOKENS,
            summary="Count a prompt's tokens, as Anthropic's",
            required=("messages",),
            properties={"messages": MESSAGES},
        ),
    )
    error_prefixes = ("/v1/messages",)
    marker_header = b"anthropic-version"
    error_schema: ClassVar[Json] = {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}},
    }
    id_prefix = "msg_"

    def parse(self, body: Json, *, max_choices: int, max_messages: int) -> Call:
        """Translate a request to a chat call.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """
        if not body.get("messages"):
            raise InvalidRequest("`messages` must hold at least one message.", param="messages")
        if not isinstance(body.get("max_tokens"), int):
            raise InvalidRequest("`max_tokens` must be an integer.", param="max_tokens")
        call = super().parse(chat_body(body), max_choices=max_choices, max_messages=max_messages)
        call.wants_logprobs = call.wants_token_ids = False
        call.dropped_tools = [server_tool_name(tool) for tool in body.get("tools") or () if is_server_tool(tool)]
        call.previous_turn_id = previous_message_id(body.get("thread"))
        call.encode_with(MessageEncoder)
        return call

    def resume(self, call: Call, earlier: TurnView) -> None:
        """Put the thread's conversation before the call's messages; a thread keeps the tools it was created with."""
        super().resume(call, earlier)
        if earlier.tools and not call.tools:
            call.body["tools"] = earlier.tools

    def count_request(self, body: Json) -> Json:
        """Return the chat request that the same message request would become."""
        return chat_body(body)

    def encode_reply(self, reply: bytes, call: Call) -> bytes:  # noqa: ARG002  the reply has all that is needed
        """Return a chat reply as a message of blocks."""
        decoded = msgspec.json.decode(reply)
        choice = decoded["choices"][0]
        blocks = list(blocks_of(choice["message"]))
        message = _head(decoded)
        message |= {
            "content": [_content(block, message["id"]) for block in blocks],
            "stop_reason": stop_reason(choice.get("finish_reason"), choice.get("stop_reason"), blocks),
            "stop_sequence": _stop_sequence(choice.get("stop_reason")),
            "usage": _usage(decoded.get("usage") or {}),
        }
        return orjson.dumps(message)

    def encode_models(self, models: list[Json]) -> Json:
        """Return Anthropic's list of models."""
        data = [self.encode_model(model) for model in models]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    def encode_model(self, model: Json) -> Json:
        """Return Anthropic's description of a model."""
        created_at = datetime.datetime.fromtimestamp(model.get("created") or 0, datetime.UTC)
        named = {"type": "model", "id": model["id"], "display_name": model["id"]}
        return named | {"created_at": created_at.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def encode_error(self, status: int, body: bytes) -> bytes:
        """Return an error in Anthropic's shape."""
        error = read_error(body)
        encoded = _error(error, ERROR_TYPES.get(status, "api_error"))
        if error.get("code") == "previous_response_not_found":
            encoded["error"]["details"] = {"error_code": "thread_not_found"}
        return orjson.dumps(encoded)


class MessageEncoder(BlockEncoder):
    """Writes Anthropic's events."""

    def __init__(self) -> None:
        super().__init__()
        self._message_id = ""

    def starting(self, chunk: Json) -> bytes:
        """Open the message."""
        message = _head(chunk)
        self._message_id = message["id"]
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self.usage)}
        return named_event("message_start", {"message": message | empty})

    def opening(self, block: Block) -> bytes:
        """Open a block."""
        content = _content(block, "")
        return named_event("content_block_start", {"index": len(self.closed), "content_block": content})

    def growing(self, block: Block, logprobs: Json | None) -> bytes:  # noqa: ARG002  Anthropic has none
        """Add to the open block; a tool's input is sent when it is complete, so that it is always an object."""
        if block.kind == "tool":
            return b""
        field = "thinking" if block.kind == "thinking" else "text"
        return self._delta({"type": f"{field}_delta", field: block.text})

    def closing(self, block: Block) -> bytes:
        """Close a block, after the signature of thinking or the input of a tool."""
        last = b""
        if block.kind == "thinking":
            last = self._delta({"type": "signature_delta", "signature": self._message_id})
        elif block.kind == "tool":
            text = "{}" if json_object(block.text) is None else block.text
            last = self._delta({"type": "input_json_delta", "partial_json": text})
        return last + named_event("content_block_stop", {"index": len(self.closed)})

    def ending(self) -> bytes:
        """End the message with its stop reason and usage."""
        reason = stop_reason(self.finish_reason, self.stop_reason, self.closed)
        delta = {"stop_reason": reason, "stop_sequence": _stop_sequence(self.stop_reason)}
        usage = {"output_tokens": self.usage.get("completion_tokens", 0)}
        return named_event("message_delta", {"delta": delta, "usage": usage}) + named_event("message_stop", {})

    def failing(self, error: Json) -> bytes:
        body = _error(error, ERROR_TYPES.get(error.get("code") or 0, "api_error"))
        return named_event("error", {"error": body["error"]})

    def _delta(self, delta: Json) -> bytes:
        return named_event("content_block_delta", {"index": len(self.closed), "delta": delta})


def stop_reason(finish_reason: str | None, stop: Any, blocks: list[Block]) -> str:
    """Return Anthropic's name for the reason that ended a reply."""
    if finish_reason == "length":
        return "max_tokens"
    if any(block.kind == "tool" for block in blocks):
        return "tool_use"
    return "stop_sequence" if isinstance(stop, str) else "end_turn"


def _head(reply: Json) -> Json:
    message_id = own_id(reply["id"], Messages.id_prefix)
    return {"id": message_id, "type": "message", "role": "assistant", "model": reply["model"]}


def _content(block: Block, signature: str) -> Json:
    match block.kind:
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": signature}
        case "text":
            return {"type": "text", "text": block.text}
        case _:
            called = {"id": block.tool_call_id, "name": block.name, "input": embedded(block.text)}
            return {"type": "tool_use", **called}


def _stop_sequence(stop: Any) -> str | None:
    return stop if isinstance(stop, str) else None


def _usage(usage: Json) -> Json:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage.get("prompt_tokens", 0) - cached,
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _error(error: Json, kind: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message", "the call failed"))}}
