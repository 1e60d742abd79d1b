"""Requests of formats that become chat calls: what of one has no place in a chat body, and what a chat body must hold.

A format translates items, blocks or parts to messages as they come. Here the messages of all formats become what an
engine's chat template can print: each result stands behind the reply with its call and has that call's id, no two
calls have one id, no two tools one name, and a required tool is one of the tools.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from proxy.dialects.base import SYSTEM_ROLES, Call
from proxy.dialects.chat import ChatCompletions
from turnwise.errors import InvalidRequest
from turnwise.store.turns import TurnView
from turnwise.types import Json


@dataclasses.dataclass(slots=True, kw_only=True)
class TranslatedCall(Call):
    """A chat call that a request of another format stands for."""

    dropped_tools: list[str] = dataclasses.field(default_factory=list)
    dropped_items: list[str] = dataclasses.field(default_factory=list)
    """Types of the blocks, items and parts of the conversation that no message holds."""
    conversation_id: str | None = None
    """The conversation of the Responses API that the call continues without repeating its messages."""


class Translated(ChatCompletions):
    """A format whose calls are chat calls for the engine."""

    call_type = TranslatedCall
    conversation_field: ClassVar[str] = "messages"

    @abc.abstractmethod
    def translate(self, body: Json, failed_tool_text: str) -> Json:
        """Return the chat body of a request, its messages as `paired` takes them.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """

    def chat_request(self, body: Json, *, failed_tool_text: str = "") -> Json:
        """Return the chat body of a request, as an engine can serve it."""
        chat = self.translate(body, failed_tool_text)
        chat["messages"] = paired(chat["messages"])
        if tools := chat.get("tools"):
            chat["tools"] = distinct(tools)
            _check_choice(chat.get("tool_choice"), tools)
        return chat

    def parse(self, body: Json, *, failed_tool_text: str = "") -> TranslatedCall:
        call = super().parse(self.chat_request(body, failed_tool_text=failed_tool_text))
        assert isinstance(call, TranslatedCall)
        call.original = {field: value for field, value in body.items() if field != self.conversation_field}
        call.wants_token_ids = False
        return call

    def count_request(self, body: Json, *, failed_tool_text: str = "") -> Json:
        """Return the chat body whose prompt a `COUNT_TOKENS` route counts."""
        return self.chat_request(body, failed_tool_text=failed_tool_text)

    def resume(self, call: Call, earlier: TurnView) -> None:
        """Put a stored conversation before the messages of the call that continues it."""
        call.messages = call.body["messages"] = [*earlier.messages, earlier.turn.response, *call.messages]

    def encode_count(self, num_tokens: int) -> Json:
        return {"input_tokens": num_tokens}


class _Waiting:
    """Calls without a result, oldest first, by what a result may name them by."""

    def __init__(self) -> None:
        self._by: collections.defaultdict[tuple[str, str], collections.deque[str]]
        self._by = collections.defaultdict(collections.deque)
        self._answered: set[str] = set()

    def add(self, call_id: str, given: str, name: str) -> None:
        for key in {("id", given), ("name", name), ANY}:
            self._by[key].append(call_id)

    def take(self, key: tuple[str, str] | None) -> str | None:
        """Return the id of the oldest call under a key, which waits no longer."""
        queue = self._by.get(key) if key is not None else None
        while queue:
            if (call_id := queue.popleft()) not in self._answered:
                self._answered.add(call_id)
                return call_id
        return None


ANY = ("", "")
RULES: Sequence[Callable[[Json], tuple[str, str] | None]] = (
    lambda result: ("id", _text(result["tool_call_id"])) if _text(result["tool_call_id"]) else None,
    lambda result: ("name", result["name"]) if "name" in result else None,
    lambda result: ("id", result["name"]) if result.get("name") else None,
    lambda result: ANY if "name" in result or not _text(result["tool_call_id"]) else None,
)
"""Which call a result may belong to. One that has its tool's name, as Google's, may have no id of a call."""


def paired(messages: list[Json]) -> list[Json]:
    """Return a conversation whose results stand behind the reply with their calls and have these calls' ids.

    Calls without an id, or with that of an earlier call, get one that no other has. A result without its call, as that
    of a stored turn which the request continues, stands first among the messages that follow a reply.

    Args:
        messages: in their order; results may have the name of their tool as `name`.
    """
    if not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return messages
    given = {_text(call["id"]) for message in messages for call in message.get("tool_calls") or ()}
    given |= {_text(message["tool_call_id"]) for message in messages if message["role"] == "tool"}
    fresh = (call_id for number in itertools.count(1) if (call_id := f"call_{number}") not in given)
    used: set[str] = set()
    waiting, ordered = _Waiting(), []
    for reply, rest in _segments(messages):
        for call in () if reply is None else reply.get("tool_calls") or ():
            own = _text(call["id"])
            if not own or own in used:
                call["id"] = next(fresh)
            used.add(call["id"])
            waiting.add(call["id"], own, str(call["function"]["name"]))
        results = [message for message in rest if message["role"] == "tool"]
        _give_ids(results, waiting, fresh)
        ordered += [] if reply is None else [reply]
        others = [message for message in rest if message["role"] != "tool"]
        first = list(itertools.takewhile(lambda each: each["role"] in SYSTEM_ROLES, rest)) if reply is None else []
        ordered += [*first, *results, *others[len(first) :]]
    return ordered


def _segments(messages: Iterable[Json]) -> list[tuple[Json | None, list[Json]]]:
    """Return each reply with the messages that follow it; what stands before the first one has none."""
    found: list[tuple[Json | None, list[Json]]] = [(None, [])]
    for message in messages:
        if message["role"] == "assistant":
            found.append((message, []))
        else:
            found[-1][1].append(message)
    return found


def _give_ids(results: list[Json], waiting: _Waiting, fresh: Iterable[str]) -> None:
    left = results
    for rule in RULES:
        unmatched = []
        for result in left:
            if (call_id := waiting.take(rule(result))) is None:
                unmatched.append(result)
            else:
                result["tool_call_id"] = call_id
        left = unmatched
    for result in left:
        result["tool_call_id"] = result["tool_call_id"] or next(iter(fresh))
    for result in results:
        result.pop("name", None)


def _text(call_id: Any) -> str:
    return call_id if isinstance(call_id, str) else ""


def distinct(tools: list[Json]) -> list[Json]:
    """Return tools without repetitions.

    Raises:
        InvalidRequest: two different ones have one name.
    """
    found: dict[str, Json] = {}
    for tool in tools:
        name = str(tool["function"].get("name"))
        if found.setdefault(name, tool) != tool:
            raise InvalidRequest(f"two different tools have the name {name!r:.80}; rename one", param="tools")
    return list(found.values())


def _check_choice(choice: Any, tools: list[Json]) -> None:
    names = [tool["function"].get("name") for tool in tools]
    if isinstance(choice, dict) and (chosen := choice["function"]["name"]) not in names:
        named = ", ".join(map(str, names))
        raise InvalidRequest(f"the tool choice {chosen!r:.80} is none of the tools {named:.200}", param="tool_choice")


def parts_of(value: Any, field: str) -> list[Json]:
    """Return the parts in a field of the request; an empty list for null."""
    parts = [] if value is None else value
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InvalidRequest(f"`{field}` must hold a text or a list of objects, not {value!r:.80}.", param=field)
    return parts


def joined_content(parts: list[Json]) -> str | list[Json]:
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def failed_text(result: str, mark: str) -> str:
    """Return the result of a failed tool call with a mark before it: chat templates have no field that says so."""
    return "\n".join(filter(None, (mark, result)))


def stream_and_prefill(body: Json, messages: list[Json]) -> Json:
    """Return the chat fields of a translated request for its stream, and for a reply that it begins itself."""
    fields: Json = {}
    if body.get("stream"):
        fields = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if messages and messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return fields


def chat_tool_call(call_id: Any, name: Any, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_tool(name: Any, description: Any, parameters: Json, strict: Any = None) -> Json:
    described = {"description": description} if description else {}
    function = {"name": name, **described, "parameters": parameters}
    return {"type": "function", "function": function if strict is None else function | {"strict": strict}}
