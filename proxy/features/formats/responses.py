"""`/v1/responses`: OpenAI's Responses as a chat call; what of a stored history a new request replaces.

The items of one reply (thinking, text, function calls) are one chat message. The same items in the next request become
the same message, so the next call extends the turn. `previous_response_id` names a stored turn, so the dialect itself
keeps no state between calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from proxy.dialects.base import ENDED, IDENTITY, STREAM, Action, Call, WireRoute
from proxy.dialects.chat import check_kinds
from proxy.features.formats.blocks import (
    Block,
    BlockEncoder,
    counts_of,
    cut_off_error,
    named_event,
    own_id,
    text_logprobs,
)
from proxy.features.formats.response_items import (
    HOSTED_ITEMS,
    ToolMap,
    chat_messages,
    chat_tool_choice,
    custom_input,
    is_reference,
    item_id,
    item_status,
    output_item,
    read_tools,
    referenced_turn,
    reply_blocks,
    resolved,
)
from proxy.features.formats.translated import Translated, TranslatedCall, stream_and_prefill
from turnwise.errors import InvalidRequest, NotFound
from turnwise.json_text import dumps
from turnwise.store.turns import TurnView
from turnwise.types import Json, Turn

LOGPROBS = "message.output_text.logprobs"
TRANSLATED = frozenset(
    {"input", "instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens", "stream_options"}
)
IGNORED = frozenset(
    {
        *("include", "max_tool_calls", "previous_response_id", "prompt_cache_key", "prompt_cache_options"),
        *("client_metadata", "context_management", "conversation", "moderation"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "truncation", "top_logprobs"),
    }
)
"""Fields that are handled elsewhere or concern only OpenAI's own service."""
UNSERVED = ("background", "prompt")
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The engine's finish reason → OpenAI's reason of an incomplete response; any other cut makes it a failed one."""
ERROR_CODES = {400: "invalid_prompt", 422: "invalid_prompt", 429: "rate_limit_exceeded"}
CONVERSATION = "conversation"
STORE = "store"
"""False in the request: the reply is stored as any other, and not returned by its id, as OpenAI promises."""


class Responses(Translated):
    """OpenAI's Responses."""

    name = "responses"
    routes: ClassVar[Sequence[WireRoute]] = (
        WireRoute(
            path="/v1/responses",
            summary="Sample a reply, as OpenAI's responses",
            required=("input",),
            properties={"input": {"type": ["string", "array"]}, "stream": STREAM, "metadata": IDENTITY},
        ),
        WireRoute(
            method="GET",
            path="/v1/responses/{response_id}",
            action=Action.GET_REPLY,
            summary="Return a stored reply, as OpenAI's responses",
        ),
        WireRoute(
            path="/v1/responses/compact",
            action=Action.COMPACT,
            summary="Summarise a conversation, as OpenAI's compaction",
            properties={"input": {"type": ["string", "array"]}, "metadata": IDENTITY},
        ),
    )
    id_prefix = "resp_"
    conversation_field = "input"

    def translate(self, body: Json, failed_tool_text: str) -> Json:
        return chat_body(body, read_tools(body.get("tools")), failed_tool_text)

    def parse(self, body: Json, *, failed_tool_text: str = "") -> TranslatedCall:
        call = super().parse(body, failed_tool_text=failed_tool_text)
        tools = read_tools(body.get("tools"))
        call.dropped_tools = tools.dropped
        if isinstance(body.get("input"), list):
            call.dropped_items = [item["type"] for item in body["input"] if item.get("type") in HOSTED_ITEMS]
        call.previous_turn_id = body.get("previous_response_id")
        call.conversation_id = conversation_id(body)
        call.notes = {"instructions": True} if body.get("instructions") else {}
        if body.get(STORE) is False:
            call.notes[STORE] = False
        if call.conversation_id is not None:
            call.notes[CONVERSATION] = call.conversation_id
        call.encode_with(partial(ResponseEncoder, call.original, tools))
        return call

    def referenced_turns(self, body: Json) -> list[str]:
        items = body["input"] if isinstance(body.get("input"), list) else []
        return [turn_id for item in filter(is_reference, items) if (turn_id := referenced_turn(item)[0])]

    def resolve_references(self, body: Json, stored: Mapping[str, Json]) -> Json:
        tools = read_tools(body.get("tools"))
        return {**body, "input": [resolved(item, stored, tools) for item in body["input"]]}

    def resume(self, call: Call, earlier: TurnView) -> None:
        """Put the stored conversation before the call's messages.

        Instructions hold for one response only: the earlier ones are dropped, the call's own come first.
        """
        own, before = call.messages, earlier.messages
        if earlier.turn.sampling.get("instructions"):
            before = before[1:]
        num_instructions = 1 if call.notes.get("instructions") else 0
        call.messages = [*own[:num_instructions], *before, earlier.turn.response, *own[num_instructions:]]
        call.body["messages"] = call.messages

    def encode_reply(self, reply: bytes, call: Call) -> bytes:
        return self._encoded(msgspec.json.decode(reply), call.original)

    def encode_stored(self, turn: Turn) -> bytes:
        if not turn.turn_id.startswith(self.id_prefix) or not turn.response or turn.sampling.get(STORE) is False:
            raise NotFound(f"response {turn.turn_id!r} is not stored", code="response_not_found")
        num_prompt, num_sampled = turn.prompt_length, len(turn.token_ids)
        counts = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }
        reply = {
            "id": turn.turn_id,
            "created": int(turn.created_at.timestamp()),
            "model": turn.model,
            "choices": [{"message": turn.response, "finish_reason": turn.finish_reason}],
            "usage": counts,
        }
        known = {field: turn.sampling.get(field) for field in ("temperature", "top_p", "user", CONVERSATION)}
        return self._encoded(reply, known | {"max_output_tokens": turn.sampling.get("max_completion_tokens")})

    def _encoded(self, decoded: Json, request: Json) -> bytes:
        choice = decoded["choices"][0]
        response, finish_reason = _head(decoded, request), choice.get("finish_reason")
        blocks, tools = reply_blocks(choice.get("message")), read_tools(request.get("tools"))
        logprobs = text_logprobs(choice.get("logprobs"), blocks)
        output = [
            output_item(block, response["id"], tools, logprobs, item_status(block, blocks[-1], finish_reason))
            for block in blocks
        ]
        return dumps(response | _ending(finish_reason, decoded.get("usage") or {}) | {"output": output})


