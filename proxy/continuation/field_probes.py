"""Conversations that show which fields of messages a template prints besides role, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.continuation.digests import CALL_IDS, NAME
from turnwise.types import Json

PROBE_VALUE, OTHER_PROBE_VALUE = "probe0001", "probe0002"
"""Nine letters and digits, because some templates refuse other ids of tool calls."""


def _named_probe(values: dict[str, str]) -> list[Json]:
    """Return a conversation with names."""
    name = values[NAME]
    return [
        {"role": "user", "content": "a", "name": name},
        {"role": "assistant", "content": "b", "name": name},
        {"role": "user", "content": "c", "name": name},
    ]


def _system_probe(values: dict[str, str]) -> list[Json]:
    """Return a conversation with a named system message."""
    return [{"role": "system", "content": "a", "name": values[NAME]}, {"role": "user", "content": "b"}]


def _tool_probe(values: dict[str, str]) -> list[Json]:
    """Return a conversation with a tool call."""
    call = {"id": values[CALL_IDS], "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": values[CALL_IDS], "name": values[NAME], "content": "b"},
        {"role": "assistant", "content": "c"},
    ]


PROBES: Sequence[Callable[[dict[str, str]], list[Json]]] = (_named_probe, _system_probe, _tool_probe)
"""Kinds of conversations; a template may refuse some of them."""
