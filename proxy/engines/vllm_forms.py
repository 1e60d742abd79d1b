"""The forms of vLLM: the request of a call, and its reply, whole or streamed, as captured and as the client gets it.

vLLM always returns token ids and logprobs. They are captured, and stay in the reply only if the client asked for them.

A whole reply is read as a stream of one part. Each part is decoded once. Logprobs and the prompt's ids, most of a
reply's bytes, stay JSON, which the writer decodes. Fields that the client did not ask for become `null` in its reply;
every other byte stays as the engine wrote it.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from proxy.dialects.base import SENT, Call, Captured, Choice, call_key, call_part, joined_name
from proxy.sessions.forest import EncodedIds
from proxy.sessions.place import CallPlace
from turnwise.engine_plugin.images import FIELD as PLACES
from turnwise.engine_plugin.supports import FIELD
from turnwise.errors import InvalidRequest
from turnwise.types import IMAGE_URL, Json
from turnwise.verify.engine import CHAT_ROUTE

FORCED: Mapping[str, Any] = {"return_token_ids": True, "logprobs": True, "include_reasoning": True}
"""Request fields that capture always sets on the chat route."""
IDS = re.compile(rb'token_ids":\s*\[[^]]*\]')
"""A list of token ids (sampled or prompt), with the end of its key."""
ROUTED, USAGE = "routed_experts", "usage"
ROUTING = re.compile(rb'"routed_experts":\s*"[^"]*"')
"""The experts of each token; no JSON string can contain this text, because it escapes quotes."""
SUPPORTS = re.compile(rb',\s*"%b":\s*(?:"[^"]*"|\[[^]]*\])' % FIELD.encode())
"""Which ids could be sampled, behind a token's logprob or behind those of all tokens; no text can contain this."""
NAMED = re.compile(rb'"image_url":\{"url":"%b([0-9a-f]{64})"\}' % IMAGE_URL.encode())
"""An image in the JSON of messages."""
PLACED = re.compile(rb',\s*"%b":\s*"([A-Za-z0-9+/=]*)"' % PLACES.encode())
"""The places of a prompt's images; no text can contain this."""
SUPPORT_KEY = FIELD.encode()
NO_PARAMETERS: Json = {"type": "object", "properties": {}}
PROMPT_IDS = b'"prompt_token_ids":'
NULL = b"null"
CUT = b"[-1]"
"""Stands for the prompt's ids in the text that is decoded; no engine writes an id so."""
LOGPROBS, NO_LOGPROBS = b'"logprobs":{', b'"logprobs":null'
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
    routed_experts: str | None = None
    """An .npy array in base64, in whole replies of an engine that returns them."""


class EngineReply(msgspec.Struct, gc=False):
    """The fields of a whole reply, or of a stream's chunk, that the proxy needs."""

    choices: list[EngineChoice]
    model: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT
    """A JSON array; see `read_ids`."""
    usage: msgspec.Raw = ABSENT


_reply = msgspec.json.Decoder(EngineReply)


def read_parts(
    parts: list[bytes],
    captured: Captured,
    prompt: EncodedIds | None = None,
    *,
    shows_logprobs: bool,
    shows_token_ids: bool,
    shows_empty: bool,
) -> list[bytes]:
    """Capture a whole reply, or chunks of a stream; return what the client gets of them.

    Args:
        parts: the whole reply, or chunks that arrived together.
        captured: what the call has captured so far.
        prompt: the prompt that was sent; None if the engine has rendered it.
        shows_logprobs: whether the client gets the logprobs.
        shows_token_ids: whether the client gets the token ids.
        shows_empty: whether the client gets parts without text and finish reason.

    Raises:
        msgspec.DecodeError: a part is not what the engine's route answers.
    """
    whole = SEPARATOR.join(parts)
    text, echo = _without_echo(whole, prompt)
    try:
        replies = _reply.decode_lines(text)
    except msgspec.DecodeError:
        whole = NO_NUMBERS.sub(_number_or_null, whole)
        text, echo = _without_echo(whole, prompt)
        replies = _reply.decode_lines(text)
    if len(replies) != len(parts):
        raise msgspec.ValidationError("a part of a reply must be one JSON object")
    has_content = _capture(replies, echo, captured)
    if shows_token_ids:
        text = whole
    if not shows_logprobs:  # first, because they are most of the text, and are not searched
        text = _without_logprobs(text, replies)
    elif SUPPORT_KEY in text:
        text = SUPPORTS.sub(b"", text)
    if not shows_token_ids:
        text = IDS.sub(b'token_ids":null', text)
    if ROUTED in captured.hidden:
        text = ROUTING.sub(b'"routed_experts":null', text)
    if shows_empty and USAGE in captured.hidden:
        has_content = [bool(reply.choices) for reply in replies]
        shows_empty = False
    shown = text.split(SEPARATOR) if len(parts) > 1 else [text]
    return shown if shows_empty or all(has_content) else list(itertools.compress(shown, has_content))


