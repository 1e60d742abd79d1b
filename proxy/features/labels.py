"""Routes that set and remove the labels of sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from proxy.routes.control import (
    Body,
    Caller,
    CheckedRoute,
    Here,
    Id,
    Text,
    answer,
    describe_answer,
    session_json,
)
from proxy.routes.declared import Routes
from turnwise.features import labels
from turnwise.features.labels import Label

LabelName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^/\x00-\x1f\x7f]+$")]
"""A label: one segment of a path."""
router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


class NewLabel(Body):
    """The content of a label."""

    note: Text | None = None
    """Free text; it replaces the note that the label has."""


@router.put("/sessions/{session_id}/labels/{label}", responses=describe_answer("SessionAnswer"))
async def set_label(
    session_id: Id, label: LabelName, services: Here, principal: Caller, wanted: NewLabel | None = None
) -> Response:
    """Give a session a label, or replace the label's note; the session may be over. Labels do not affect training."""
    note = None if wanted is None else services.stored_text(wanted.note)
    given = Label(label=label, note=note, written_by=principal.key_id)
    labelled = await services.writer.do(labels.set_label, principal.tenant, session_id, given)
    return answer(await session_json(labelled, services))


@router.delete("/sessions/{session_id}/labels/{label}", responses=describe_answer("SessionAnswer"))
async def remove_label(session_id: Id, label: LabelName, services: Here, principal: Caller) -> Response:
    """Remove a label from a session; removing a label that it does not have changes nothing."""
    unlabelled = await services.writer.do(labels.remove_label, principal.tenant, session_id, label)
    return answer(await session_json(unlabelled, services))


ROUTES = Routes(
    router=router,
    actions={
        "PUT /v1/sessions/{session_id}/labels/{label}": "label",
        "DELETE /v1/sessions/{session_id}/labels/{label}": "label",
    },
)
