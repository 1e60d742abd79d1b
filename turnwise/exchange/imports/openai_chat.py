"""OpenAI's fine-tuning files: supervised examples with optional weights, and pairs of preferred and other outputs."""

from __future__ import annotations

from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.drafts import Conversation, Draft, conversation_of
from turnwise.exchange.imports.messages import chat_messages, tool_schemas
from turnwise.types import Json

OUTPUTS = {"preferred_output": ("chosen", 1.0), "non_preferred_output": ("rejected", 0.0)}
"""Fields of a preference example: suffix and reward of the session that each becomes."""


def key_of(document: Json) -> str | None:  # noqa: ARG001  one signature for all formats
    return None


def drafts_of(document: Json) -> list[Draft]:
    """Return one session for a supervised example, two for a preference example.

    Raises:
        BadLine: it is neither.
    """
    if "preferred_output" in document:
        return _pair(document)
    if "messages" not in document:
        raise BadLine(f"it has neither messages nor preferred_output; its fields are {', '.join(document) or 'none'}")
    found = document["messages"]
    messages = chat_messages(found)
    untrained = frozenset(index for index, message in enumerate(found) if _weight(message) == 0)
    return [Draft(conversations=[conversation_of(messages, _tools(document), untrained=untrained)])]


def completed(prompt: list[Json], output: Any, tools: list[Json] | None) -> Conversation:
    """Return a prompt with an output, of which the output's replies are trained."""
    messages = [*prompt, *chat_messages(output)]
    return conversation_of(messages, tools, untrained=frozenset(range(len(prompt))))


def _pair(document: Json) -> list[Draft]:
    request = document.get("input")
    if not isinstance(request, dict):
        raise BadLine("a preference example needs an input with messages")
    prompt, tools = chat_messages(request.get("messages")), _tools(request)
    return [
        Draft(
            conversations=[completed(prompt, document.get(field), tools)],
            rewards={"reward": reward},
            suffix=suffix,
        )
        for field, (suffix, reward) in OUTPUTS.items()
    ]


def _tools(document: Json) -> list[Json] | None:
    return tool_schemas(document.get("tools") or document.get("functions"))


def _weight(message: Any) -> Any:
    return message.get("weight", 1)