class ResponseEncoder(BlockEncoder):
    """Writes OpenAI's events for a response; its items grow side by side."""

    def __init__(self, request: Json, tools: ToolMap) -> None:
        super().__init__()
        self._tools = tools
        self._request = request
        self._response: Json = {}
        self._items: dict[int, Json] = {}
        self._logprobs: list[Json] = []
        self._num_events = 0

    def starting(self, chunk: Json) -> bytes:
        self._response = _head(chunk, self._request)
        created = self._event("response.created", response=self._response)
        return created + self._event("response.in_progress", response=self._response)

    def opening(self, block: Block) -> bytes:
        item = output_item(block, self._response["id"], self._tools, status="in_progress")
        if block.kind == "tool":
            return self._item_event("added", block, item)
        added = self._item_event("added", block, item | {"content": []})
        return added + self._part_event("content_part.added", block, part=item["content"][0])

    def growing(self, block: Block, text: str, logprobs: list[Json]) -> bytes:
        match block.kind:
            case "tool" if block.name in self._tools.custom:
                return b""  # its text is known once the arguments that hold it are complete
            case "tool":
                return self._part_event("function_call_arguments.delta", block, delta=text)
            case "thinking":
                return self._part_event("reasoning_text.delta", block, delta=text)
            case _:
                self._logprobs += logprobs
                return self._part_event("output_text.delta", block, delta=text, logprobs=logprobs)

    def closing(self, block: Block) -> bytes:
        status = item_status(block, self.last, self.finish_reason)
        item = output_item(block, self._response["id"], self._tools, self._logprobs, status)
        match block.kind:
            case "tool" if status == "incomplete":
                ended = b""
            case "tool" if block.name in self._tools.custom:
                text = custom_input(block.text)
                ended = self._part_event("custom_tool_call_input.delta", block, delta=text)
                ended += self._part_event("custom_tool_call_input.done", block, input=text)
            case "tool":
                called = {"name": block.name, "arguments": block.text}
                ended = self._part_event("function_call_arguments.done", block, **called)
            case "thinking":
                ended = self._part_event("reasoning_text.done", block, text=block.text)
            case _:
                whole = {"text": block.text, "logprobs": self._logprobs}
                ended = self._part_event("output_text.done", block, **whole)
        if block.kind != "tool":
            ended += self._part_event("content_part.done", block, part=item["content"][0])
        self._items[block.index] = item
        return ended + self._item_event("done", block, item)

    def ending(self) -> bytes:
        events = b""
        if not self._items:
            self.last = Block("text", "")
            events = self.opening(self.last) + self.closing(self.last)
        ended = _ending(self.finish_reason, self.usage)
        return events + self._whole(ended["status"], ended)

    def failing(self, error: Json, status: int) -> bytes:
        """Return the only event that ends a stream for OpenAI's clients beside those of a whole reply."""
        events = b""
        if not self._response:
            model = self._request.get("model")
            events = self.starting({"id": uuid.uuid4().hex, "created": int(time.time()), "model": model})
        code = ERROR_CODES.get(status, "server_error")
        failed = {"error": {"code": code, "message": str(error.get("message", "the call failed"))}}
        return events + self._whole("failed", _ending(None, self.usage) | failed)

    def _whole(self, status: str, ended: Json) -> bytes:
        whole = self._response | ended | {"output": [item for _, item in sorted(self._items.items())]}
        return self._event(f"response.{status}", response=whole)

    def _part_event(self, name: str, block: Block, /, **data: Any) -> bytes:
        part = {} if block.kind == "tool" else {"content_index": 0}
        named = {"output_index": block.index, "item_id": item_id(block, self._response["id"])}
        return self._event(f"response.{name}", **named, **part, **data)

    def _item_event(self, name: str, block: Block, item: Json) -> bytes:
        return self._event(f"response.output_item.{name}", output_index=block.index, item=item)

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._num_events += 1
        return named_event(name, {"sequence_number": self._num_events - 1, **data})


