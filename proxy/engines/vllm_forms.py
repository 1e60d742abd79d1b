"""The forms of vLLM: the request of a call, and its reply, whole or streamed, as captured and as the client gets it.

vLLM always returns token ids and logprobs. They are captured, and stay in the reply only if the client asked for them.

A whole reply is read as a stream of one part. Each part is decoded once. Logprobs and the prompt's ids, most of a
reply's bytes, stay JSON, which the writer decodes. Fields that the client did not ask for become `null` in its reply;
every other byte stays as the engine wrote it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from proxy.dialects.base import SENT, Call, Captured, Choice, call_key, call_part, joined_name
from proxy.sessions.forest import EncodedIds
from proxy.sessions.place import CallPlace
from turnwise import parts as turn_parts
from turnwise.engine_routes import CHAT_ROUTE
from turnwise.errors import InvalidRequest
from turnwise.types import Json

FORCED: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "include_reasoning": True}
"""Request fields that capture always sets on the chat route."""
IDS = re.compile(rb'token_ids":\s*\[[^]]*\]')
"""A list of token ids (sampled or prompt), with the end of its key."""
PROMPT_IDS = b'"prompt_token_ids":'
NULL = b"null"
CUT = b"[-1]"
"""Stands for the prompt's ids in the text that is decoded; no engine writes an id so."""
LOGPROBS, NO_LOGPROBS = b'"logprobs":{', b'"logprobs":null'
STREAM_OPTIONS = "stream_options"
SEPARATOR = b"\n"
"""Between the parts: no JSON string has a line feed, and no chunk has one elsewhere."""
ABSENT = msgspec.Raw(NULL)
"""The value of a field that a reply does not have."""
DIGITS = b"0123456789"
NO_NUMBERS = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b')
"""Texts, which stay, and what Python's JSON writes of numbers that are none: an engine's logprob may be one."""
SPACES = b" \t\r\n"
"""The spaces that JSON allows."""


class EngineChoice(msgspec.Struct, gc=False):
    """One choice of a whole reply or of a stream's chunk."""

    index: int
    message: Json | None = None
    """Set in a whole reply of the chat route."""
    delta: Json | None = None
    """Set in a chunk of the chat route."""
    text: str | None = None
    """Set on the completions route."""
    finish_reason: str | None = None
    logprobs: msgspec.Raw = ABSENT
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    """Set on the completions route, whose choices may have different prompts."""


class EngineReply(msgspec.Struct, gc=False):
    """The fields of a whole reply, or of a stream's chunk, that the proxy needs."""

    choices: list[EngineChoice]
    model: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    """A JSON array; see `read_ids`."""
    usage: msgspec.Raw = ABSENT


@functools.cache
def _form(*fields: str) -> tuple[msgspec.json.Decoder[Any], dict[str, re.Pattern[bytes]]]:
    """Return the decoder of replies whose choices may have these fields with texts, and the text of each in a reply.

    No JSON string can contain that text, because it escapes quotes.
    """
    own = [(field, str | None, None) for field in fields]
    choice = msgspec.defstruct("Choice", own, bases=(EngineChoice,), gc=False)
    reply = msgspec.defstruct("Reply", [("choices", list[choice])], bases=(EngineReply,), gc=False)  # type: ignore[valid-type]
    texts = {field: re.compile(rb'"%b":\s*"[^"]*"' % field.encode()) for field in fields}
    return msgspec.json.Decoder(reply), texts


