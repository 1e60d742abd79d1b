"""`/v1/messages`: Anthropic's Messages, translated to a chat call.

The engine and the store see the chat conversation: a tool result is a message of its own, thinking is the reply's
reasoning. The reply goes back as blocks. The same blocks in the next request become the same chat message, so the next
call extends the turn.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import orjson

from proxy.dialects import engine_reply
from proxy.dialects.base import Action, Call, WireRoute
from proxy.dialects.blocks import Block, BlockEncoder, blocks_of, own_id, parsed_arguments, parts_of
from proxy.dialects.chat import ChatCompletions, check_kinds, is_json_object
from proxy.dialects.schemas import MESSAGES, STREAM
from proxy.dialects.sse import named_event
from turnwise.errors import InvalidRequest
from turnwise.store.lineage import TurnView
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
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts that the engine does not know → the nearest one that it knows."""
BOOKKEEPING = "x-anthropic-billing-header"
"""Prefix of a system block that only Anthropic's service reads, and that changes with every call."""
_DATE = re.compile(r"_\d{8}$")
TRANSLATED = frozenset(
    {
        *("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config"),
        *("stream_options", "thread"),
    }
)
IGNORED = frozenset(
    {
        *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "service_tier"),
        *("betas", "mcp_servers", "speed"),
    }
)
"""Fields about Anthropic's own service."""


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
        call.previous_turn_id = _previous_message_id(body.get("thread"))
        call.encoder = MessageEncoder(self.id_prefix)
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
        decoded = engine_reply.decoded(reply)
        choice = decoded["choices"][0]
        blocks = list(blocks_of(choice["message"]))
        message = _head(decoded, self.id_prefix)
        message |= {
            "content": [_whole_block(block, message["id"]) for block in blocks],
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
        try:
            error = orjson.loads(body)["error"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            error = {"message": body.decode(errors="replace")}
        encoded = _error(error, ERROR_TYPES.get(status, "api_error"))
        if error.get("code") == "previous_response_not_found":
            encoded["error"]["details"] = {"error_code": "thread_not_found"}
        return orjson.dumps(encoded)


class MessageEncoder(BlockEncoder):
    """Writes Anthropic's events."""

    def __init__(self, id_prefix: str) -> None:
        super().__init__()
        self._id_prefix = id_prefix
        self._message_id = ""

    def starting(self, chunk: Json) -> bytes:
        """Open the message."""
        message = _head(chunk, self._id_prefix)
        self._message_id = message["id"]
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self.usage)}
        return named_event("message_start", {"message": message | empty})

    def opening(self, block: Block) -> bytes:
        """Open a block."""
        contents = {
            "thinking": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
        }
        content = contents.get(block.kind) or _tool_use(block) | {"input": {}}
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
            text = block.text if is_json_object(block.text) else "{}"
            last = self._delta({"type": "input_json_delta", "partial_json": text})
        return last + named_event("content_block_stop", {"index": len(self.closed)})

    def ending(self) -> bytes:
        """End the message with its stop reason and usage."""
        reason = stop_reason(self.finish_reason, self.stop_reason, self.closed)
        delta = {"stop_reason": reason, "stop_sequence": _stop_sequence(self.stop_reason)}
        usage = {"output_tokens": self.usage.get("completion_tokens", 0)}
        return named_event("message_delta", {"delta": delta, "usage": usage}) + named_event("message_stop", {})

    def failing(self, error: Json) -> bytes:
        """Report an error."""
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


def chat_body(body: Json) -> Json:
    """Translate a request to a chat request.

    Raises:
        InvalidRequest: it asks for something that cannot be served, or a field has the wrong shape.
    """
    check_kinds(body, {"messages": list, "tools": list, "thinking": dict, "output_config": dict, "tool_choice": dict})
    chat = {field: value for field, value in body.items() if field not in TRANSLATED | IGNORED}
    chat["messages"] = [*_system(body.get("system")), *chat_messages(body.get("messages") or [])]
    if tools := [_chat_tool(tool) for tool in body.get("tools") or () if not is_server_tool(tool)]:
        chat["tools"] = tools
    if (choice := body.get("tool_choice")) and (tools or not body.get("tools")):
        chat |= _chat_tool_choice(choice)
    if stops := body.get("stop_sequences"):
        chat["stop"] = stops
    if (body.get("thinking") or {}).get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    chat |= _chat_output(body.get("output_config") or {}, chat)
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def chat_messages(messages: list[Any]) -> Iterator[Json]:
    """Translate messages to chat messages.

    Raises:
        InvalidRequest: a message or block has the wrong shape.
    """
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRequest(f"`messages` must hold objects, not {message!r:.80}.", param="messages")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise InvalidRequest(
                f"`content` must be a text or a list of blocks, not {content!r:.80}.", param="messages"
            )
        match message.get("role"):
            case "assistant":
                yield _assistant_message(blocks)
            case "system":
                yield from _system(content)
            case "user":
                yield from _user_messages(blocks)
            case other:
                raise InvalidRequest(f"a role is 'user' or 'assistant', not {other!r:.40}.", param="messages")


