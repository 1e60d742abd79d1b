"""A chat reply as thinking, text and tool calls, and which call was cut off, for formats whose replies are lists.

The engine streams fields of one message, and may interleave the parts of several calls. The assembler here puts them
together; the event formats are in the dialects. A call whose reply was cut off in its arguments is cut: no client may
run it. A call of a whole reply whose arguments no client could read is shown as the text that it was sampled as.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import orjson

from proxy.dialects.base import COMMENT, ENDED, EVENT_STREAM, CallKey, call_key, call_part, joined_name
from proxy.dialects.chat import UNREAD_CALL, ChatCompletions
from turnwise.errors import TooLarge
from turnwise.json_text import dumps, json_object, scan
from turnwise.types import Json

MOST_LEVELS = 900
"""Deepest nesting that clients on each Python read: 3.11 reads fewer than 1,000 levels, 3.13 thousands."""


def named_event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps({"type": name, **data}))


@dataclasses.dataclass(slots=True)
class Block:
    """One part of a reply, or of a chunk's delta."""

    kind: Literal["thinking", "text", "tool"]
    text: str
    """Thinking, text, or a tool's arguments; empty while the block grows."""
    call: Any = None
    """The `index` of the call, as the engine gives it."""
    tool_call_id: str = ""
    name: str = ""
    index: int = 0
    pieces: list[str] = dataclasses.field(default_factory=list)

    def is_cut_call(self, finish_reason: str | None) -> bool:
        return self.kind == "tool" and finish_reason not in ENDED and not (self.name and is_object(self.text))

    def shown(self) -> Block:
        """Return the block as a format of objects shows it: a call that no client could read is text."""
        if self.kind != "tool" or (self.name and (not self.text.strip() or is_object(self.text))):
            return self
        return dataclasses.replace(self, kind="text", text=f"{UNREAD_CALL}{self.name}({self.text})")


def is_object(text: str) -> bool:
    """Return whether Python and JavaScript read a text as a JSON object; both read half of a surrogate pair."""
    if json_object(text) is not None:
        return True
    try:
        scan(text.encode(errors="surrogatepass"), MOST_LEVELS, len(text))
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError, TooLarge):
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def blocks_of(message: Json | None) -> Iterator[Block]:
    """Return the blocks of a message or of a delta; an engine may leave either out."""
    index, message = 0, message or {}
    if thinking := message.get("reasoning"):
        yield Block("thinking", thinking)
        index = 1
    if text := message.get("content"):
        yield Block("text", text, index=index)
        index += 1
    for position, part in enumerate(message.get("tool_calls") or ()):
        call_id, name, arguments = call_part(part)
        if call_id or name or arguments:
            yield Block("tool", arguments, part.get("index"), call_id, name, index + position)