def read_parts(parts: list[bytes], captured: Captured, call: Call, prompt: EncodedIds | None = None) -> list[bytes]:
    """Capture a whole reply, or chunks of a stream; return what the client gets of them.

    Args:
        parts: the whole reply, or chunks that arrived together.
        captured: what the call has captured so far.
        call: the call, whose client gets the logprobs and token ids that it asked for, and of a stream without both no
            parts without text and finish reason; nor the count of tokens, if features alone have asked for it.
        prompt: the prompt that was sent; None if the engine has rendered it.

    Raises:
        msgspec.DecodeError: a part is not what the engine's route answers.
    """
    decoder, texts = _form(*turn_parts.reply_fields)
    whole = SEPARATOR.join(parts)
    text, echo = _without_echo(whole, prompt)
    try:
        replies = decoder.decode_lines(text)
    except msgspec.DecodeError:
        whole = NO_NUMBERS.sub(lambda found: found[0] if found[0].startswith(b'"') else NULL, whole)
        text, echo = _without_echo(whole, prompt)
        replies = decoder.decode_lines(text)
    if len(replies) != len(parts):
        raise msgspec.ValidationError("a part of a reply must be one JSON object")
    hides_count = STREAM_OPTIONS in call.engine_fields
    fields = [(field, name) for field, name in turn_parts.reply_fields.items() if field.encode() in text]
    has_content = _capture(replies, echo, captured, fields, hides_count=hides_count)
    if call.wants_token_ids:
        text = whole
    if not call.wants_logprobs:  # first, because they are most of the text, and are not searched
        text = _without_logprobs(text, replies)
    if not call.wants_token_ids:
        text = IDS.sub(b'token_ids":null', text)
    for field, found_text in texts.items() if captured.gives else ():
        text = found_text.sub(b'"%b":null' % field.encode(), text)
    for name, pattern in call.hides.items():
        if (found := pattern.search(text)) is not None:
            captured.said.setdefault(name, found[1])
            text = pattern.sub(b"", text)
    if call.wants_logprobs or call.wants_token_ids or not call.stream:
        has_content = [bool(reply.choices) or not hides_count for reply in replies]
    shown = text.split(SEPARATOR) if len(parts) > 1 else [text]
    return shown if all(has_content) else list(itertools.compress(shown, has_content))


def read_ids(array: msgspec.Raw, echo: bytes | None) -> bytes:
    """Return the ids of a JSON array as decimal numbers, separated by commas; none for `null`.

    Args:
        array: the array, or `CUT`.
        echo: what `CUT` stands for; None if nothing was cut.

    Raises:
        msgspec.ValidationError: it is not an array of token ids.
    """
    text = bytes(array)
    if text == NULL:
        return b""
    if text == CUT and echo is not None:
        return echo
    if not _is_list_of_ids(text):
        text = text.translate(None, SPACES)
        if not _is_list_of_ids(text):
            raise msgspec.ValidationError(f"`prompt_token_ids` must be a list of token ids, not {text[:80]!r}")
    return text[1:-1]


def _is_list_of_ids(array: bytes) -> bool:
    separators = array.translate(None, DIGITS)
    return separators == b"[%b]" % (b"," * (len(separators) - 2))


def _capture(
    replies: list[EngineReply],
    echo: bytes | None,
    captured: Captured,
    fields: Sequence[tuple[str, str]],
    *,
    hides_count: bool,
) -> list[bool]:
    """Capture parts; return which of them hold anything for a client that asked for text only.

    `fields` has the fields of choices that parts of turns are packed from, each with the part's name.
    """
    has_content = []
    for reply in replies:
        if reply.prompt_token_ids is not ABSENT:
            captured.prompt_ids = read_ids(reply.prompt_token_ids, echo) or captured.prompt_ids
        is_filled = not (reply.choices or hides_count)
        for part in reply.choices:
            choice = captured.choices.get(part.index)
            if choice is None:
                choice = captured.choices[part.index] = Choice()
            for field, name in fields:
                if (given := getattr(part, field)) is not None:
                    choice.given[name] = given
                    captured.gives.add(name)
            if part.prompt_token_ids is not ABSENT:
                choice.prompt_ids = read_ids(part.prompt_token_ids, echo) or choice.prompt_ids
                captured.prompt_ids = captured.prompt_ids or choice.prompt_ids
            is_filled = _extend(choice, part) or is_filled
        if reply.usage is not ABSENT:
            captured.usage = bytes(reply.usage)
        if reply.model:
            captured.models.add(reply.model)
        has_content.append(is_filled)
    return has_content


def _extend(choice: Choice, part: EngineChoice) -> bool:
    """Add a part to its choice; return whether it has text, another field of a message, or a finish reason."""
    if part.token_ids:
        choice.token_ids += part.token_ids
    if len(part.logprobs) > len(NULL):
        choice.logprobs.append(bytes(part.logprobs))
    if part.finish_reason is not None:
        choice.finish_reason = part.finish_reason
    if part.delta is None:
        return _extend_message(choice, part) or part.finish_reason is not None
    for field, value in part.delta.items():
        if isinstance(value, str) and field != "role":
            choice.texts.setdefault(field, []).append(value)
        elif field == "tool_calls":
            for call in value or ():
                _join_call(choice, call)
        elif value is not None:
            choice.fields[field] = value
    return bool(part.delta) or part.finish_reason is not None


