"""What the database must hold after a run: each function checks stored turns against each other and the engine."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from harnesses.entry import Harness
from turnwise_fake_engine.ledger import SeenCall

from turnwise.types import Json

BROKEN = frozenset({"faulted", "aborted"})
"""Outcomes of calls with an incomplete reply."""

COMPACTION_REASONS = frozenset({"asks_for_summary", "compaction_prompt"})
"""Reasons of the roles of calls that the proxy takes for a request for a summary."""

LONG_TOKENS = 32
"""More than the short replies of side calls have."""


def own_turns(turns: Sequence[Json]) -> list[Json]:
    """Return the turns of the agent itself whose reply was sampled: no side call, no sub-agent, no failed call."""
    return [turn for turn in turns if turn["role"] == "main" and turn["outcome"] != "error"]


def other_roles(turns: Sequence[Json]) -> list[str]:
    return sorted(
        {
            f"{turn['role'].replace('_', '-')} (`{turn['role_reason']}`)"
            for turn in turns
            if turn["role"] in {"side", "sub_agent", "summary"} and turn["role_reason"] != "extends"
        }
    )


SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), json.dumps),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"), json.dumps),
    "response_format": lambda value: value.get("type"),
    "structured_outputs": ", ".join,
    "tool_choice": lambda value: value if isinstance(value, str) else "named",
    "parallel_tool_calls": json.dumps,
}
"""Parameters that say how a reply is sampled, and how the table shows a value."""


def asked_sampling(turns: Sequence[Json]) -> str:
    """Return the parameters of all calls, their values in the order of the calls."""
    found: dict[str, None] = {}
    for turn in turns:
        asked = {name: value for name, value in turn["sampling"].items() if value is not None and value != "auto"}
        found |= dict.fromkeys(f"`{name}` {show(asked[name])}" for name, show in SAMPLING.items() if name in asked)
        functions = [tool.get("function") or {} for tool in turn["tools"] or ()]
        found |= {"strict tools": None} if any(function.get("strict") for function in functions) else {}
    return ", ".join(found)


def asks_for_summary(harness: Harness, messages: Sequence[Json]) -> bool:
    return any(text in str(messages[-1]) for text in harness.summary_texts)


def session_source(session_id: str) -> str:
    if session_id.startswith("auto-"):
        return "conversation"
    name, colon, _ = session_id.partition(":")
    return f"`{name if colon else 'x-session-id'}`"


def is_one_exact_chain(turns: Sequence[Json]) -> bool:
    return (
        bool(turns)
        and all(turn["outcome"] == "exact" for turn in turns)
        and len({turn["chain_id"] for turn in turns}) == 1
        and all(later["parent_turn_id"] == earlier["turn_id"] for earlier, later in pairwise(turns))
    )


def shape(turns: Sequence[Json]) -> list[tuple[str, str | None, int | None]]:
    own = own_turns(turns)
    position = {turn["turn_id"]: index for index, turn in enumerate(own)}
    return [(turn["outcome"], turn["reason"], position.get(turn["parent_turn_id"])) for turn in own]


def is_served_stored(calls: Sequence[SeenCall], turns: Sequence[Json]) -> bool:
    """Return whether the store has exactly the engine's calls, token for token; of a broken one what was received."""
    stored = {_call_id(turn["turn_id"]): turn for turn in turns}
    if len(stored) != len(turns) or stored.keys() != {_call_id(call.reply_id) for call in calls}:
        return False
    return all(_is_stored(call, stored[_call_id(call.reply_id)]) for call in calls)


def _is_stored(call: SeenCall, turn: Json) -> bool:
    sampled = call.token_ids[0] if call.token_ids else []
    kept = turn["token_ids"]
    if call.outcome in BROKEN:
        return bool(kept == sampled[: len(kept)])
    return bool(kept == sampled and turn["prompt_token_ids"] == call.prompt_token_ids)


def _call_id(completion_id: str) -> str:
    return re.split("[-_]", completion_id, maxsplit=1)[1]


def has_parallel_tools(turns: Sequence[Json], outputs: Sequence[str]) -> bool:
    """Return whether a reply called several tools, and the turn that extends it exactly brings all their outputs."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    for turn in turns:
        parent = by_id.get(turn["parent_turn_id"] or "")
        if parent is None or turn["outcome"] != "exact":
            continue
        answers = [str(message.get("content")) for message in turn["messages"] if message["role"] == "tool"]
        called = len(parent["response"].get("tool_calls") or [])
        if called == len(outputs) and all(any(output in answer for answer in answers) for output in outputs):
            return True
    return False


def is_sampling_long(call: SeenCall) -> bool:
    """Return whether a call is sampling a long reply; of one that is not streamed, only its start is known."""
    num_tokens = sum(map(len, call.token_ids))
    return call.outcome == "running" and (num_tokens >= LONG_TOKENS or not call.body.get("stream"))


def was_cut_off(calls: Sequence[SeenCall], turns: Sequence[Json]) -> bool:
    aborted = {_call_id(call.reply_id) for call in calls if call.outcome == "aborted"}
    stored = [_call_id(turn["turn_id"]) for turn in turns if turn["outcome"] == "aborted"]
    return bool(aborted) and sorted(stored) == sorted(aborted)
