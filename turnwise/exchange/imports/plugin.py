"""A format of another package: it returns sessions as JSON values, and what they contain is checked here."""

from __future__ import annotations

import dataclasses
from typing import Any

from turnwise.exchange.imports.drafts import Conversation, Draft, SampledTokens, conversation_of
from turnwise.exchange.imports.messages import chat_messages, tool_schemas
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True)
class PluginFormat:
    """Reads documents by a plug-in's module."""

    module: Any

    def key_of(self, document: Json) -> str | None:
        """Return the session that the document belongs to; None if it is a separate session."""
        key: str | None = self.module.key_of(document)
        return key

    def drafts_of(self, document: Json) -> list[Draft]:
        """Return the sessions of a document.

        Raises:
            BadLine, SkippedLine: it has none.
        """
        return [
            Draft(
                conversations=[_conversation(each) for each in found["conversations"]],
                rewards=found.get("rewards", {}),
                task_id=found.get("task_id"),
            )
            for found in self.module.drafts_of(document)
        ]


def _conversation(found: Json) -> Conversation:
    messages = chat_messages(found["messages"])
    trained = found.get("trained")
    untrained = frozenset() if trained is None else frozenset(range(len(messages))).difference(trained)
    checked = conversation_of(
        messages, tool_schemas(found.get("tools")), untrained=untrained, model=found.get("model", "")
    )
    sampled = {place: SampledTokens(**tokens) for place, tokens in found.get("sampled", {}).items()}
    return dataclasses.replace(checked, sampled=sampled, created_at=found.get("created_at", {}))
