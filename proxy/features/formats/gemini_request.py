"""Gemini's requests as chat requests: their fields and schemas.

Google accepts each field in camelCase and in snake_case, so every field is read by `read`. As protobuf's JSON does, it
also accepts an object in place of a list of one, and a number as a string. Consecutive `model` contents are one reply:
Google's SDK stores each chunk of a stream as a content of its own and sends all of them back.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

from proxy.features.formats.translated import chat_tool, chat_tool_call, joined_content, parts_of, stream_and_prefill
from turnwise.errors import InvalidRequest
from turnwise.json_text import dumps
from turnwise.types import Json

SAMPLING_FIELDS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "candidateCount": "n",
    "maxOutputTokens": "max_completion_tokens",
    "stopSequences": "stop",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "seed": "seed",
    "responseLogprobs": "logprobs",
    "logprobs": "top_logprobs",
}
ZERO_COUNTS = ("temperature", "seed", "presencePenalty", "frequencyPenalty", "topP", "maxOutputTokens")
"""Fields whose 0 is a value; 0 in any other field counts as absent."""
INTEGERS = ("topK", "candidateCount", "maxOutputTokens", "seed", "logprobs")
TOOL_MODES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none", "MODE_UNSPECIFIED": "auto"}
THINKING_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
OUTPUT_KEYS = ("output", "result")
"""A function response with only one of these keys stands for the value under it."""
SCHEMA_NUMBERS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minimum", "maximum"}
)
NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired"})
"""Fields of a schema whose own fields are names that its author chose."""
VALUES = frozenset({"enum", "default", "required", "const", "examples"})
UNSPECIFIED = "TYPE_UNSPECIFIED"
GOOGLE_ONLY = frozenset({"propertyOrdering", "nullable", "example"})
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_CAPITAL = re.compile(r"(?<=[a-z])([A-Z])")


def read(holder: Json, field: str) -> Any:
    value = holder.get(field)
    return holder.get(_snake_case(field)) if value is None else value


@functools.cache
def _snake_case(field: str) -> str:
    return _CAPITAL.sub(lambda found: "_" + found[1].lower(), field)


SCHEMA_FIELDS: dict[str, str] = {
    _snake_case(field): field for field in (*SCHEMA_NUMBERS, "propertyOrdering", "anyOf", "additionalProperties")
}
"""Google's other names of the fields of a schema."""


def read_object(holder: Json, field: str) -> Json:
    """Return a field that holds an object; an empty one if the field is absent."""
    value = read(holder, field)
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"`{field}` must be a JSON object, not {value!r:.80}.", param=field)
    return value or {}


def chat_body(body: Json) -> Json:
    """Translate a request to a chat request."""
    if read(body, "cachedContent"):
        raise InvalidRequest("`cachedContent` is not served; send the contents themselves.", param="cachedContent")
    messages = chat_messages(_listed(body.get("contents"), "contents"))
    if system := _system_text(read(body, "systemInstruction")):
        messages.insert(0, {"role": "system", "content": system})
    chat: Json = {"model": body.get("model") or "", "messages": messages}
    declared = (_listed(value, field) for field, value in _tools(body) if is_declared(field))
    if tools := [_chat_tool(each) for each in itertools.chain.from_iterable(declared)]:
        chat["tools"] = tools
        chat |= _tool_choice(read_object(read_object(body, "toolConfig"), "functionCallingConfig"))
    chat |= _sampling(read_object(body, "generationConfig"))
    return chat | stream_and_prefill(body, messages)


def _listed(value: Any, field: str) -> list[Json]:
    return [value] if isinstance(value, dict) else parts_of(value, field)


def chat_messages(contents: list[Json]) -> list[Json]:
    """Translate contents to chat messages.

    Raises:
        InvalidRequest: a content or part has the wrong shape or cannot be served.
    """
    messages: list[Json] = []
    for content in contents:
        parts = _listed(content.get("parts"), "parts")
        role = str(content.get("role") or "user").lower()
        if role == "model":
            _extend_reply(messages, parts)
        elif role in ("user", "function", "tool"):
            messages += _user_messages(parts)
        else:
            raise InvalidRequest(f"a role is 'user' or 'model', not {content['role']!r:.40}.", param="contents")
    return messages


