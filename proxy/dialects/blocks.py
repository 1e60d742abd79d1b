"""A chat message as a list of blocks: thinking, text and tool calls, in the order in which they were sampled.

Anthropic's Messages and OpenAI's Responses stream a reply as blocks that open, grow and close, while the engine streams
fields of one message. The state machine is here; the event formats are in the dialects.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import orjson

from proxy.dialects import sse
from proxy.dialects.chat import ChatCompletions
from turnwise.errors import InvalidRequest
from turnwise.json_text import json_object
from turnwise.types import Json

Kind = Literal["thinking", "text", "tool"]


@dataclasses.dataclass(slots=True)
class Block:
    """One part of a reply, or of a chunk's delta."""

    kind: Kind
    text: str
    """Thinking, text, or a tool's arguments."""
    call: int = -1
    """Index of the tool call; -1 for other kinds."""
    tool_call_id: str = ""
    name: str = ""
    """The tool's."""

    def is_continued_by(self, other: Block) -> bool:
        return (self.kind, self.call) == (other.kind, other.call)


def blocks_of(message: Json) -> Iterator[Block]:
    """Yield the blocks of a message or of a chunk's delta."""
    if thinking := message.get("reasoning"):
        yield Block("thinking", thinking)
    if text := message.get("content"):
        yield Block("text", text)
    for position, part in enumerate(message.get("tool_calls") or ()):
        function = part.get("function") or {}
        yield Block(
            "tool",
            function.get("arguments") or "",
            part.get("index", position),
            part.get("id") or "",
            function.get("name") or "",
        )


class BlockEncoder(abc.ABC):
    """Writes the events of a streamed reply: its start, each block's opening, growth and closing, and its end."""

    content_type = sse.CONTENT_TYPE

    def __init__(self) -> None:
        self.closed: list[Block] = []
        self.open: Block | None = None
        """The block that grows; it gets its text when it is closed."""
        self._texts: list[str] = []
        """The text of the open block, in parts."""
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        """The stop string or stop token that ended the reply."""
        self.usage: Json = {}
        self._started = False

    def chunks(self, chunks: list[bytes]) -> bytes:
        """Return the events for some stripped chunks of the engine; there may be none."""
        return b"".join([self._encode(msgspec.json.decode(chunk)) for chunk in chunks])

    def _encode(self, chunk: Json) -> bytes:
        self.usage = chunk.get("usage") or self.usage
        events = []
        if not self._started:
            self._started = True
            events.append(self.starting(chunk))
        for choice in chunk["choices"]:
            logprobs = choice.get("logprobs")
            events += [self._grow(block, logprobs) for block in blocks_of(choice["delta"])]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
        return b"".join(events)

    def done(self) -> bytes:
        """Return the events that end the stream."""
        return self._close() + self.ending()

    def error(self, body: bytes) -> bytes:
        """Return the event that reports an OpenAI-shaped error in the middle of the stream."""
        return self.failing(read_error(body))

    def _grow(self, block: Block, logprobs: Json | None) -> bytes:
        events = b""
        if self.open is None or not self.open.is_continued_by(block):
            events = self._close()
            self.open = dataclasses.replace(block, text="")
            events += self.opening(self.open)
        self._texts.append(block.text)
        return events + self.growing(block, logprobs) if block.text else events

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        block, self.open = self.open, None
        block.text, self._texts = "".join(self._texts), []
        events = self.closing(block)
        self.closed.append(block)
        return events

    @abc.abstractmethod
    def starting(self, chunk: Json) -> bytes:
        """Return the events before any block; `chunk` is the engine's first chunk."""

    @abc.abstractmethod
    def opening(self, block: Block) -> bytes:
        """Return the events that open a block, which has no text yet."""

    @abc.abstractmethod
    def growing(self, block: Block, logprobs: Json | None) -> bytes:
        """Return the events that add the text of `block` to the open one."""

    @abc.abstractmethod
    def closing(self, block: Block) -> bytes:
        """Return the events that close a complete block."""

    @abc.abstractmethod
    def ending(self) -> bytes:
        """Return the events after the last block."""

    @abc.abstractmethod
    def failing(self, error: Json) -> bytes:
        """Return the event that reports an error."""


def parts_of(value: Any, field: str) -> list[Json]:
    """Return the parts in a field of the request; an empty list for null.

    Raises:
        InvalidRequest: it is not a list of objects.
    """
    parts = [] if value is None else value
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InvalidRequest(f"`{field}` must hold a text or a list of objects, not {value!r:.80}.", param=field)
    return parts


def joined_content(parts: list[Json]) -> str | list[Json]:
    """Return the content of a chat message: one text if all parts are text, else the parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def own_id(reply_id: str, prefix: str) -> str:
    """Return a chat completion's id with a dialect's own prefix."""
    return reply_id if reply_id.startswith(prefix) else prefix + reply_id.removeprefix(ChatCompletions.id_prefix)


def read_error(body: bytes) -> Json:
    """Return the error of an OpenAI-shaped body; the whole text of another body is its message."""
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        error = None
    return error if isinstance(error, dict) else {"message": body.decode(errors="replace")}


def embedded(arguments: str) -> orjson.Fragment:
    """Return the arguments of a call as an object of a reply, with each number as it was sampled.

    No line break, which would end an event, is part of a value. Arguments that are no object become an empty one.
    """
    text = "{}" if json_object(arguments) is None else arguments
    return orjson.Fragment(text.replace("\r", " ").replace("\n", " "))


def chat_tool_call(call_id: Any, name: Any, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_tool(name: Any, description: Any, parameters: Json) -> Json:
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}
