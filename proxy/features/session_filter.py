"""By which query parameters lists and exports choose sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from proxy.features.labels import LabelName
from proxy.routes.control import Caller, Id, Text
from turnwise.store.selection import SessionFilter
from turnwise.types import SessionStatus, Split


def session_filter(
    principal: Caller,
    task_id: Id | None = None,
    group_id: Id | None = None,
    split: Split | None = None,
    status: SessionStatus | None = None,
    user_id: Id | None = None,
    train: Annotated[bool | None, Query(description="Whether it may be trained.")] = None,
    label: LabelName | None = None,
    policy: Annotated[Text | None, Query(description="Name of the policy that samples.")] = None,
    metadata: Annotated[Id | None, Query(description="`KEY=VALUE`: a pair of the session's metadata.")] = None,
) -> SessionFilter:
    return SessionFilter(
        tenant=principal.tenant,
        task_id=task_id,
        group_id=group_id,
        split=split,
        status=status,
        user_id=user_id,
        train=train,
        label=label,
        policy=policy,
        metadata=metadata,
    )