def _extend_message(choice: Choice, part: EngineChoice) -> bool:
    """Add a part that is no delta: of a whole chat reply, or of the completions route; return whether it has text."""
    if part.text is not None:
        choice.texts.setdefault("content", []).append(part.text)
        return bool(part.text or part.token_ids)
    choice.fields |= part.message or {}
    return part.message is not None


def _join_call(choice: Choice, part: Json) -> None:
    call_id, name, arguments = call_part(part)
    if not (call_id or name or arguments):
        return
    key = call_key(part.get("index"), call_id, name, choice.call_ids)
    opened: Json = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    call, pieces = choice.calls.setdefault(key, (opened, []))
    call["id"] = call["id"] or call_id or None
    call["function"]["name"] = joined_name(call["function"]["name"], name)
    pieces.append(arguments)


def _without_logprobs(text: bytes, replies: list[EngineReply]) -> bytes:
    """Return parts with `null` for their logprobs.

    No text of a reply can contain these keys and values, because JSON escapes its quotes.
    """
    values = [choice.logprobs for reply in replies for choice in reply.choices if len(choice.logprobs) > len(NULL)]
    first, *others = text.split(LOGPROBS, len(values))
    if len(others) == len(values):
        rests = [other[len(value) - 1 :] for other, value in zip(others, values, strict=True)]
        return NO_LOGPROBS.join([first, *rests])
    for value in map(bytes, values):  # with spaces between keys and values, as vLLM does not write them
        text = text.replace(value, NULL, 1) if b'"' in value else text
    return text


def _without_echo(text: bytes, prompt: EncodedIds | None) -> tuple[bytes, bytes | None]:
    """Return parts with `CUT` in the place of the first prompt's ids, and the ids as `Captured.prompt_ids` has them.

    The decoder would skip a long list slowly. The ids are None, and the parts unchanged, where nothing is cut.
    """
    begin = text.find(PROMPT_IDS) + len(PROMPT_IDS)
    if begin < len(PROMPT_IDS):
        return text, None
    if prompt is not None and text.startswith(sent := prompt.json(), begin):
        end, echo = begin + len(sent), SENT
    else:
        end = text.find(b"]", begin) + 1
        array = text[begin:end]
        if not _is_list_of_ids(array):
            return text, None
        echo = array[1:-1]
    return b"".join((text[:begin], CUT, memoryview(text)[end:])), echo


def without_thinking(raw: bytes) -> bytes:
    """Remove the reasoning and the token ids, as vLLM does with `include_reasoning: false`."""
    reply = msgspec.json.decode(raw)
    for choice in reply["choices"]:
        if "token_ids" in choice:
            choice["token_ids"] = None
        if "message" in choice:
            choice["message"]["reasoning"] = None
        elif choice["delta"] and "role" not in choice["delta"]:
            choice["delta"]["reasoning"] = None
    return orjson.dumps(reply)


def request(call: Call, place: CallPlace) -> Json:
    """Return the request of a call, with the options that capture needs, for `dumps`."""
    body = dict(call.body)
    if call.dialect.engine_route != CHAT_ROUTE:
        logprobs = body.get("logprobs")
        return body | {"return_token_ids": True, "logprobs": 0 if logprobs is None else logprobs} | call.engine_fields
    if call.messages:
        body["messages"] = orjson.Fragment(call.messages_json)
    # vLLM refuses both of these; capture's options must not change that error.
    is_refused = not body.get("messages") or (body.get("top_logprobs") and not body.get("logprobs"))
    if not is_refused:
        body |= FORCED
        body |= call.engine_fields
    of_media = None if call.media is None else call.media.request(call, place)
    if of_media is not None:
        body |= of_media
    elif place.prompt is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": orjson.Fragment(place.prompt.json())}
    return body


def reject_prompt_logprobs(body: Json) -> None:
    """Reject a request that would crash an engine with LoRA.

    A vLLM with LoRA crashes on logprobs of the prompt's own tokens while another call runs. `echo` asks for them too,
    in chat even without `logprobs`.

    Raises:
        InvalidRequest: naming the field.
    """
    field = "prompt_logprobs" if body.get("prompt_logprobs") is not None else "echo" if body.get("echo") else None
    if field is not None:
        raise InvalidRequest(
            f"`{field}` would crash the engine, because it was started with LoRA; send the request without it, or "
            "serve from an engine that was started without --lora",
            param=field,
            code="engine_has_lora",
        )
