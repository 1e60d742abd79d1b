"""Routes that set and remove labels of sessions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from proxy.routes.checked_route import Body, CheckedRoute, Id, LabelName, Text
from proxy.routes.serialise import Caller, Here, answer, describe_answer, record_json
from turnwise.store import session_changes
from turnwise.types import Label

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
    note = None if wanted is None else wanted.note
    given = Label(label=label, note=note, written_by=principal.key_id)
    return answer(record_json(await services.writer.do(session_changes.set_label, principal.tenant, session_id, given)))


@router.delete("/sessions/{session_id}/labels/{label}", responses=describe_answer("SessionAnswer"))
async def remove_label(session_id: Id, label: LabelName, services: Here, principal: Caller) -> Response:
    """Remove a label from a session; removing a label that it does not have changes nothing."""
    return answer(
        record_json(await services.writer.do(session_changes.remove_label, principal.tenant, session_id, label))
    )
