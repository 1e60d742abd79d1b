"""A conversation with a marker in place of a reply's content, which shows where the reply ends in the rendered text."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

from turnwise.types import Json

MARKER = "TurnwiseMarkQ7Z"
"""Replaces a reply's content; letters and a digit, so that JSON or HTML escaping does not change it."""
NONE_OMITTED = slice(0, 0)


def with_marker(messages: Sequence[Json], replied: int, omitted: slice = NONE_OMITTED) -> list[Json]:
    """Return the messages, without some before it, with the marker in the reply at index `replied`."""
    before = [*messages[: omitted.start], *messages[omitted.stop : replied]]
    return [*before, _marked(messages[replied]), *messages[replied + 1 :]]


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