def conversation_id(body: Json) -> str | None:
    """Return the id of the conversation that a request continues; None if it names none.

    Raises:
        InvalidRequest: `conversation` has the wrong shape, or the request also names a previous response.
    """
    given = body.get(CONVERSATION)
    if given is None:
        return None
    named = given.get("id") if isinstance(given, dict) else given
    if not isinstance(named, str) or not named:
        raise InvalidRequest(
            f"`conversation` is an id or an object with an `id`, not {given!r:.80}", param=CONVERSATION
        )
    if body.get("previous_response_id") is not None:
        raise InvalidRequest("send `conversation` or `previous_response_id`, not both", param=CONVERSATION)
    return named


def chat_body(body: Json, tools: ToolMap, failed_tool_text: str) -> Json:
    check_kinds(body, {"text": dict, "reasoning": dict, "include": list, "instructions": str})
    check_kinds(body, {"previous_response_id": str})
    check_kinds(body.get("text") or {}, {"format": dict})
    for field in UNSERVED:
        if body.get(field):
            raise InvalidRequest(f"`{field}` is not served; send the conversation as `input`.", param=field)
    chat = {field: value for field, value in body.items() if field not in TRANSLATED | IGNORED}
    chat["messages"] = [*_instructions(body), *chat_messages(body.get("input"), failed_tool_text)]
    if tools.chat_tools:
        chat["tools"] = tools.chat_tools
    if (choice := body.get("tool_choice")) is not None and (
        tools.chat_tools or not (tools.dropped or choice == "auto")
    ):
        chat |= {} if (chosen := chat_tool_choice(choice, tools.dropped)) is None else {"tool_choice": chosen}
    if (limit := body.get("max_output_tokens")) is not None:
        chat["max_completion_tokens"] = limit
    if effort := (body.get("reasoning") or {}).get("effort"):
        chat["reasoning_effort"] = effort
    if wanted := _response_format((body.get("text") or {}).get("format") or {}):
        chat["response_format"] = wanted
    if LOGPROBS in (body.get("include") or ()) or body.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    return chat | stream_and_prefill(body, [])


def _instructions(body: Json) -> list[Json]:
    text = body.get("instructions")
    return [{"role": "system", "content": text}] if text else []


def _response_format(wanted: Json) -> Json | None:
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value for key, value in wanted.items() if key != "type"}}
    return {"type": "json_object"} if wanted.get("type") == "json_object" else None


def _head(reply: Json, request: Json) -> Json:
    """Return a response that has just started; it repeats fields of the request."""
    repeated: Json = {
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None},
        "metadata": {},
        **dict.fromkeys(("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")),
    }
    named = conversation_id(request)
    return {
        "conversation": None if named is None else {"id": named},
        "id": own_id(reply["id"], Responses.id_prefix),
        "object": "response",
        "created_at": reply["created"],
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": reply["model"],
        "output": [],
        "store": request.get("store") is not False,
        "usage": None,
        **{field: default if request.get(field) is None else request[field] for field, default in repeated.items()},
    }


def _ending(finish_reason: str | None, usage: Json) -> Json:
    num_prompt, num_sampled, cached, reasoning = counts_of(usage)
    cut = INCOMPLETE.get(finish_reason or "")
    failed = cut is None and finish_reason not in ENDED
    return {
        "status": "failed" if failed else "completed" if cut is None else "incomplete",
        "incomplete_details": None if cut is None else {"reason": cut},
        "error": {"code": "server_error", "message": cut_off_error(finish_reason)} if failed else None,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": num_prompt + num_sampled,
        },
    }