def num_signatures(contents: Any) -> int:
    """Return how many parts of replies hold a mark of a thought and nothing that a message holds."""
    replies = [one for one in _listed(contents, "contents") if str(one.get("role")).lower() == "model"]
    parts = [part for reply in replies for part in _listed(reply.get("parts"), "parts")]
    return sum(not isinstance(part.get("text"), str) and not read_object(part, "functionCall") for part in parts)


def _extend_reply(messages: list[Json], parts: list[Json]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    reply = messages[-1]
    for part in parts:
        text, call = part.get("text"), read_object(part, "functionCall")
        if call:
            name, arguments = str(call.get("name") or ""), dumps(read_object(call, "args")).decode()
            reply.setdefault("tool_calls", []).append(chat_tool_call(call.get("id"), name, arguments))
        elif isinstance(text, str):
            field = "reasoning" if part.get("thought") else "content"
            reply[field] = (reply.get(field) or "") + text
        elif not (part.get("thought") or read(part, "thoughtSignature")):
            raise _unserved(part)


def _user_messages(parts: list[Json]) -> list[Json]:
    messages: list[Json] = []
    rest: list[Json] = []
    for part in parts:
        response = read_object(part, "functionResponse")
        if response:
            named = {"tool_call_id": response.get("id"), "name": str(response.get("name") or "")}
            messages.append({"role": "tool", **named, "content": _response_text(response)})
            rest += map(_chat_part, _listed(response.get("parts"), "parts"))
        else:
            rest.append(_chat_part(part))
    return [*messages, {"role": "user", "content": joined_content(rest)}] if rest else messages


def _chat_part(part: Json) -> Json:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    inline, file = read_object(part, "inlineData"), read_object(part, "fileData")
    if not str(read(inline or file, "mimeType")).startswith("image/"):
        raise _unserved(part)
    # Google's Python SDK writes base64 with the alphabet for URLs.
    data = str(inline.get("data") or "").translate(_STANDARD_BASE64)
    url = f"data:{read(inline, 'mimeType')};base64,{data}" if inline else str(read(file, "fileUri") or "")
    return {"type": "image_url", "image_url": {"url": url}}


def _unserved(part: Json) -> InvalidRequest:
    kinds = [field for field in part if field not in ("thought", "thoughtSignature", "videoMetadata")]
    named = ", ".join(kinds) or "nothing"
    media = read(read_object(part, "inlineData") or read_object(part, "fileData"), "mimeType")
    of_type = f" of type {media!r:.40}" if media else ""
    return InvalidRequest(
        f"a part with {named:.80}{of_type} cannot be served; send text, images, functionCall and functionResponse "
        "parts only",
        param="contents",
    )


def _response_text(response: Json) -> str:
    value = response.get("response")
    if isinstance(value, dict) and len(value) == 1:
        value = next((value[key] for key in OUTPUT_KEYS if key in value), value)
    return value if isinstance(value, str) else dumps(value).decode()


def _system_text(instruction: Any) -> str:
    if instruction is None or isinstance(instruction, str):
        return instruction or ""
    parts = instruction.get("parts") if isinstance(instruction, dict) else instruction
    parts = [parts] if isinstance(parts, dict) else parts
    texts = [_chat_part(part) for part in parts_of(parts, "systemInstruction")]
    if any(text["type"] != "text" for text in texts):
        raise InvalidRequest("`systemInstruction` has a part that is no text; send text", param="systemInstruction")
    return "\n".join(text["text"] for text in texts)


def dropped_tools(body: Json) -> list[str]:
    return [field for field, _ in _tools(body) if not is_declared(field)]


def _tools(body: Json) -> list[tuple[str, Any]]:
    tools = _listed(body.get("tools"), "tools")
    return [each for tool in tools for each in tool.items() if each[1] is not None]


def is_declared(field: str) -> bool:
    return field in ("functionDeclarations", "function_declarations")


def _chat_tool(declared: Json) -> Json:
    parameters = read(declared, "parametersJsonSchema") or declared.get("parameters")
    schema = json_schema(parameters) if parameters else {"type": "object", "properties": {}}
    return chat_tool(declared.get("name"), declared.get("description"), schema)


def json_schema(schema: Any) -> Any:
    """Return Google's schema as JSON Schema: lower-case types, `null` wherever it is valid, numbers as numbers."""
    if isinstance(schema, list):
        return [json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain: Json = {}
    given: str
    for given, value in schema.items():
        field = SCHEMA_FIELDS.get(given, given)
        if field == "type" and isinstance(value, str):
            plain |= {} if value.upper() == UNSPECIFIED else {field: value.lower()}
        elif field in NAMES and isinstance(value, dict):
            plain[field] = {name: json_schema(each) for name, each in value.items()}
        elif field in SCHEMA_NUMBERS and isinstance(value, str):
            plain[field] = _number(field, value)
        elif field in VALUES:
            plain[field] = value
        elif field not in GOOGLE_ONLY and (field, value) != ("format", "enum"):
            plain[field] = json_schema(value)
    return _with_null(plain) if schema.get("nullable") is True else plain


def _with_null(schema: Json) -> Json:
    """Return a schema under which null is valid too: each of its keywords must allow that."""
    found, kind = dict(schema), schema.get("type")
    if "$ref" in schema or "allOf" in schema or "oneOf" in schema or "const" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    if isinstance(kind, str) and kind != "null":
        found["type"] = [kind, "null"]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        found["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list) and {"type": "null"} not in schema["anyOf"]:
        found["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return found


def _number(field: str, value: str) -> float | int:
    try:
        number = int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"`{field}` is a number, not {value!r:.40}", param=field)
    return number


def _tool_choice(config: Json) -> Json:
    mode = str(config.get("mode") or "AUTO").upper()
    if mode not in TOOL_MODES:
        raise InvalidRequest(f"`mode` is one of {', '.join(TOOL_MODES)}, not {mode!r:.40}.", param="toolConfig")
    allowed = read(config, "allowedFunctionNames")
    if mode == "ANY" and isinstance(allowed, list) and len(allowed) == 1:
        return {"tool_choice": {"type": "function", "function": {"name": allowed[0]}}}
    return {} if TOOL_MODES[mode] == "auto" else {"tool_choice": TOOL_MODES[mode]}


def _sampling(config: Json) -> Json:
    chat = {}
    for field, chat_field in SAMPLING_FIELDS.items():
        value = read(config, field)
        if isinstance(value, str) and field not in ("stopSequences", "responseLogprobs"):
            value = _number(field, value)
        if isinstance(value, float) and field in INTEGERS and value.is_integer():
            value = int(value)  # Google's own type of topK is a float, and protobuf's JSON writes integers so too
        if value or (value is not None and field in ZERO_COUNTS):
            chat[chat_field] = value
    if "top_logprobs" in chat and "logprobs" not in chat:
        del chat["top_logprobs"]
    thinking = read_object(config, "thinkingConfig")
    level = str(read(thinking, "thinkingLevel") or "").lower()
    if read(thinking, "thinkingBudget") in (0, "0"):
        chat["reasoning_effort"] = "none"
    elif level in THINKING_LEVELS:
        chat["reasoning_effort"] = level
    return chat | _response_format(config)


def _response_format(config: Json) -> Json:
    schema = read(config, "responseJsonSchema") or json_schema(read(config, "responseSchema"))
    kind = read(config, "responseMimeType") or "text/plain"
    if kind == "text/plain":
        return {}
    if kind not in ("application/json", "text/x.enum"):
        raise InvalidRequest(
            f"`responseMimeType` is text/plain, application/json or text/x.enum, not {kind!r:.40}.",
            param="responseMimeType",
        )
    if kind == "text/x.enum":
        texts = [text for text in (schema.get("enum") or ()) if text is not None] if isinstance(schema, dict) else []
        return {"structured_outputs": {"choice": texts}} if texts else {}
    if not schema:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}
