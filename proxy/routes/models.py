"""What the control plane answers, as the OpenAPI document says it.

One decision: these models describe, they do not filter. Answers are encoded from our own records by one fast call; a
test holds every answer to its model, which costs nothing in service, where a page may carry a million token ids.
"""

from __future__ import annotations

import datetime
from typing import Any, Literal

import orjson
from fastapi import Response
from pydantic import BaseModel, ConfigDict

from turnwise.types import Credit, Json, Outcome, PolicyKind, PolicyStatus, SessionStatus, Split


class Answer(BaseModel):
    """Base of all: nothing is in an answer that its model does not name."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Problem(Answer):
    """What went wrong."""

    message: str
    """A sentence that says what to do."""
    type: str | int
    param: str | None
    """The field of the request that it is about."""
    code: str | int | None
    """A stable word for programs."""


class ErrorAnswer(Answer):
    """OpenAI's error object."""

    error: Problem


class SessionAnswer(Answer):
    """One run of an agent."""

    session_id: str
    task_id: str | None
    run: int
    group_id: str | None
    group_size: int | None
    split: Split
    credit: Credit
    gamma: float
    sampling: dict[str, Any]
    metadata: dict[str, Any]
    status: SessionStatus
    termination_reason: str | None
    reward: float | None
    num_turns: int
    num_chains: int
    created_at: datetime.datetime
    last_active_at: datetime.datetime
    ended_at: datetime.datetime | None


class NewSessionAnswer(SessionAnswer):
    """A session, with what its agent needs to call the model in it."""

    base_url: str
    """What an OpenAI client takes as `base_url`."""
    api_key: str
    """A key for this session alone."""


class RewardAnswer(Answer):
    """One line of the reward ledger."""

    reward_id: int | None
    session_id: str
    turn_id: str | None
    step: int | None
    value: float
    name: str
    source: str | None
    written_by: str | None
    created_at: datetime.datetime


class TurnAnswer(Answer):
    """One model call, with its whole prompt."""

    turn_id: str
    session_id: str
    parent_turn_id: str | None
    chain_id: str
    seq: int
    step: int | None
    dialect: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    response: dict[str, Any]
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    outcome: Outcome
    reason: str | None
    policy_version_first: int
    policy_version_last: int
    rewards: list[RewardAnswer]
    created_at: datetime.datetime
    ttft_seconds: float | None
    duration_seconds: float


class PolicyAnswer(Answer):
    """A version of the served model."""

    version: int
    path: str
    kind: PolicyKind
    status: PolicyStatus
    update_id: int | None
    metrics: dict[str, Any]
    error: str | None
    reload_seconds: float | None
    created_at: datetime.datetime
    activated_at: datetime.datetime | None


class ReachedAnswer(Answer):
    """How many turns a reward line reached."""

    turns: int


class Page(Answer):
    """Base of all lists."""

    object: Literal["list"]


class RewardsAnswer(Page):
    """What became of each reward line."""

    data: list[ReachedAnswer]


class SessionPage(Page):
    """Some sessions."""

    data: list[SessionAnswer]
    has_more: bool


class TurnPage(Page):
    """Some turns."""

    data: list[TurnAnswer]
    has_more: bool


class PolicyPage(Page):
    """Some policy versions."""

    data: list[PolicyAnswer]
    has_more: bool
    pinned_version: int | None
    """The version that a person pinned; null follows the newest."""


def says(model: type[Answer]) -> dict[int | str, dict[str, Any]]:
    """Return what a route's decorator takes to document its answer."""
    return {200: {"model": model}}


def answer(content: Json) -> Response:
    """Encode an answer."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
