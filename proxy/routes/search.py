"""The query parameters that filter sessions, by their own fields and by what they hold."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from proxy.routes.checked_route import Id, LabelName, Text
from proxy.routes.serialise import Caller
from turnwise.store.search import Contents
from turnwise.store.selection import SessionFilter
from turnwise.types import Outcome, SessionStatus, Split

FiniteNumber = Annotated[float, Query(allow_inf_nan=False)]


def session_filter(
    principal: Caller,
    task_id: Id | None = None,
    group_id: Id | None = None,
    split: Split | None = None,
    status: SessionStatus | None = None,
    user_id: Id | None = None,
    label: LabelName | None = None,
    policy: Annotated[Text | None, Query(description="Name of the policy that samples.")] = None,
    metadata: Annotated[Id | None, Query(description="`KEY=VALUE`: a pair of the session's metadata.")] = None,
) -> SessionFilter:
    """Return the conditions on a session of the caller's tenant."""
    return SessionFilter(
        tenant=principal.tenant,
        task_id=task_id,
        group_id=group_id,
        split=split,
        status=status,
        user_id=user_id,
        label=label,
        policy=policy,
        metadata=metadata,
    )


def contents(
    min_reward: FiniteNumber | None = None,
    max_reward: FiniteNumber | None = None,
    termination_reason: Annotated[str | None, Query(max_length=1000)] = None,
    outcome: Annotated[Outcome | None, Query(description="Of a turn.")] = None,
    reason: Annotated[str | None, Query(max_length=1000, description="Of the turn's outcome.")] = None,
    policy_version: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="A version that sampled in the turn.")
    ] = None,
    text: Annotated[Id | None, Query(description="Part of the turn's messages or reply.")] = None,
) -> Contents:
    """Return the conditions on what a session holds."""
    return Contents(
        min_reward=min_reward,
        max_reward=max_reward,
        termination_reason=termination_reason,
        outcome=outcome,
        reason=reason,
        policy_version=policy_version,
        text=text,
    )
