"""`/v1/messages`: Anthropic's Messages, translated to a chat call.

The engine and the store see the chat conversation: a tool result is a message of its own, thinking is the reply's
reasoning. The reply goes back as blocks. The same blocks in the next request become the same chat message, so the next
call extends the turn.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from proxy.dialects.base import MESSAGES, SAMPLED_ENDS, STREAM, Action, Call, WireRoute
from proxy.dialects.chat import check_kinds, without_billing
from proxy.features.formats.blocks import (
    Block,
    BlockEncoder,
    blocks_of,
    counts_of,
    cut_off_error,
    embedded,
    named_event,
    own_id,
    read_error,
)
from proxy.features.formats.translated import (
    Translated,
    TranslatedCall,
    chat_tool,
    chat_tool_call,
    failed_text,
    joined_content,
    parts_of,
    stream_and_prefill,
)
from turnwise.errors import EngineUnavailable, InvalidRequest
from turnwise.json_text import dumps
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
REFUSED = "content_filter"
"""The engine's finish reason of a reply that Anthropic calls a refusal."""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_DATE = re.compile(r"_\d{8}$")
TRANSLATED = frozenset(
    {
        *("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config"),
        *("output_format", "stream_options", "thread"),
    }
)
IGNORED = frozenset(
    {
        *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "service_tier"),
        *("betas", "mcp_servers", "speed"),
    }
)


HOSTED_BLOCKS = frozenset(
    {
        *("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "fallback"),
        *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result", "tool_search_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "advisor_tool_result"),
    }
)
"""Blocks of a reply that only Anthropic's own service can read or produce. They are ignored, as unknown ones are."""
SAID = ("text", "compaction", "thinking", "tool_use")


