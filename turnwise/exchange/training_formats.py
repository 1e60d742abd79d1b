"""Formats of trainers elsewhere: OpenAI fine-tuning, TRL conversations and preference pairs, Axolotl tokens, verl.

Conversations are rendered again by the chat template of the other trainer; the tokens for Axolotl are the stored ones.
A reward is a column wherever the format allows further columns. OpenAI has one line per conversation, with the tools
that its model saw; replies that are no training data have weight 0 there: assistant messages that an application wrote
into a prompt, and turns that are not trainable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turnwise.chains import IMPORTED, TRAINABLE_OUTCOMES
from turnwise.client.conversations import AgentConversation, conversations
from turnwise.exchange.parquet import write_rows
from turnwise.types import Json

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")
"""Fields of a message that the format has; sampled reasoning has no place in it."""


def openai_lines(session: Json) -> Iterator[Json]:
    """Yield a training example per conversation of the session."""
    for conversation in conversations(session):
        trained = {place for place, turn in conversation.replies.items() if _is_trained(turn)}
        messages = [_message(one, is_trained=place in trained) for place, one in enumerate(conversation.messages)]
        example: dict[str, Any] = {"messages": messages}
        if conversation.tools:
            example["tools"] = conversation.tools
        yield example


def _message(message: Json, *, is_trained: bool) -> Json:
    kept = {field: message[field] for field in MESSAGE_FIELDS if message.get(field) is not None}
    return kept if is_trained or message.get("role") != "assistant" else kept | {"weight": 0}


def _is_trained(turn: Json) -> bool:
    return bool(turn["token_ids"]) and (turn["outcome"] in TRAINABLE_OUTCOMES or turn["reason"] == IMPORTED)


NO_LABEL = -100


def trl_lines(session: Json) -> Iterator[Json]:
    """Yield TRL's prompt and completion of each conversation; the completion begins with the first reply."""
    for conversation in conversations(session):
        yield _row(session, conversation, *_parts(conversation))


def trl_pairs(sessions: Iterable[Json]) -> Iterator[Json]:
    """Yield TRL's preference of each group: its best and its worst session, where rewards and prompts allow one."""
    ends: dict[tuple[str, str], list[Json]] = {}
    for session in sessions:
        key = session.get("tenant") or "", session.get("group_id") or ""
        if key[1] and session["reward"] is not None:
            low, high = ends.get(key, [session, session])
            ends[key] = [
                session if session["reward"] < low["reward"] else low,
                session if session["reward"] > high["reward"] else high,
            ]
    for low, high in ends.values():
        chosen, rejected = (next(conversations(one), None) for one in (high, low))
        if high["reward"] == low["reward"] or chosen is None or rejected is None:
            continue
        (prompt, good), (other, bad) = _parts(chosen), _parts(rejected)
        if prompt == other:
            pair: Json = {"prompt": prompt, "chosen": good, "rejected": bad, "group_id": high["group_id"]}
            yield pair | {"chosen_reward": high["reward"], "rejected_reward": low["reward"]}


def axolotl_line(experience: Json) -> Json:
    """Return an experience as Axolotl's pre-tokenised row, which has exactly these columns."""
    tokens, after = experience["tokens"], experience["prompt_length"]
    labels = [token if kept else NO_LABEL for token, kept in zip(tokens[after:], experience["loss_mask"], strict=True)]
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": [NO_LABEL] * after + labels}


def write_verl(sessions: Iterable[Json], path: Path) -> int:
    rows = (_verl_row(session, each) for session in sessions for each in conversations(session))
    return write_rows(path, _verl_columns(), rows)


def _parts(conversation: AgentConversation) -> tuple[list[Json], list[Json]]:
    first = min(conversation.replies)
    messages = [
        {name: one[name] for name in MESSAGE_FIELDS if one.get(name) is not None} for one in conversation.messages
    ]
    return messages[:first], messages[first:]


def _row(session: Json, conversation: AgentConversation, prompt: list[Json], completion: list[Json]) -> Json:
    row: Json = {"prompt": prompt, "completion": completion}
    if conversation.tools:
        row["tools"] = conversation.tools
    return row | {name: session[name] for name in ("reward", "session_id", "group_id", "task_id")}


def _verl_row(session: Json, conversation: AgentConversation) -> Json:
    messages = [message for part in _parts(conversation) for message in part]
    for message in messages:
        content = message.get("content")
        message["content"] = content if isinstance(content, str | None) else json.dumps(content)
    return {
        "messages": messages,
        "tools": json.dumps(conversation.tools) if conversation.tools else None,
        **{name: session[name] for name in ("reward", "session_id", "group_id", "task_id")},
    }


def _verl_columns() -> Json:
    import pyarrow

    text = pyarrow.string()
    call = pyarrow.struct(
        {"id": text, "type": text, "function": pyarrow.struct({"name": text, "arguments": text})}.items()
    )
    fields = {**dict.fromkeys(("role", "content", "name", "tool_call_id"), text), "tool_calls": pyarrow.list_(call)}
    return {
        "messages": pyarrow.list_(pyarrow.struct(fields.items())),
        "tools": text,
        "reward": pyarrow.float64(),
        **dict.fromkeys(("session_id", "group_id", "task_id"), text),
    }
