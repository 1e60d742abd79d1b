"""A sampled reply: how it ended, and a marker in its place that shows where it ends in the rendered text."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence

from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """How a stored turn ended, as far as what follows it depends on that."""

    last_token: int | None
    """The last sampled token."""
    ended: bool
    """Whether the last token is an end-of-turn token, rather than a cut by length or a stop string."""
    reasoning: str
    """The thinking that was sampled; empty without any."""


MARKER = "TurnwiseMarkQ7Z"
"""Replaces a reply's content; letters and a digit, so that JSON or HTML escaping does not change it."""


def with_marker(messages: Sequence[Json], replied: int) -> list[Json]:
    """Return the messages with the marker in the reply at index `replied`."""
    return [*messages[:replied], _marked(messages[replied]), *messages[replied + 1 :]]


def _marked(reply: Json) -> Json:
    """Return the reply with the marker as the last part that a template prints."""
    if not reply.get("tool_calls"):
        return {**without_thinking(reply), "content": MARKER}
    marked = copy.deepcopy(reply)
    marked["tool_calls"][-1]["function"]["arguments"] = json.dumps({MARKER: MARKER})
    return marked


def without_thinking(message: Json) -> Json:
    """Return the message without thinking."""
    if "reasoning" not in message and "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
