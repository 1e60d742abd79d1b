"""Whether a prompt goes on from a summary, found by content: it has the reply whole, cut, wrapped or without thinking.

Texts are compared with runs of white space as one space, because harnesses wrap and indent. A message of the prompt
that the summary was sampled from says nothing where it stands in the next prompt too, whatever it quotes. A cut reply
is found by a run of its text that its own prompt did not have. No model decides, and no time does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.json_text import json_object
from turnwise.types import Json, text_of

SHORT = 32
"""A text of fewer characters must be a line of its own, or the end of one, or stand between tags."""
WINDOW = 32
MIN_RUN = 2 * WINDOW
"""Characters of a cut reply that must stand in a prompt one after another."""
MAX_WINDOWS = 256
THINKING = re.compile(r"^.*</(?:think|thinking|thought)>", re.DOTALL)
TAGGED = re.compile(r"<([a-zA-Z_][\w-]*)>(.*?)</\1>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A summary's reply, and the prompt that it was sampled from."""

    turn_id: str
    texts: Sequence[str]
    """What a harness may take of the reply: all of it, without thinking, the inside of a tag, a tool's argument."""
    prompt: str


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A place in a prompt that has a reply."""

    message: int
    start: int
    end: int

    def holds(self, other: Span) -> bool:
        return self.message == other.message and self.start <= other.start and other.end <= self.end


def continued(messages: Sequence[Json], replies: Sequence[Reply]) -> list[str]:
    """Return the turns of those replies that a prompt goes on from, in their order.

    A reply inside of another one that is found, as in a summary of a summary, is not found by itself; of equal replies
    it is the last one.

    Args:
        messages: what the prompt adds to the turn that it extends; all of it at a root.
        replies: those of earlier turns, in their order.
    """
    texts = [text_of(message.get("content")) for message in messages]
    spans = {reply.turn_id: _spans(reply, texts) for reply in _distinct(replies)}
    found = {turn_id: places for turn_id, places in spans.items() if places}
    return [turn_id for turn_id, own in found.items() if any(not _is_inside(span, turn_id, found) for span in own)]


def _distinct(replies: Sequence[Reply]) -> list[Reply]:
    """Return the replies with distinct texts: the last turn of each, with the prompt of the first."""
    kept: dict[tuple[str, ...], Reply] = {}
    for reply in replies:
        key = tuple(reply.texts)
        first = kept.pop(key, reply)
        kept[key] = dataclasses.replace(reply, prompt=first.prompt)
    return list(kept.values())


def _is_inside(span: Span, turn_id: str, found: Mapping[str, Sequence[Span]]) -> bool:
    others = (other for each, spans in found.items() if each != turn_id for other in spans)
    return any(other.holds(span) and other != span for other in others)


def _spans(reply: Reply, texts: Sequence[str]) -> list[Span]:
    found: list[Span] = []
    for number, text in enumerate(texts):
        flat = flattened(text)
        if not flat or flat in reply.prompt:
            continue
        places = (place for each in reply.texts for place in _places(each, text, flat, reply.prompt))
        found += [Span(number, start, end) for start, end in places]
    return found


def _places(wanted: str, text: str, flat: str, prompt: str) -> Iterator[tuple[int, int]]:
    if len(wanted) < SHORT:
        for match in _as_a_line(wanted).finditer(text):
            start = len(flattened(text[: match.start("said")])) + bool(text[: match.start("said")].strip())
            yield start, start + len(wanted)
        return
    start = flat.find(wanted)
    if start >= 0:
        yield start, start + len(wanted)
    else:
        yield from _runs(wanted, flat, prompt)


def _as_a_line(wanted: str) -> re.Pattern[str]:
    said = r"\s+".join(map(re.escape, wanted.split()))
    return re.compile(rf"(?:^|[\n>:\"'`])[ \t]*(?P<said>{said})[ \t]*(?:$|[\n<\"'`])")


def _runs(wanted: str, flat: str, prompt: str) -> Iterator[tuple[int, int]]:
    """Yield where the text has a part of the wanted one that the prompt did not have: a few windows in a row."""
    step = WINDOW * (1 + len(wanted) // (WINDOW * MAX_WINDOWS))
    start = behind = -1
    for at in range(0, len(wanted) - WINDOW + 1, step):
        window = wanted[at : at + WINDOW]
        is_next = start >= 0 and flat.startswith(window, behind - WINDOW + step)
        if is_next:
            behind += step
        else:
            if behind - start >= MIN_RUN and flat[start:behind] not in prompt:
                yield start, behind
            start = flat.find(window)
            behind = start + WINDOW if start >= 0 else -1
    if behind - start >= MIN_RUN and flat[start:behind] not in prompt:
        yield start, behind


def texts_of_reply(response: Json) -> tuple[str, ...]:
    """Return what a harness may take of a reply, without white space at the ends; none of an empty one."""
    text = text_of(response.get("content"))
    inner = [*(match[2] for match in TAGGED.finditer(text)), *texts_of_calls(response)]
    own = [text, THINKING.sub("", text), *(each for each in inner if len(each) >= SHORT)]
    return tuple(dict.fromkeys(filter(None, map(flattened, own))))


def is_empty(response: Json) -> bool:
    """Return whether a reply says nothing beside its thinking."""
    return not flattened(THINKING.sub("", text_of(response.get("content")))) and not texts_of_calls(response)


def texts_of_calls(response: Json) -> list[str]:
    """Return the texts among the arguments of a reply's tool calls."""
    calls = (call.get("function") or {} for call in response.get("tool_calls") or () if isinstance(call, dict))
    given = (_arguments(call.get("arguments")) for call in calls)
    return [value for each in given for value in each.values() if isinstance(value, str)]


def _arguments(arguments: Any) -> Json:
    if isinstance(arguments, str):
        return json_object(arguments) or {}
    return arguments if isinstance(arguments, dict) else {}


def prompt_text(messages: Iterable[Json]) -> str:
    """Return the text of a whole prompt, as replies are compared with it."""
    return "\n".join(flattened(text_of(message.get("content"))) for message in messages)


def flattened(text: str) -> str:
    return " ".join(text.split())