class Messages(Translated):
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

    def parse(self, body: Json, *, failed_tool_text: str = "") -> TranslatedCall:
        if not body.get("messages"):
            raise InvalidRequest("`messages` must hold at least one message.", param="messages")
        if not isinstance(body.get("max_tokens"), int):
            raise InvalidRequest("`max_tokens` must be an integer.", param="max_tokens")
        call = super().parse(body, failed_tool_text=failed_tool_text)
        call.wants_logprobs = False
        call.dropped_tools = [server_tool_name(tool) for tool in body.get("tools") or () if is_server_tool(tool)]
        call.dropped_items = [
            str(block.get("type"))
            for role, blocks in map(_role_and_blocks, body["messages"])
            for block in (blocks if role == "assistant" else ())
            if block.get("type") not in SAID
        ]
        call.previous_turn_id = previous_message_id(body.get("thread"))
        call.encode_with(MessageEncoder)
        return call

    def resume(self, call: Call, earlier: TurnView) -> None:
        """Put the thread's conversation before the call's messages; a thread keeps the tools it was created with."""
        super().resume(call, earlier)
        if earlier.tools and not call.tools:
            call.body["tools"] = earlier.tools

    def translate(self, body: Json, failed_tool_text: str) -> Json:
        return chat_body(body, failed_tool_text)

    def encode_reply(self, reply: bytes, call: Call) -> bytes:
        decoded = msgspec.json.decode(reply)
        choice = decoded["choices"][0]
        finish_reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
        if is_cut_off(finish_reason):
            raise EngineUnavailable(cut_off_error(finish_reason))
        blocks = [each.shown() for each in blocks_of(choice.get("message")) if not each.is_cut_call(finish_reason)]
        message = _head(decoded)
        message |= {
            "content": [_content(block, message["id"]) for block in blocks],
            **_stop(finish_reason, stop, has_calls=any(block.kind == "tool" for block in blocks)),
            "usage": usage_of(decoded.get("usage") or {}),
        }
        return orjson.dumps(self.finished(message, decoded, call))

    def finished(self, message: Json, reply: Json, call: Call) -> Json:  # noqa: ARG002
        """Return a whole message as it is sent, by the engine's reply and the call."""
        return message

    def encode_models(self, models: list[Json]) -> Json:
        data = [self.encode_model(model) for model in models]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    def encode_model(self, model: Json) -> Json:
        created_at = datetime.datetime.fromtimestamp(model.get("created") or 0, datetime.UTC)
        named = {"type": "model", "id": model["id"], "display_name": model["id"]}
        return named | {"created_at": created_at.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def encode_error(self, status: int, body: bytes) -> bytes:
        error = read_error(body)
        encoded = _error(error, ERROR_TYPES.get(status, "api_error"))
        if error.get("code") == "previous_response_not_found":
            encoded["error"]["details"] = {"error_code": "thread_not_found"}
        return orjson.dumps(encoded)


class MessageEncoder(BlockEncoder):
    """Writes Anthropic's events: one block after another.

    A call is sent when the reply is complete, so its input is always a whole object; a cut call is not sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self._message_id = ""
        self._num_closed = 0
        self._has_calls = False

    def starting(self, chunk: Json) -> bytes:
        message = _head(chunk)
        self._message_id = message["id"]
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage_of(self.usage)}
        return named_event("message_start", {"message": message | empty})

    def opening(self, block: Block) -> bytes:
        if block.kind == "tool":
            return b""
        return self._event("start", content_block=_content(block, ""))

    def growing(self, block: Block, text: str, logprobs: list[Json]) -> bytes:  # noqa: ARG002  Anthropic has none
        match block.kind:
            case "thinking":
                return self._delta(type="thinking_delta", thinking=text)
            case "text":
                return self._delta(type="text_delta", text=text)
            case _:
                return b""

    def closing(self, block: Block) -> bytes:
        if block.is_cut_call(self.finish_reason) or (block.kind == "tool" and is_cut_off(self.finish_reason)):
            return b""
        events, shown = b"", block.shown()
        if block.kind == "thinking":
            events = self._delta(type="signature_delta", signature=self._message_id)
        elif shown.kind != block.kind:
            events = self._event("start", content_block=_content(dataclasses.replace(shown, text=""), ""))
            events += self._delta(type="text_delta", text=shown.text)
        elif block.kind == "tool":
            self._has_calls = True
            whole = block.text
            block.text = ""
            events = self._event("start", content_block=_content(block, ""))
            events += self._delta(type="input_json_delta", partial_json=whole.strip() or "{}")
        events += self._event("stop")
        self._num_closed += 1
        return events

    def ending(self) -> bytes:
        if is_cut_off(self.finish_reason):
            return self.failing({"message": cut_off_error(self.finish_reason)}, 503)
        delta = _stop(self.finish_reason, self.stop_reason, has_calls=self._has_calls)
        ended = named_event("message_delta", self.ended(delta, usage_of(self.usage)))
        return ended + named_event("message_stop", {})

    def ended(self, delta: Json, usage: Json) -> Json:
        """Return the fields of the last event but one."""
        return {"delta": delta, "usage": usage}

    def failing(self, error: Json, status: int) -> bytes:
        body = _error(error, ERROR_TYPES.get(status, "api_error"))
        return named_event("error", {"error": body["error"]})

    def _delta(self, **delta: str) -> bytes:
        return self._event("delta", delta=delta)

    def _event(self, name: str, **data: Any) -> bytes:
        return named_event(f"content_block_{name}", {"index": self._num_closed, **data})


def is_cut_off(finish_reason: str | None) -> bool:
    return finish_reason not in SAMPLED_ENDS and finish_reason != REFUSED


def _stop(finish_reason: str | None, stop: Any, *, has_calls: bool) -> Json:
    reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
    if finish_reason == "length":
        reason = "max_tokens"
    elif finish_reason == REFUSED:
        reason = "refusal"
    elif has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}


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


def usage_of(usage: Json) -> Json:
    prompt, sampled, cached, _ = counts_of(usage)
    return {
        "input_tokens": prompt - cached,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _error(error: Json, kind: str) -> Json:
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message", "the call failed"))}}


def chat_body(body: Json, failed_tool_text: str) -> Json:
    check_kinds(body, {"messages": list, "tools": list, "thinking": dict, "output_config": dict, "tool_choice": dict})
    check_kinds(body, {"output_format": dict})
    chat = {field: value for field, value in body.items() if field not in TRANSLATED | IGNORED}
    chat["messages"] = [*_system(body.get("system")), *chat_messages(body.get("messages") or [], failed_tool_text)]
    if tools := [_chat_tool(tool) for tool in body.get("tools") or () if not is_server_tool(tool)]:
        chat["tools"] = tools
    if (choice := body.get("tool_choice")) and (tools or not body.get("tools")):
        chat |= _chat_tool_choice(choice, body.get("tools") or [])
    if stops := body.get("stop_sequences"):
        chat["stop"] = stops
    if (body.get("thinking") or {}).get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    # Anthropic's earlier name of the format, which its beta still takes.
    chat |= _chat_output({"format": body.get("output_format")} | (body.get("output_config") or {}), chat)
    return chat | stream_and_prefill(body, chat["messages"])


def chat_messages(messages: list[Any], failed_tool_text: str) -> Iterator[Json]:
    """Translate messages to chat messages. As Anthropic does, combine consecutive messages of one role.

    Raises:
        InvalidRequest: a message or block has the wrong shape.
    """
    for role, same in itertools.groupby(map(_role_and_blocks, messages), key=operator.itemgetter(0)):
        blocks = [block for _, own in same for block in own]
        match role:
            case "assistant":
                yield _assistant_message(blocks)
            case "system":
                yield from _system(blocks)
            case "user":
                yield from _user_messages(blocks, failed_tool_text)
            case other:
                raise InvalidRequest(f"a role is 'user' or 'assistant', not {other!r:.40}.", param="messages")


def _role_and_blocks(message: Any) -> tuple[Any, list[Json]]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"`messages` must hold objects, not {message!r:.80}.", param="messages")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise InvalidRequest(f"`content` must be a text or a list of blocks, not {content!r:.80}.", param="messages")
    return message.get("role"), blocks


def _system(system: Any) -> Iterator[Json]:
    texts = [system] if isinstance(system, str) else list(map(_text_block, parts_of(system, "system")))
    message = without_billing({"role": "system", "content": "\n".join(filter(None, texts))})
    if message is not None and message["content"]:
        yield message


def _text_block(block: Json) -> str:
    """Return the text of a block among which only text is served.

    Raises:
        InvalidRequest: it is of another type.
    """
    if block.get("type", "text") != "text":
        raise InvalidRequest(
            f"a block of type {block['type']!r:.40} cannot be served here; send text", param="messages"
        )
    check_kinds(block, {"text": str})
    return _said(block, "text")


def _said(block: Json, field: str) -> str:
    """Return a text, which may be written as a number."""
    if isinstance(block.get(field), bool) or not isinstance(block.get(field), int | float):
        check_kinds(block, {field: str})
    return str(block.get(field) or "")


def _assistant_message(blocks: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": None}
    said = {"text": "text", "compaction": "content"}
    if texts := [_said(block, said[kind]) for block in blocks if (kind := str(block.get("type"))) in said]:
        message["content"] = "".join(texts)
    if thinking := "".join(_said(block, "thinking") for block in blocks if block.get("type") == "thinking"):
        message["reasoning"] = thinking
    if calls := [_chat_tool_call(block) for block in blocks if block.get("type") == "tool_use"]:
        message["tool_calls"] = calls
    return message


def _chat_tool_call(block: Json) -> Json:
    check_kinds(block, {"input": dict})
    return chat_tool_call(block.get("id"), block.get("name"), dumps(block.get("input") or {}).decode())


def _user_messages(blocks: list[Json], failed_tool_text: str) -> Iterator[Json]:
    rest = []
    for block in blocks:
        if block.get("type") != "tool_result":
            rest += _chat_parts(block)
            continue
        content = "" if block.get("content") is None else block["content"]
        parts = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else [part for one in parts_of(content, "content") for part in _chat_parts(one)]
        )
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if block.get("is_error"):
            text = failed_text(text, failed_tool_text)
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        rest += [part for part in parts if part["type"] != "text"]
    if rest:
        yield {"role": "user", "content": joined_content(rest)}


def _chat_parts(block: Json) -> list[Json]:
    """Return a block's part, or those of a document that shows pages as images."""
    source = block.get("source")
    pages = source.get("content") if block.get("type") == "document" and isinstance(source, dict) else None
    if isinstance(pages, list) and any(page.get("type") != "text" for page in parts_of(pages, "content")):
        heading = "\n".join(text for field in ("title", "context") if (text := _said(block, field)))
        return [*([{"type": "text", "text": heading}] if heading else []), *map(_chat_part, pages)]
    return [_chat_part(block)]


def _chat_part(block: Json) -> Json:
    if (text := _block_text(block)) is not None:
        return {"type": "text", "text": text}
    check_kinds(block, {"source": dict})
    source = block.get("source") or {}
    check_kinds(source, {"url": str, "data": str, "media_type": str})
    match block.get("type"), source.get("type"):
        case "image", "base64" if source.get("media_type") and source.get("data"):
            url = f"data:{source['media_type']};base64,{source['data']}"
        case "image", "url" if source.get("url"):
            url = source["url"]
        case "image", kind:
            raise InvalidRequest(
                f"an image with a source of type {kind!r:.40} cannot be served; send its source as `base64` or `url`, "
                "with what it names",
                param="messages",
            )
        case "document", kind:
            raise InvalidRequest(
                f"a document with a source of type {kind!r:.40} cannot be served; send its text, as a source of type "
                "`text`, or its pages as images, in one of type `content`",
                param="messages",
            )
        case kind, _:
            raise InvalidRequest(
                f"a block of type {kind!r:.40} cannot be served; send text or images", param="messages"
            )
    return {"type": "image_url", "image_url": {"url": url}}


def _block_text(block: Json) -> str | None:
    """Return the text that a block stands for; None for an image, and for a block that cannot be served."""
    source = block.get("source")
    match block.get("type"), source.get("type") if isinstance(source, dict) else None:
        case "text", _:
            return _text_block(block)
        case "document", ("text" | "content") as kind:
            own = (source or {}).get("data" if kind == "text" else "content")
            texts = [_said(block, "title"), _said(block, "context"), _text_of(own)]
        case "search_result", _:
            texts = [_said(block, "title"), _said(block, "source"), _text_of(block.get("content"))]
        case "tool_reference", _:
            texts = [_said(block, "tool_name")]
        case "compaction", _:
            texts = [_text_of(block.get("content"))]
        case _:
            return None
    return "\n".join(filter(None, texts))


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(map(_text_block, parts_of(content, "content")))


def is_server_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "custom"


def server_tool_name(tool: Json) -> str:
    return _DATE.sub("", str(tool["type"]))


def _chat_tool(tool: Any) -> Json:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"a tool must be an object with `name` and `input_schema`, not {tool!r:.80}", param="tools"
        )
    return chat_tool(tool.get("name"), tool.get("description"), tool.get("input_schema") or {}, tool.get("strict"))


def _chat_tool_choice(choice: Json, tools: list[Any]) -> Json:
    check_kinds(choice, {"type": str})
    chat: Json = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if choice.get("type") == "tool":
        named = [tool for tool in tools if isinstance(tool, dict) and tool.get("name") == choice.get("name")]
        if named and all(map(is_server_tool, named)):
            return chat  # the choice goes with its tool
        return chat | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if choice.get("type") not in TOOL_CHOICES:
        raise InvalidRequest(f"a tool choice is auto, any, tool or none, not {choice!r:.80}.", param="tool_choice")
    return chat | {"tool_choice": TOOL_CHOICES[choice["type"]]}


def previous_message_id(thread: Any) -> str | None:
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
        wanted["reasoning_effort"] = effort
    if schema := (config.get("format") or {}).get("schema"):
        wanted["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return wanted