class Assembler:
    """Puts the parts of one streamed choice together: each call by its index, thinking and text in their order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._said: Block | None = None
        self._calls: dict[CallKey, Block] = {}
        self._call_ids: dict[int, list[str]] = {}

    def block_for(self, part: Block) -> tuple[Block, bool, Block | None]:
        """Return the block that a part extends, whether it is a new one, and the block that is complete now."""
        is_call = part.kind == "tool"
        key = call_key(part.call, part.tool_call_id, part.name, self._call_ids) if is_call else (0, 0)
        block = self._calls.get(key) if is_call else self._said
        is_new = block is None or block.kind != part.kind
        complete = None
        # Text may go on after a call: it is one field of the message.
        if is_new and self._said is not None and (not is_call or self._said.kind == "thinking"):
            complete, self._said = joined(self._said), None
        if block is None or is_new:
            block = dataclasses.replace(part, text="", index=len(self.blocks), pieces=[])
            self.blocks.append(block)
            if is_call:
                self._calls[key] = block
            else:
                self._said = block
        else:
            block.tool_call_id = block.tool_call_id or part.tool_call_id
            block.name = joined_name(block.name, part.name)
        block.pieces.append(part.text)
        return block, is_new, complete

    def finish(self) -> list[Block]:
        said = [] if self._said is None else [self._said]
        return [joined(block) for block in (*said, *(self._calls[key] for key in sorted(self._calls)))]


def joined(block: Block) -> Block:
    block.text = "".join(block.pieces)
    return block


class BlockEncoder(abc.ABC):
    """Writes the events of a streamed reply: its start, each block's opening, growth and closing, and its end."""

    content_type = EVENT_STREAM
    keep_alive = COMMENT

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.stop_reason: Any = None
        self.usage: Json = {}
        self.assembler = Assembler()
        self.last: Block | None = None
        self._started = self._failed = False

    def chunks(self, chunks: list[bytes]) -> bytes:
        return b"".join([self._encode(msgspec.json.decode(chunk)) for chunk in chunks])

    def _encode(self, chunk: Json) -> bytes:
        self.usage = chunk.get("usage") or self.usage
        events = []
        if not self._started:
            self._started = True
            events.append(self.starting(chunk))
        for choice in chunk["choices"]:
            parts = list(blocks_of(choice.get("delta")))
            logprobs = text_logprobs(choice.get("logprobs"), parts)
            events += [self._grow(part, logprobs) for part in parts]
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
        return b"".join(events)

    def _grow(self, part: Block, logprobs: list[Json]) -> bytes:
        self.last, is_new, complete = self.assembler.block_for(part)
        events = b"" if complete is None else self.closing(complete)
        if is_new:
            events += self.opening(self.last)
        return events + self.growing(self.last, part.text, logprobs) if part.text else events

    def done(self) -> bytes:
        """Return the end of the reply; an error was its end."""
        return b"" if self._failed else b"".join(map(self.closing, self.assembler.finish())) + self.ending()

    def error(self, body: bytes, status: int | None = None) -> bytes:
        self._failed, error = True, read_error(body)
        return self.failing(error, status or status_of(error))

    @abc.abstractmethod
    def starting(self, chunk: Json) -> bytes: ...

    @abc.abstractmethod
    def opening(self, block: Block) -> bytes: ...

    @abc.abstractmethod
    def growing(self, block: Block, text: str, logprobs: list[Json]) -> bytes:
        """Return the events that add text to an open block; several may be open. The logprobs are those of text."""

    @abc.abstractmethod
    def closing(self, block: Block) -> bytes: ...

    @abc.abstractmethod
    def ending(self) -> bytes: ...

    @abc.abstractmethod
    def failing(self, error: Json, status: int) -> bytes: ...


def text_logprobs(logprobs: Json | None, blocks: Iterable[Block]) -> list[Json]:
    """Return the logprobs of the tokens that the text of a reply, or of a chunk, consists of.

    Thinking, tool calls and the marks around them have logprobs too. The text is found in the tokens' texts. If it is
    not found, because the engine held a part of it back, and nothing stands beside it, all tokens count.
    """
    content: list[Json] = list((logprobs or {}).get("content") or ())
    blocks = list(blocks) if content else []
    whole, start = "".join(str(entry["token"]) for entry in content), 0
    for block in blocks:
        at = whole.find(block.text, start)
        if at < 0:
            return content if [each.kind for each in blocks] == ["text"] else []
        start = at + len(block.text)
        if block.kind == "text":
            return _between(content, at, start)
    return []


def _between(content: list[Json], begin: int, end: int) -> list[Json]:
    """Return the tokens that have characters of a range; a part of a character has no text of its own."""
    found, at = [], 0
    for entry in content:
        after = at + len(entry["token"])
        if at < end and (after > begin or at == begin):
            found.append(entry)
        at = after
    return found


def counts_of(usage: Json) -> tuple[int, int, int, int]:
    """Return an engine's numbers of prompt and sampled tokens, of those that were cached, and of those of thinking."""
    prompt, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return prompt, sampled, min(cached, prompt), min(thoughts, sampled)


def cut_off_error(finish_reason: str | None) -> str:
    return f"the engine ended this reply with {finish_reason!r}; what was sampled until then is stored, retry"


def own_id(reply_id: str, prefix: str) -> str:
    return reply_id if reply_id.startswith(prefix) else prefix + reply_id.removeprefix(ChatCompletions.id_prefix)


def read_error(body: bytes) -> Json:
    """Return the error of an OpenAI-shaped body; the whole text of another body is its message."""
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        error = None
    return error if isinstance(error, dict) else {"message": body.decode(errors="replace")}


def status_of(error: Json) -> int:
    """Return the status of an error that an engine reports in a stream."""
    return error["code"] if isinstance(error.get("code"), int) else 500


def embedded(arguments: str) -> orjson.Fragment:
    """Return the arguments of a complete call as an object of a reply, with each number as it was sampled.

    A line break would end an event; in a JSON object it can only stand between values.
    """
    return orjson.Fragment(arguments.replace("\r", " ").replace("\n", " ").strip() or "{}")
