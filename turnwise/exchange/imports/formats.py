"""What reads a line of a file: the files of OpenAI fine-tuning, Hugging Face chat data sets, and formats of plug-ins.

OpenAI has supervised examples with optional weights, and pairs of preferred and other outputs. Of data sets it takes
the columns that TRL and most published sets use: `messages` or `conversations`; `prompt` with `completion`; `prompt`
with `chosen` and `rejected`, or these two with the prompt in both; `instruction`, `input` and `output` of Alpaca. Each
may be messages or plain text. A `label` (KTO) or `score` column is the reward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.drafts import (
    Draft,
    ImportedConversation,
    SampledTokens,
    chat_messages,
    conversation_of,
    tool_schemas,
)
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """What reads one format."""

    drafts_of: Callable[[Json], list[Draft]]
    """Returns the sessions of a document; raises `BadLine` or `SkippedLine` where it has none."""
    key_of: Callable[[Json], str | None] = lambda _: None
    """Returns the session that the document belongs to; None if it is a separate session."""


OUTPUTS = {"preferred_output": ("chosen", 1.0), "non_preferred_output": ("rejected", 0.0)}


def openai_drafts(document: Json) -> list[Draft]:
    """Return one session for a supervised example, two for a preference example."""
    if "preferred_output" in document:
        return _pair(document)
    if "messages" not in document:
        raise BadLine(f"it has neither messages nor preferred_output; its fields are {', '.join(document) or 'none'}")
    found = document["messages"]
    messages = chat_messages(found)
    untrained = frozenset(index for index, message in enumerate(found) if message.get("weight") == 0)
    return [Draft(conversations=[conversation_of(messages, _openai_tools(document), untrained=untrained)])]


def completed(prompt: list[Json], output: Any, tools: list[Json] | None) -> ImportedConversation:
    messages = [*prompt, *chat_messages(output)]
    return conversation_of(messages, tools, untrained=frozenset(range(len(prompt))))


def _pair(document: Json) -> list[Draft]:
    request = document.get("input")
    if not isinstance(request, dict):
        raise BadLine("a preference example needs an input with messages")
    prompt, tools = chat_messages(request.get("messages")), _openai_tools(request)
    return [
        Draft(
            conversations=[completed(prompt, document.get(field), tools)],
            rewards={"reward": reward},
            suffix=suffix,
        )
        for field, (suffix, reward) in OUTPUTS.items()
    ]


def _openai_tools(document: Json) -> list[Json] | None:
    return tool_schemas(document.get("tools") or document.get("functions"))


CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
REWARD_COLUMNS = ("reward", "score", "label")
PAIR = {"chosen": 1.0, "rejected": 0.0}


def data_set_drafts(document: Json) -> list[Draft]:
    """Return the session of a row, or the two sessions of a preference row."""
    tools = tool_schemas(document.get("tools"))
    if document.get("chosen") is not None and document.get("rejected") is not None:
        return [
            Draft(conversations=[_output(document, name, tools)], rewards={"reward": reward}, suffix=name)
            for name, reward in PAIR.items()
        ]
    rewards = _rewards(document)
    for column in CONVERSATION_COLUMNS:
        if document.get(column) is not None:
            return [Draft(conversations=[_whole_conversation(document[column], tools)], rewards=rewards)]
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


def _whole_conversation(found: Any, tools: list[Json] | None) -> ImportedConversation:
    messages = chat_messages(found)
    untrained = frozenset(n for n, one in enumerate(found) if one.get("weight") == 0 or one.get("train") is False)
    return conversation_of(messages, tools, untrained=untrained)


def _output(document: Json, column: str, tools: list[Json] | None) -> ImportedConversation:
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


def plugin_format(module: Any) -> Format:
    """Return the format that a module of another package reads; what its sessions contain is checked here."""

    def drafts_of(document: Json) -> list[Draft]:
        return [
            Draft(
                conversations=[_checked(each) for each in found["conversations"]],
                rewards=found.get("rewards", {}),
                task_id=found.get("task_id"),
            )
            for found in module.drafts_of(document)
        ]

    return Format(drafts_of, module.key_of)


def _checked(found: Json) -> ImportedConversation:
    messages = chat_messages(found["messages"])
    trained = found.get("trained")
    untrained = frozenset() if trained is None else frozenset(range(len(messages))).difference(trained)
    checked = conversation_of(
        messages, tool_schemas(found.get("tools")), untrained=untrained, model=found.get("model", "")
    )
    sampled = {place: SampledTokens(**tokens) for place, tokens in found.get("sampled", {}).items()}
    return dataclasses.replace(checked, sampled=sampled, created_at=found.get("created_at", {}))


FORMATS = {"openai": Format(openai_drafts), "hf": Format(data_set_drafts)}