def _number_or_null(found: re.Match[bytes]) -> bytes:
    return found[0] if found[0].startswith(b'"') else NULL


def take_places(parts: list[bytes], captured: Captured) -> list[bytes]:
    """Capture where the prompt's images are; return the parts without what says it."""
    for part in parts if captured.places is None else ():
        if (found := PLACED.search(part)) is not None:
            captured.places = orjson.loads(base64.b64decode(found[1]))
    return [PLACED.sub(b"", part) for part in parts]


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


def _capture(replies: list[EngineReply], echo: bytes | None, captured: Captured) -> list[bool]:
    """Capture parts; return which of them hold anything for a client that asked for text only."""
    has_content = []
    for reply in replies:
        if reply.prompt_token_ids is not ABSENT:
            captured.prompt_ids = read_ids(reply.prompt_token_ids, echo) or captured.prompt_ids
        is_filled = not (reply.choices or USAGE in captured.hidden)
        for part in reply.choices:
            choice = captured.choices.get(part.index)
            if choice is None:
                choice = captured.choices[part.index] = Choice()
            if part.routed_experts is not None:
                choice.beside[ROUTED] = part.routed_experts
                captured.hidden.add(ROUTED)
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


def request(call: Call, place: CallPlace, *, returns_routing: bool) -> Json:
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
    if call.images:
        body |= _with_images(call, place)
    elif place.prompt is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": orjson.Fragment(place.prompt.json())}
    if place.prompt is not None and returns_routing and place.parent is not None:
        # Leaves out the experts of earlier turns' tokens. The last token before this turn's own was not routed when it
        # was sampled, so its experts are this turn's.
        body["routed_experts_prompt_start"] = place.prompt.num_ids - len(place.between) - 1
    return body


def _with_images(call: Call, place: CallPlace) -> Json:
    """Return the messages with their images, and by our plug-in's field the prompt that extends a turn."""
    given: Json = {}
    if place.prompt is not None:
        first = place.prompt.num_ids - len(place.between)
        given = {"ids": orjson.Fragment(place.prompt.json()), "ranges": place.places, "first": first}
    arguments = {**(call.body.get("chat_template_kwargs") or {}), PLACES: given}
    return {"messages": orjson.Fragment(data_urls(call)), "chat_template_kwargs": arguments}


def data_urls(call: Call) -> bytes:
    """Return the JSON of a call's messages with its images as data URLs.

    A text cannot contain the name of an image with these quotes.
    """

    def data_url(found: re.Match[bytes]) -> bytes:
        image = call.images.get(found[1].decode())
        if image is None:  # a field of the client's that looks like an image
            return found[0]
        content = base64.b64encode(image.content)
        return b'"image_url":{"url":"data:%b;base64,%b"}' % (image.media_type.encode(), content)

    return NAMED.sub(data_url, call.messages_json)


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


def tool_grammar(call: Call, *, is_strict: bool) -> Json | bool:
    """Return the grammar of tools that vLLM samples a call under, which the call does not name.

    A required or named tool is a JSON schema (vllm/tool_parsers/utils.py: get_json_schema_from_tools), unless the
    engine's parser has a form of its own, whose replies no walk of this schema accepts. An engine that enforces strict
    tools makes a structural tag of its parser's in its place, also where a tool is strict or only one call is allowed.

    Args:
        call: The call.
        is_strict: Whether the engine enforces strict tools.

    Returns:
        The schema; True where only the engine knows the grammar; False where there is none, or `tool_choice` says it.
    """
    choice: Any = call.body.get("tool_choice") or "auto"
    tools = call.tools
    if not tools or choice == "none":
        return False
    functions: list[Any] = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    is_single = call.body.get("parallel_tool_calls") is False
    if choice == "auto":
        is_any_strict = any(isinstance(function, dict) and bool(function.get("strict")) for function in functions)
        return is_strict and (is_single or is_any_strict)
    try:
        schemas = {function["name"]: function.get("parameters") or NO_PARAMETERS for function in functions}
        found = _any_call(schemas, is_single=is_single) if choice == "required" else schemas[choice["function"]["name"]]
    except (TypeError, LookupError, AttributeError):
        return False
    return False if is_strict else found


def _any_call(schemas: Mapping[str, Json], *, is_single: bool) -> Json:
    """Return the schema of a list of calls; the tools' definitions become its own."""
    calls: list[Json] = []
    definitions: Json = {}
    for name, schema in schemas.items():
        definitions |= schema.get("$defs", {})
        parameters = {field: value for field, value in schema.items() if field != "$defs"}
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    found: Json = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    return found | ({"maxItems": 1} if is_single else {}) | ({"$defs": definitions} if definitions else {})
