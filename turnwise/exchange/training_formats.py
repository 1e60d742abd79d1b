"""Exports for other trainers: OpenAI fine-tuning, TRL conversations and pairs, Axolotl tokens.

Conversations are rendered again by the chat template of the other trainer, so for TRL they have the form that templates
read: text contents, arguments as objects, reasoning. A conversation with an image, or of which a call's
arguments are no JSON object, has no such form and is left out. The tokens for Axolotl are the stored ones.
A reward is a column wherever the format allows further columns. OpenAI has one line per conversation, with the tools
that its model saw; replies that are no training data have weight 0 there: assistant messages that an application wrote
into a prompt, and turns that are not trainable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from turnwise.chains import IMPORTED, TRAINABLE_OUTCOMES
from turnwise.client.conversations import AgentConversation, conversations
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
        messages, first = _template_messages(conversation), min(conversation.replies)
        if messages is not None:
            row = {"prompt": messages[:first], "completion": messages[first:], **_tools_of(conversation)}
            yield row | {name: session[name] for name in ("reward", "session_id", "group_id", "task_id")}


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
        if (parts := _parted(chosen, rejected)) is not None:
            pair = dict(zip(("prompt", "chosen", "rejected"), parts, strict=True)) | _tools_of(chosen)
            values = {"chosen_reward": high["reward"], "rejected_reward": low["reward"]}
            yield pair | {"group_id": high["group_id"]} | values


def _parted(chosen: AgentConversation, rejected: AgentConversation) -> tuple[list[Json], list[Json], list[Json]] | None:
    """Return what two conversations begin with, up to the reply where they part, and both from there on."""
    good, bad = _template_messages(chosen), _template_messages(rejected)
    if good is None or bad is None or chosen.tools != rejected.tools:
        return None
    same = next((n for n, two in enumerate(zip(good, bad, strict=False)) if two[0] != two[1]), min(len(good), len(bad)))
    start = max((n for n in chosen.replies.keys() & rejected.replies.keys() if n <= same), default=None)
    return None if start is None else (good[:start], good[start:], bad[start:])


def axolotl_line(experience: Json) -> Json:
    """Return an experience as Axolotl's pre-tokenised row, which has exactly these columns."""
    tokens, after = experience["tokens"], experience["prompt_length"]
    labels = [token if kept else NO_LABEL for token, kept in zip(tokens[after:], experience["loss_mask"], strict=True)]
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": [NO_LABEL] * after + labels}


def _template_messages(conversation: AgentConversation) -> list[Json] | None:
    """Return messages as chat templates read them; None with an image, or arguments of a call that are no object."""
    try:
        return [_template_message(message) for message in conversation.messages]
    except (ValueError, RecursionError):
        return None


def _template_message(message: Json) -> Json:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [_text_of(part) for part in content]
    shaped: Json = {"role": message["role"], "content": "\n".join(parts)}
    shaped |= {field: message[field] for field in ("name", "tool_call_id") if isinstance(message.get(field), str)}
    if message["role"] == "assistant":
        if message.get("tool_calls"):
            shaped["tool_calls"] = [_template_call(call) for call in message["tool_calls"]]
        if message.get("reasoning"):
            shaped["reasoning_content"] = message["reasoning"]
    return shaped


def _text_of(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "image_url":
        raise ValueError("an image has no place in a text")
    return str(part.get("text") or part.get("refusal") or "") if isinstance(part, dict) else str(part)


def _template_call(call: Json) -> Json:
    arguments = call["function"].get("arguments") or "{}"
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(found, dict):
        raise ValueError("a call's arguments are no JSON object")  # noqa: TRY004  as those that are no JSON
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": found},
    }


def _tools_of(conversation: AgentConversation) -> Json:
    return {"tools": conversation.tools} if conversation.tools else {}
