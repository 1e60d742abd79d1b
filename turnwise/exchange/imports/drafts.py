"""Sessions of a file that are not yet tokenised, with messages in the form of a chat request.

Messages of other tools get the roles and fields that chat templates read.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.values import number_of, value_of_json
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Token ids that a file has for a reply."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """One for each of `token_ids`, or none."""

    def __post_init__(self) -> None:
        """Check what a file has.

        Raises:
            BadLine: an id is no whole number, or a logprob is missing or none.
        """
        for ids in (self.prompt_token_ids, self.token_ids):
            if not isinstance(ids, list) or not ids or not all(type(each) is int and 0 <= each < 2**31 for each in ids):
                raise BadLine(f"its token ids are {_shown(ids)}, not a list of whole numbers from 0 on")
        if not isinstance(self.logprobs, list) or len(self.logprobs) not in (0, len(self.token_ids)):
            raise BadLine(f"its logprobs are {_shown(self.logprobs)}, not one for each of {len(self.token_ids)} tokens")
        if not all(isinstance(each, float | int) and -math.inf < each <= 0 for each in self.logprobs):
            raise BadLine("a logprob is not a finite number up to 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImportedConversation:
    """Messages of which some replies are trained."""

    messages: list[Json]
    trained: tuple[int, ...]
    """Indices of the assistant messages that become turns; the other messages are only part of prompts."""
    tools: list[Json] | None = None
    model: str = ""
    sampled: dict[int, SampledTokens] = dataclasses.field(default_factory=dict)
    """Token ids by index of the message; the other replies are tokenised."""
    created_at: dict[int, datetime.datetime] = dataclasses.field(default_factory=dict)
    """When replies were made, by index of the message, where the file says so."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Draft:
    """A session to be stored. Two drafts of one line are a group whose rewards are compared."""

    conversations: list[ImportedConversation]
    """They share the turns whose messages are equal up to the reply."""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    is_unscored: bool = False
    """Its file has a column for its reward, which is null: it gets none, and so is not imitated as a good one."""
    suffix: str = ""
    task_id: str | None = None


def conversation_of(
    messages: list[Json], tools: list[Json] | None = None, *, untrained: frozenset[int] = frozenset(), model: str = ""
) -> ImportedConversation:
    """Return a conversation whose assistant messages are trained, except those at the indices in `untrained`."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = tuple(index for index in replies if index not in untrained)
    if not trained:
        raise BadLine("no assistant message is left to train" if replies else "it has no assistant message")
    return ImportedConversation(messages=messages, trained=trained, tools=tools, model=model)


ROLES = {
    **dict.fromkeys(("system", "user", "assistant", "tool", "developer")),
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
OTHER_REASONING = ("reasoning_details", "thinking_blocks", "reasoning_text", "thought", "thoughts")
"""Fields in which other tools keep reasoning, beside one of those above or alone."""
MARKS = ("weight", "train", "loss", "training", "trainable", "loss_mask", "step_loss_mask")
"""Fields of a message that are 0 or false where other trainers leave it out."""
UNREAD_MARKS = ("mask", "masked", "train_detail", "completion_mask", "assistant_masks")
"""Marks of parts of a message or row, or whose meaning differs by trainer."""
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio", "documents", "chat_template_kwargs")
"""Fields of a message that change what the model reads, and that cannot be tokenised."""


def chat_messages(found: Any) -> list[Json]:
    """Return a list of messages in the form of a chat request; raise `BadLine` for another value."""
    if not isinstance(found, list) or not found:
        raise BadLine(f"its messages are {_shown(found)}, not a list of messages")
    return [chat_message(message) for message in found]


def chat_message(found: Any) -> Json:
    if not isinstance(found, dict):
        raise BadLine(f"a message is {_shown(found)}, not an object")
    name = _sender(found)
    message: Json = {"role": ROLES[name] or name}
    content = found["content"] if found.get("content") is not None else found.get("value")
    if found.get("value") not in (None, content):
        raise BadLine(f"a message has the content {_shown(content)} and the value {_shown(found['value'])}")
    if content is not None:
        message["content"] = _content(content)
    elif message["role"] != "assistant":
        raise BadLine(f"a message of the role {name!r} has no content")
    check_no_media(found)
    _check_hidden_calls(found, message["role"])
    for field in ("name", "tool_call_id", "refusal"):
        if isinstance(found.get(field), str):
            message[field] = found[field]
    if message["role"] == "assistant":
        _add_reply_fields(message, found)
    if message["role"] == "assistant" and len(message) == 1:
        raise BadLine("an assistant message has neither content nor tool calls")
    return message


def _check_hidden_calls(found: Json, role: str) -> None:
    """Refuse a message with calls in a field that is not read, such as LangChain's `additional_kwargs`."""
    extra = found.get("additional_kwargs")
    if isinstance(extra, dict) and not any(extra.values()):
        extra = None
    read = ("tool_calls", "function_call") if role == "assistant" else ()
    calls = [
        name for name, value in found.items() if value and isinstance(value, list | dict) and "call" in name.lower()
    ]
    hidden = [*(["additional_kwargs"] if extra else []), *(name for name in calls if name not in read)]
    if hidden:
        raise BadLine(
            f"a message of the role {role!r} has {hidden[0]} {_shown(found[hidden[0]])}, which is not read; "
            "write calls as tool_calls of an assistant message"
        )


