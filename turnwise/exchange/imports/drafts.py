"""What a format's module makes of a file's lines: sessions that are not yet tokenised."""

from __future__ import annotations

import dataclasses
import datetime

from turnwise.errors import BadLine
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Token ids that a file has for a reply."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """One for each of `token_ids`, or none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of which some replies are trained."""

    messages: list[Json]
    trained: tuple[int, ...]
    """Indices of the assistant messages that become turns; the other messages are only part of prompts."""
    tools: list[Json] | None = None
    model: str = ""
    sampled: dict[int, SampledTokens] = dataclasses.field(default_factory=dict)
    """Token ids by index of the message; the other replies are tokenised."""
    created_at: dict[int, datetime.datetime] = dataclasses.field(default_factory=dict)
    """When replies were made, by index of the message, where the file says so."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Draft:
    """A session to be stored. Two drafts of one line are a group whose rewards are compared."""

    conversations: list[Conversation]
    """They share the turns whose messages are equal up to the reply."""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """By name."""
    suffix: str = ""
    """Distinguishes the sessions of a group."""
    task_id: str | None = None


def conversation_of(
    messages: list[Json], tools: list[Json] | None = None, *, untrained: frozenset[int] = frozenset(), model: str = ""
) -> Conversation:
    """Return a conversation whose assistant messages are trained, except those at the indices in `untrained`.

    Raises:
        BadLine: nothing is left to train.
    """
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = tuple(index for index in replies if index not in untrained)
    if not trained:
        raise BadLine("no assistant message is left to train" if replies else "it has no assistant message")
    return Conversation(messages=messages, trained=trained, tools=tools, model=model)
