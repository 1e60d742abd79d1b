"""Hugging Face chat data sets: the columns that TRL and most published sets use.

`messages` or `conversations`; `prompt` with `completion`; `prompt` with `chosen` and `rejected`, or these two with the
prompt in both; Alpaca's `instruction`, `input` and `output`. Each may be messages or plain text. A `label` (KTO) or
`score` column is the reward.
"""

from __future__ import annotations

from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.drafts import Conversation, Draft, conversation_of
from turnwise.exchange.imports.messages import chat_messages, tool_schemas
from turnwise.exchange.imports.openai_chat import completed
from turnwise.types import Json

CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
REWARD_COLUMNS = ("reward", "score", "label")
PAIR = {"chosen": 1.0, "rejected": 0.0}


def key_of(document: Json) -> str | None:  # noqa: ARG001  one signature for all formats
    return None


def drafts_of(document: Json) -> list[Draft]:
    """Return the session of a row, or the two sessions of a preference row.

    Raises:
        BadLine: the row has none of the known columns.
    """
    tools = tool_schemas(document.get("tools"))
    if document.get("chosen") is not None and document.get("rejected") is not None:
        return [
            Draft(conversations=[_output(document, name, tools)], rewards={"reward": reward}, suffix=name)
            for name, reward in PAIR.items()
        ]
    rewards = _rewards(document)
    for column in CONVERSATION_COLUMNS:
        if document.get(column) is not None:
            return [Draft(conversations=[_conversation(document[column], tools)], rewards=rewards)]
    if document.get("completion") is not None:
        return [Draft(conversations=[_output(document, "completion", tools)], rewards=rewards)]
    if isinstance(document.get("instruction"), str) and document.get("output") is not None:
        asked = "\n\n".join(filter(None, (document["instruction"], document.get("input"))))
        row = {"prompt": asked, "completion": document["output"]}
        return [Draft(conversations=[_output(row, "completion", tools)], rewards=rewards)]
    raise BadLine(
        f"it has none of the columns {', '.join(CONVERSATION_COLUMNS)}, completion, chosen with rejected, "
        f"instruction with output; its columns are {', '.join(document) or 'none'}"
    )


def _conversation(found: Any, tools: list[Json] | None) -> Conversation:
    messages = chat_messages(found)
    untrained = frozenset(n for n, one in enumerate(found) if one.get("weight") == 0 or one.get("train") is False)
    return conversation_of(messages, tools, untrained=untrained)


def _output(document: Json, column: str, tools: list[Json] | None) -> Conversation:
    output = _as_messages(document[column], "assistant")
    prompt = document.get("prompt")
    if prompt is not None:
        prompt_messages = chat_messages(_as_messages(prompt, "user"))
        whole = chat_messages(output)
        if whole[: len(prompt_messages)] == prompt_messages and len(whole) > len(prompt_messages):
            output = output[len(prompt_messages) :]  # some sets repeat the prompt in both outputs
        return completed(prompt_messages, output, tools)
    messages = chat_messages(output)
    return conversation_of(messages, tools, untrained=frozenset(range(len(messages) - 1)))


def _as_messages(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _rewards(document: Json) -> dict[str, float]:
    for column in REWARD_COLUMNS:
        value = document.get(column)
        if isinstance(value, bool | int | float):
            return {"reward": float(value)}
    return {}