def _system(system: Any) -> Iterator[Json]:
    texts = (
        [system] if isinstance(system, str) else [str(block.get("text", "")) for block in parts_of(system, "system")]
    )
    if kept := [text for text in texts if text and not text.startswith(BOOKKEEPING)]:
        yield {"role": "system", "content": "\n".join(kept)}


def _assistant_message(blocks: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": None}
    if texts := [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]:
        message["content"] = "".join(texts)
    if thinking := "".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"):
        message["reasoning"] = thinking
    if calls := [_chat_tool_call(block) for block in blocks if block.get("type") == "tool_use"]:
        message["tool_calls"] = calls
    return message


def _chat_tool_call(block: Json) -> Json:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _user_messages(blocks: list[Json]) -> Iterator[Json]:
    """Yield one message per tool result, then one message with all other blocks."""
    rest = []
    for block in blocks:
        if block.get("type") != "tool_result":
            rest.append(_chat_part(block))
            continue
        content = block.get("content") or ""
        parts = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else [_chat_part(one) for one in parts_of(content, "content")]
        )
        texts = [part["text"] for part in parts if part["type"] == "text"]
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": "\n".join(texts)}
        rest += [part for part in parts if part["type"] != "text"]
    if all(part["type"] == "text" for part in rest):
        if rest:
            yield {"role": "user", "content": "\n".join(part["text"] for part in rest)}
    else:
        yield {"role": "user", "content": rest}


def _chat_part(block: Json) -> Json:
    """Translate a text or image block to a chat part."""
    check_kinds(block, {"source": dict})
    source = block.get("source") or {}
    match block.get("type"), source.get("type"):
        case "text", _:
            return {"type": "text", "text": str(block.get("text", ""))}
        case "image", "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        case "document", "text":
            return {"type": "text", "text": str(source.get("data", ""))}
        case kind, _:
            raise InvalidRequest(
                f"a block of type {kind!r:.40} cannot be served; send text or images", param="messages"
            )


def is_server_tool(tool: Any) -> bool:
    """Return whether a tool is one that Anthropic runs or defines, such as `web_search_20250305`."""
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "custom"


def server_tool_name(tool: Json) -> str:
    """Return the type of a tool of Anthropic's without its date."""
    return _DATE.sub("", str(tool["type"]))


def _chat_tool(tool: Any) -> Json:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"a tool must be an object with `name` and `input_schema`, not {tool!r:.80}", param="tools"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if description := tool.get("description"):
        function["description"] = description
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Json) -> Json:
    check_kinds(choice, {"type": str})
    chat: Json = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if choice.get("type") == "tool":
        return chat | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if choice.get("type") not in TOOL_CHOICES:
        raise InvalidRequest(f"a tool choice is auto, any, tool or none, not {choice!r:.80}.", param="tool_choice")
    return chat | {"tool_choice": TOOL_CHOICES[choice["type"]]}


def _previous_message_id(thread: Any) -> str | None:
    """Return the id of the message that a call continues; None if the request holds the whole conversation."""
    if not isinstance(thread, dict) or thread.get("type") != "continue":
        return None
    previous = thread.get("previous_message_id")
    if not isinstance(previous, str):
        raise InvalidRequest(f"`previous_message_id` must be a message's id, not {previous!r:.80}.", param="thread")
    return previous


def _chat_output(config: Json, chat: Json) -> Json:
    check_kinds(config, {"effort": str, "format": dict})
    wanted: Json = {}
    if (effort := config.get("effort")) and "reasoning_effort" not in chat:
        wanted["reasoning_effort"] = EFFORTS.get(effort, effort)
    if schema := (config.get("format") or {}).get("schema"):
        wanted["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return wanted


def _head(reply: Json, id_prefix: str) -> Json:
    return {"id": own_id(reply["id"], id_prefix), "type": "message", "role": "assistant", "model": reply["model"]}


def _whole_block(block: Block, message_id: str) -> Json:
    match block.kind:
        case "thinking":
            return {"type": "thinking", "thinking": block.text, "signature": message_id}
        case "text":
            return {"type": "text", "text": block.text}
        case _:
            return _tool_use(block) | {"input": parsed_arguments(block.text)}


def _tool_use(block: Block) -> Json:
    return {"type": "tool_use", "id": block.tool_call_id, "name": block.name}


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