def _sender(found: Json) -> str:
    sender = found.get("from")
    name = sender if found.get("role") is None else found["role"]
    if not isinstance(name, str) or name not in ROLES:
        raise BadLine(f"a message has the role {name!r}; known roles are {', '.join(ROLES)}")
    if not isinstance(sender, str | None):
        raise BadLine(f"a message is from {_shown(sender)}, not a text")
    if sender in ROLES and (ROLES[sender] or sender) != (ROLES[name] or name):  # any other text is a name
        raise BadLine(f"a message has the role {name!r} and is from {sender!r}")
    return name


def tool_schemas(found: Any) -> list[Json] | None:
    """Return the tool schemas of a document, which may be JSON text; None without any."""
    schemas = value_of_json(found) if isinstance(found, str) else found
    if not schemas:
        return None
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise BadLine(f"its tools are {_shown(schemas)}, not a list of tool schemas")
    return [
        {"type": "function"} | (schema if schema.get("function") else {}) | {"function": _function(schema)}
        for schema in schemas
    ]


def _function(schema: Json) -> Json:
    """Return the function of a tool schema, whose parameters may be JSON text, or an empty list for an empty object.

    Chat Completions has the function in a field of its own, Responses beside the type.
    """
    if schema.get("type") not in (None, "function"):
        raise BadLine(f"a tool is {_shown(schema)}, not a function")
    function = _inner(schema)
    while isinstance(function, dict) and function.get("type") == "function":  # nested twice, as some clients convert it
        function = _inner(function)
    named = isinstance(function, dict) and isinstance(function.get("name"), str) and "input_schema" not in function
    found = function.get("parameters") if named else None
    parameters = {} if found == [] else value_of_json(found) if isinstance(found, str) else found
    if not named or not isinstance(parameters, dict | None):
        raise BadLine(f"a tool is {_shown(function)}, not a function with a name and parameters")
    return {**function} if parameters is found else {**function, "parameters": parameters}


def _inner(schema: Json) -> Any:
    return schema.get("function") or {field: schema[field] for field in schema if field not in ("type", "function")}


def untrained_of(found: list[Any]) -> frozenset[int]:
    """Return the places of the messages that a file marks as not trained, such as by `weight` 0 or `train` false."""
    untrained = set()
    for place, message in enumerate(found):
        check_marks(message)
        for field in MARKS:
            mark = number_of(message.get(field), f"message's {field}")
            if mark not in (None, 0.0, 1.0):
                raise BadLine(f"a message has the {field} {message[field]!r}; 0 and 1 are known")
            if mark == 0.0:
                untrained.add(place)
    return frozenset(untrained)


def check_marks(found: Json) -> None:
    """Refuse a message or a row with a mark of what is trained that is not read."""
    for field in UNREAD_MARKS:
        mark = found.get(field)
        if field == "masked" and str(mark).lower() in ("false", "0"):
            continue
        if mark not in (None, "", []) and (field != "mask" or _is_number(mark)):
            raise BadLine(f"its {field} marks what is trained in a way that is not read; use weight 0 or 1")


def _is_number(mark: Any) -> bool:
    """Tell whether a field may be a mark: a number or a list of numbers, unlike a text or a picture of this name."""
    if isinstance(mark, list):
        return all(map(_is_number, mark))
    return isinstance(mark, int | float) or str(mark).lower() in ("0", "1", "true", "false")


def check_no_media(found: Json) -> None:
    for field in MEDIA_FIELDS:
        if found.get(field):
            raise BadLine(f"its {field} cannot be tokenised, and the model would read something else without them")


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadLine(f"a content is {_shown(content)}, neither text nor a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, str) and (kind not in TEXT_PARTS or not isinstance(part.get("text"), str)):
            raise BadLine(f"a content has a part of type {kind!r}; only text can be tokenised")
    return content


def _add_reasoning(message: Json, found: Json) -> None:
    for field in REASONING_FIELDS:
        if not isinstance(found.get(field), str | None):
            raise BadLine(f"an assistant message has the {field} {_shown(found[field])}, not a text")
        if found.get(field):
            message.setdefault("reasoning", found[field])
            if message["reasoning"] != found[field]:
                raise BadLine(f"an assistant message has two reasonings, one of them as {field}")
    other = next((field for field in OTHER_REASONING if found.get(field)), None)
    if other is not None and "reasoning" not in message:
        raise BadLine(f"an assistant message has reasoning as {other}; name it reasoning")


def _add_reply_fields(message: Json, found: Json) -> None:
    _add_reasoning(message, found)
    calls, called = found.get("tool_calls"), found.get("function_call")
    if called and (calls or not isinstance(called, dict)):
        raise BadLine(f"a function_call is {_shown(called)}, beside tool calls or no function with arguments")
    if called:  # OpenAI's form before tools
        calls = [{"id": "call_0", "type": "function", "function": called}]
    if calls:
        if not isinstance(calls, list):
            raise BadLine(f"tool_calls are {_shown(calls)}, not a list")
        message["tool_calls"] = [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> Json:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadLine(f"a tool call is {_shown(call)}, without the name of a function")
    if "arguments" not in function and function.keys() & {"input", "parameters", "args"}:
        raise BadLine(f"a tool call is {_shown(call)}, without arguments")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
