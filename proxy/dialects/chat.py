"""`/v1/chat/completions`, the engine's own dialect, to which most others are translated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from proxy.dialects.base import (
    IDENTITY,
    MAX_MESSAGES,
    MESSAGES,
    STREAM,
    SYSTEM_ROLES,
    Action,
    Call,
    Dialect,
    WireRoute,
    sampled_tokens,
)
from turnwise.errors import InvalidRequest
from turnwise.json_text import json_object
from turnwise.types import Json, Turn

MAX_CHOICES = 128
"""Largest `n` of one call."""
UNREAD_CALL = "This tool call could not be read: "
"""What the text of a call begins with that no client of a format of objects could read. Digests of conversations leave
such a text out, as they leave out the call."""
BILLING = "x-anthropic-billing-header:"
_BILLING_LINE = re.compile(rf"^[ \t]*{BILLING}.*\n?", re.MULTILINE)
JSON_NAME: Mapping[type, str] = {list: "array", dict: "object", str: "string"}


class ChatCompletions(Dialect):
    """OpenAI's chat completions, as vLLM serves them."""

    name = "chat"
    routes: ClassVar[Sequence[WireRoute]] = (
        WireRoute(
            path="/v1/chat/completions",
            summary="Sample a reply to a conversation, as OpenAI's chat completions",
            required=("messages",),
            properties={
                "messages": MESSAGES,
                "stream": STREAM,
                "n": {"type": "integer", "minimum": 1},
                "metadata": IDENTITY,
            },
        ),
        WireRoute(method="GET", path="/v1/models", action=Action.LIST_MODELS, summary="List the served models"),
        WireRoute(
            method="GET",
            path="/v1/models/{model:model}",
            action=Action.GET_MODEL,
            summary="Describe a served model",
        ),
    )
    engine_route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    object_names = ("chat.completion", "chat.completion.chunk")
    call_type: ClassVar[type[Call]] = Call

    def parse(self, body: Json, *, failed_tool_text: str = "") -> Call:  # noqa: ARG002
        messages = body.get("messages") or []
        if not isinstance(messages, list) or not set(map(type, messages)) <= {dict}:
            raise InvalidRequest("`messages` must be a list of objects.", param="messages")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"`messages` has {len(messages)} entries; at most {MAX_MESSAGES} are served.", param="messages"
            )
        check_kinds(body, {"tools": list, "chat_template_kwargs": dict, "metadata": dict, "model": str})
        if any(_is_billed(each) for each in messages if each.get("role") in SYSTEM_ROLES):
            messages = [kept for each in messages if (kept := without_billing(each)) is not None]
            body = {**body, "messages": messages}
        hides_thinking = body.get("include_reasoning") is False
        return self.call_type(
            dialect=self,
            body=body,
            model=body.get("model") or "",
            messages=messages,
            stream=bool(body.get("stream")),
            num_choices=1 if body.get("n") is None else number_of_choices(body),
            wants_logprobs=bool(body.get("logprobs")) and not hides_thinking,
            hides_thinking=hides_thinking,
            wants_token_ids=bool(body.get("return_token_ids")),
        )

    def rebuild_choice(self, call: Call, turn: Turn, index: int, texts: Mapping[int, str]) -> Json:
        message = turn.response
        if call.stream and message.get("tool_calls"):
            called = [{**each, "index": position} for position, each in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": called}
        field = "delta" if call.stream else "message"
        logprobs = None
        if call.wants_logprobs:
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in sampled_tokens(turn, texts)
            ]
            logprobs = {"content": content}
        choice = {"index": index, field: message, "logprobs": logprobs, "finish_reason": turn.finish_reason}
        return {**choice, "token_ids": turn.token_ids.tolist()} if call.wants_token_ids else choice


def _is_billed(message: Json) -> bool:
    content = message.get("content")
    if message.get("role") not in SYSTEM_ROLES or not content:
        return False
    texts = [content] if isinstance(content, str) else [part.get("text") for part in _parts(content)]
    return any(BILLING in text for text in texts if isinstance(text, str))


def without_billing(message: Json) -> Json | None:
    """Return a message without lines that only Anthropic's service reads; None if nothing else is in it.

    Claude Code writes such a line into its system text, with a digest that changes with every call: it would break each
    chain, and mean nothing to the model. Gateways carry it into other formats.
    """
    if not _is_billed(message):
        return message
    content = message["content"]
    if isinstance(content, str):
        left = _BILLING_LINE.sub("", content)
        return {**message, "content": left} if left else None
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or BILLING not in text:
            parts.append(part)
        elif left := _BILLING_LINE.sub("", text):
            parts.append({**part, "text": left})
    return {**message, "content": parts} if parts else None


def _parts(content: Any) -> list[Json]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def with_readable_arguments(message: Json) -> Json:
    """Return a message in which the arguments of every tool call are an object; others become an empty object.

    A sampled call with broken JSON would otherwise end its conversation: engines refuse every later request with it.
    """
    calls = message["tool_calls"]
    if not isinstance(calls, list) or all(map(is_readable, calls)):
        return message
    without = [
        call if is_readable(call) else {**call, "function": {**call["function"], "arguments": "{}"}} for call in calls
    ]
    return {**message, "tool_calls": without}


def is_readable(call: Any) -> bool:
    """Return whether the arguments of a tool call are an object; they are not if the reply was cut off in them."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return not isinstance(arguments, str) or not arguments or json_object(arguments) is not None


def check_kinds(body: Json, kinds: Mapping[str, type]) -> None:
    for field, kind in kinds.items():
        if body.get(field) is not None and not isinstance(body[field], kind):
            raise InvalidRequest(f"`{field}` must be a JSON {JSON_NAME[kind]}, not {body[field]!r:.80}.", param=field)


def number_of_choices(body: Json) -> int:
    count = body.get("n")
    if count is None:
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or count > MAX_CHOICES:
        raise InvalidRequest(f"`n` must be an integer from 1 to {MAX_CHOICES}, not {count!r}.", param="n")
    return max(count, 1)
