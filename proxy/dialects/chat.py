"""`/v1/chat/completions`: the engine's own dialect. Every other dialect except completions is translated to it.

The engine always returns token ids and logprobs. They are captured here and stay in the reply only if the client asked
for them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson

from proxy.dialects import engine_reply
from proxy.dialects.base import (
    Action,
    Call,
    Captured,
    Choice,
    Dialect,
    RawJson,
    WireRoute,
    remove_engine_fields,
)
from proxy.dialects.known_requests import KnownRequest
from proxy.dialects.repeated_messages import are_messages, message_list
from proxy.dialects.schemas import IDENTITY, MESSAGES, STREAM
from proxy.dialects.text_chunks import FIELDS, TextChunks, read_text_chunks, stream_head
from turnwise.errors import InvalidRequest
from turnwise.types import Json

FORCED: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "include_reasoning": True}
"""Request fields that capture always sets."""
OMITTED_CALL: Json = {"id": "", "type": "function", "function": {"name": "", "arguments": "{}"}}
"""Stands for a tool call that the engine only counts."""
JSON_NAME: Mapping[type, str] = {list: "array", dict: "object", str: "string"}


class ChatCompletions(Dialect):
    """OpenAI's chat completions, as vLLM serves them."""

    name = "chat"
    repeats_messages = True
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

    def parse(self, body: Json, *, max_choices: int, max_messages: int) -> Call:
        """Return the call; check only the fields that the proxy itself reads.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """
        body, dropped_fields = remove_engine_fields(body)
        messages = body.get("messages") or []
        if not are_messages(messages):
            raise InvalidRequest("`messages` must be a list of objects.", param="messages")
        if len(messages) > max_messages:
            raise InvalidRequest(
                f"`messages` has {len(messages)} entries; at most {max_messages} are served.", param="messages"
            )
        check_kinds(body, {"tools": list, "chat_template_kwargs": dict, "metadata": dict, "model": str})
        return Call(
            dialect=self,
            body=body,
            messages=messages,
            stream=bool(body.get("stream")),
            num_choices=number_of_choices(body, max_choices),
            wants_logprobs=bool(body.get("logprobs")) and not _hides_thinking(body),
            wants_token_ids=bool(body.get("return_token_ids")),
            dropped_fields=dropped_fields,
        )

    def engine_body(
        self, call: Call, prompt_token_ids: list[bytes] | None, pinned: Json, *, num_omitted: int = 0
    ) -> Json:
        """Return the engine request, with the options that capture needs."""
        body, _ = remove_engine_fields({**call.body, **pinned})
        if num_omitted:
            body["messages"] = messages_after(call.messages, num_omitted, call.known_messages)
        elif call.messages:
            body["messages"] = readable_messages(call)
        if not _is_refused(body):
            body |= FORCED
        if prompt_token_ids is not None:
            body["kv_transfer_params"] = RawJson([b'{"prompt_token_ids":', *prompt_token_ids, b"}"])
        return body

    def capture_reply(self, raw: bytes, call: Call) -> tuple[Captured, bytes]:
        """Capture a whole reply; return it without the fields that the client did not ask for.

        Raises:
            msgspec.DecodeError: it is not a chat completion.
        """
        extracted = engine_reply.read_reply(raw, has_one_choice=call.num_choices == 1)
        reply = extracted.reply
        prompt_ids, num_prompt_ids = engine_reply.read_ids(reply.prompt_token_ids)
        captured = Captured(prompt_ids, model=reply.model or "", num_prompt_ids=num_prompt_ids)
        for position, choice in enumerate(reply.choices):
            captured.choices[choice.index] = Choice(
                choice.message or {},
                choice.token_ids or [],
                extracted.logprobs[position:][:1],
                choice.finish_reason,
                routed_experts=choice.routed_experts,
            )
        shown = extracted.rest if call.wants_token_ids else extracted.short
        stripped = engine_reply.without_routing(extracted.raw if call.wants_logprobs else shown)
        stripped = stripped if call.wants_token_ids else engine_reply.without_ids(stripped)
        return captured, _without_thinking(stripped, "message") if _hides_thinking(call.body) else stripped

    def capture_chunks(self, events: list[bytes], captured: Captured, call: Call) -> list[bytes]:
        """Capture chunks of a stream; return those that the client gets, without the fields it did not ask for.

        Raises:
            msgspec.DecodeError: one is not a chunk of a chat completion.
        """
        read = engine_reply.read_chunks(events) if call.num_choices == 1 and events else None
        if read is not None:
            has_content, chunks = _capture_parts(read, captured), read.rest
        else:
            each = [engine_reply.read_reply(event, has_one_choice=call.num_choices == 1) for event in events]
            has_content = [_capture_chunk(extracted, captured) for extracted in each]
            chunks = b"\n".join([extracted.rest for extracted in each])
        if call.wants_logprobs:
            chunks = b"\n".join(events)
        if not call.wants_token_ids:
            chunks = engine_reply.without_ids(chunks)
        kept = chunks.split(b"\n") if events else []
        if not (call.wants_logprobs or call.wants_token_ids or all(has_content)):
            kept = list(itertools.compress(kept, has_content))
        return [_without_thinking(chunk, "delta") for chunk in kept] if _hides_thinking(call.body) else kept

    def find_text_chunks(self, events: bytes, captured: Captured, call: Call) -> TextChunks | None:
        """Return those of some events that extend one text, if they need not be decoded one by one."""
        if call.num_choices != 1 or _hides_thinking(call.body):
            return None
        head = captured.head = captured.head or stream_head(events)
        if not head:
            return None
        for field in FIELDS:
            found = read_text_chunks(events, head, field)
            if found is not None:  # the first chunk of a stream has more than a text
                return found if captured.choices or head in found.before else None
        return None

    def rebuild_choice(self, message: Json, finish_reason: str | None, index: int, *, stream: bool) -> Json:
        """Return a stored choice as vLLM's chat route formats it."""
        if stream and message.get("tool_calls"):
            calls = [{**call, "index": position} for position, call in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": calls}
        field = "delta" if stream else "message"
        return {"index": index, field: message, "logprobs": None, "finish_reason": finish_reason}


def readable_messages(call: Call) -> Any:
    """Return the messages for the engine: the client's own bytes, where these are known and need no change."""
    known = call.known_messages
    if known is None or call.messages_json is None:
        return with_readable_arguments(message_list(call.messages))
    new = message_list(call.messages[known.num_readable :])
    if with_readable_arguments(new) is not new:
        return with_readable_arguments(message_list(call.messages))
    known.num_readable = len(call.messages)
    return RawJson([call.messages_json, b"]"])


def messages_after(messages: Sequence[Json], num_omitted: int, known: KnownRequest | None = None) -> list[Json]:
    """Return the messages for an engine that gets the prompt's ids: the first `num_omitted` are left out.

    vLLM validates the messages of such a request, and it counts their tool calls: the ids of Kimi K2's calls go on from
    that number. So a message with as many tool calls stands for those that are left out.
    """
    num_calls = _count_omitted_calls(messages, num_omitted, known)
    omitted = [{"role": "assistant", "content": "", "tool_calls": [OMITTED_CALL] * num_calls}] if num_calls else []
    return [*omitted, *with_readable_arguments(message_list(messages[num_omitted:]))]


def _count_omitted_calls(messages: Sequence[Json], num_omitted: int, known: KnownRequest | None) -> int:
    """Return the number of tool calls in the first messages; those of an earlier request are counted already."""
    counted, num_calls = (0, 0) if known is None or known.num_calls[0] > num_omitted else known.num_calls
    num_calls += _count_calls(messages[counted:num_omitted])
    if known is not None:
        known.num_calls = len(messages), num_calls + _count_calls(messages[num_omitted:])
    return num_calls


def _count_calls(messages: Sequence[Json]) -> int:
    """Return the number of tool calls in replies."""
    calls = [each["tool_calls"] for each in messages if each.get("tool_calls") and each.get("role") == "assistant"]
    return sum([len(each) for each in calls if isinstance(each, list)])


def with_readable_arguments(messages: list[Json]) -> list[Json]:
    """Return messages in which the arguments of every tool call are an object; others become an empty object.

    A sampled call with broken JSON would otherwise end its conversation: engines refuse every later request with it.
    """
    readable = messages
    for position, message in enumerate(messages):
        if "tool_calls" not in message:
            continue
        calls = message["tool_calls"]
        if isinstance(calls, list) and not all(map(_is_readable, calls)):
            readable = messages[:] if readable is messages else readable
            readable[position] = {**message, "tool_calls": list(map(_readable_call, calls))}
    return readable


def _is_readable(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return not isinstance(arguments, str) or not arguments or is_json_object(arguments)


def _readable_call(call: Any) -> Any:
    return call if _is_readable(call) else {**call, "function": {**call["function"], "arguments": "{}"}}


@functools.lru_cache(maxsize=4096)
def is_json_object(text: str) -> bool:
    """Return whether a text is the JSON of an object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def check_kinds(body: Json, kinds: Mapping[str, type]) -> None:
    """Check the JSON types of fields that the proxy itself reads.

    Raises:
        InvalidRequest: naming the first wrong field.
    """
    for field, kind in kinds.items():
        if body.get(field) is not None and not isinstance(body[field], kind):
            raise InvalidRequest(f"`{field}` must be a JSON {JSON_NAME[kind]}, not {body[field]!r:.80}.", param=field)


def number_of_choices(body: Json, max_choices: int) -> int:
    """Return `n`.

    Raises:
        InvalidRequest: it is not an integer, or above `max_choices`; the engine refuses values below 1.
    """
    count = body.get("n")
    if count is None:
        return 1
    if not isinstance(count, int) or isinstance(count, bool) or count > max_choices:
        raise InvalidRequest(f"`n` must be an integer from 1 to {max_choices}, not {count!r}.", param="n")
    return max(count, 1)


def _hides_thinking(body: Json) -> bool:
    """Return whether the client asked for no reasoning; vLLM then returns no token ids and logprobs either."""
    return body.get("include_reasoning") is False


def _is_refused(body: Json) -> bool:
    """Return whether the engine refuses the request; capture's options must not change that error."""
    return not body.get("messages") or (bool(body.get("top_logprobs")) and not body.get("logprobs"))


def _without_thinking(raw: bytes, field: str) -> bytes:
    """Remove the reasoning and the token ids, as vLLM does with `include_reasoning: false`."""
    reply = engine_reply.decoded(raw)
    for choice in reply["choices"]:
        message = choice[field]
        if "token_ids" in choice:
            choice["token_ids"] = None
        if field == "message" or (message and "role" not in message):
            message["reasoning"] = None
    return orjson.dumps(reply)


def _capture_parts(read: engine_reply.ExtractedChunks, captured: Captured) -> list[bool]:
    """Capture chunks of one choice; return which of them hold anything for a client that asked for text only."""
    has_content: list[bool] = []
    texts: list[str] = []
    choice = None
    _capture_head(read.replies, captured)
    for chunk in read.replies:
        if not chunk.choices:
            has_content.append(True)
            continue
        part = chunk.choices[0]
        if choice is None:
            choice = captured.choice(part.index)
        if part.token_ids:
            choice.token_ids += part.token_ids
        if part.finish_reason is not None:
            choice.finish_reason = part.finish_reason
        has_content.append(bool(part.delta) or part.finish_reason is not None)
        for field, value in (part.delta or {}).items():
            if field == "content" and isinstance(value, str):
                texts.append(value)
            else:
                _join(choice.message, field, value)
    if choice is not None:
        choice.logprobs += read.logprobs
        if texts:
            _join(choice.message, "content", "".join(texts))
    return has_content


def _capture_head(chunks: list[engine_reply.EngineReply], captured: Captured) -> None:
    """Capture the model and the prompt's ids, which the first chunk has."""
    captured.model = captured.model or chunks[0].model or ""
    for chunk in chunks:
        if chunk.prompt_token_ids is not engine_reply.NO_IDS:
            prompt_ids, num_prompt_ids = engine_reply.read_ids(chunk.prompt_token_ids)
            if prompt_ids:
                captured.prompt_ids, captured.num_prompt_ids = prompt_ids, num_prompt_ids


def _capture_chunk(extracted: engine_reply.Extracted, captured: Captured) -> bool:
    """Capture a chunk; return whether it holds anything for a client that asked for text only."""
    chunk = extracted.reply
    _capture_head([chunk], captured)
    has_content = not chunk.choices
    for position, part in enumerate(chunk.choices):
        choice = captured.choice(part.index)
        if part.token_ids:
            choice.token_ids += part.token_ids
        if extracted.logprobs:
            choice.logprobs.append(extracted.logprobs[position])
        if part.finish_reason is not None:
            choice.finish_reason, has_content = part.finish_reason, True
        if part.delta:
            has_content = True
            for field, value in part.delta.items():
                _join(choice.message, field, value)
    return has_content


def _join(message: Json, field: str, value: Any) -> None:
    """Append a delta's field to the message."""
    if field == "tool_calls":
        for part in value or ():
            _join_call(message.setdefault("tool_calls", []), part)
    elif isinstance(value, str) and field != "role":
        message[field] = (message.get(field) or "") + value
    elif value is not None:
        message[field] = value


def _join_call(calls: list[Json], part: Json) -> None:
    index = part.get("index", 0)
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
