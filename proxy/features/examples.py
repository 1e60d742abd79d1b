"""Routes that pin a turn as an example which each later version must answer, and list, import and unpin examples.

The label `must` of a session is the one-click form: it pins the session's last reply as one that must not come again,
and without the label the session has no example any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
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
    page,
    session_json,
)
from proxy.routes.declared import Routes
from proxy.settings import ProxySettings
from turnwise.features import examples
from turnwise.store import sessions
from turnwise.store.database import Connection

if TYPE_CHECKING:
    from proxy.routes.models import Answer

MAX_STRINGS = 65_536
"""Strings of an imported example, whose prompt may be a long conversation."""


class Check(Body):
    """What a right answer is."""

    kind: Literal["not_again", "tool_call", "text", "command", "rubric"] = "not_again"
    """`not_again`: any other reply than the pinned one is right."""
    name: str | None = None
    """Of the tool that a `tool_call` calls, or of the operator's program that is the `command`."""
    arguments: dict[str, Any] | None = None
    """Arguments that the `tool_call` has, among others."""
    equals: str | None = None
    """The `text`, but for white space."""
    contains: str | None = None
    """A part of the `text`."""
    rubric: str | None = None
    """What the trainer's judge is asked."""
    least: float | None = None
    """The least score by the `rubric`, from 0 to 1; by default 0.5."""


class Must(Body):
    """The content of the label."""

    note: Text | None = None
    """Free text."""


class NewExample(Body):
    """How a turn is pinned."""

    check: Check = Check()
    note: Text | None = None
    """Free text."""


class Imported(Body):
    """A line that `turnwise examples export` wrote."""

    example: dict[str, Any]


class ExampleRoute(CheckedRoute):
    """A route whose body may have a whole prompt, so that the proxy's own limit of a body is its limit."""

    def limits(self, settings: ProxySettings) -> tuple[int, int]:
        return settings.max_body_bytes, MAX_STRINGS


router = APIRouter(prefix="/v1", route_class=ExampleRoute, tags=["sessions"])


@router.put("/sessions/{session_id}/labels/must", responses=describe_answer("SessionAnswer"))
async def pin_session(session_id: Id, services: Here, principal: Caller, wanted: Must | None = None) -> Response:
    """Pin a session's last reply as one that must not come again, if none of its turns is pinned; label the session.

    Each version of the policy answers the same prompt before it is published: docs/training.md, "Pinned examples".
    """
    note = None if wanted is None else services.stored_text(wanted.note)
    tenant, by = principal.tenant, principal.key_id
    await services.writer.do(examples.pin_session, tenant, session_id, note=note, written_by=by)
    labelled = await services.database.fetch(sessions.read_session, tenant, session_id)
    return answer(await session_json(labelled, services))


@router.delete("/sessions/{session_id}/labels/must", responses=describe_answer("SessionAnswer"))
async def unpin_session(session_id: Id, services: Here, principal: Caller) -> Response:
    """Unpin all examples of a session, and remove the label."""
    await services.writer.do(examples.unpin_session, principal.tenant, session_id)
    unlabelled = await services.database.fetch(sessions.read_session, principal.tenant, session_id)
    return answer(await session_json(unlabelled, services))


@router.put("/examples/{example_id}", responses=describe_answer("ExampleAnswer"))
async def pin_turn(example_id: Id, services: Here, principal: Caller, wanted: NewExample | None = None) -> Response:
    """Pin a turn by its id as an example, with a check; its session gets the label `must`.

    A turn that is pinned gets the new check, and what versions answered to it is forgotten.
    """
    given = wanted or NewExample()
    check = examples.checked(services.stored_document(given.check.model_dump()))
    note, by = services.stored_text(given.note), principal.key_id
    await services.writer.do(examples.pin, principal.tenant, example_id, check, note=note, written_by=by)
    return answer(await services.database.fetch(examples.read_line, principal.tenant, example_id))


@router.delete("/examples/{example_id}", responses=describe_answer("ExampleAnswer"))
async def unpin(example_id: Id, services: Here, principal: Caller) -> Response:
    """Remove an example, and the label of its session with the last one; return the example as it was."""

    def read(connection: Connection) -> examples.ExampleLine:
        return examples.read_line(connection, principal.tenant, example_id)

    found = await services.database.fetch(read)
    await services.writer.do(examples.unpin, principal.tenant, example_id)
    return answer(found)


@router.get("/examples", responses=describe_answer("ExampleList"))
async def list_examples(
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[Id | None, Query(description="Id of the last example of the page before.")] = None,
) -> Response:
    """List the tenant's examples by id, each as a line of an export."""
    found, more = await services.database.fetch(examples.list_lines, principal.tenant, limit=limit, after=after)
    return page(found, has_more=more)


@router.post("/examples", responses=describe_answer("ImportedExample"))
async def import_example(services: Here, principal: Caller, wanted: Imported) -> Response:
    """Store an exported example without its session; one that is stored already stays as it is."""
    document = services.stored_document(wanted.example)
    is_new = await services.writer.do(examples.import_line, principal.tenant, document, written_by=principal.key_id)
    return answer({"is_new": is_new})


def _answers() -> list[type[Answer]]:
    from proxy.routes.models import Answer, answer_model, create, page_model

    return [
        answer_model("ExampleAnswer", examples.ExampleLine),
        page_model("ExampleList", examples.ExampleLine, "Some examples."),
        create(
            "ImportedExample",
            Answer,
            "What an import did.",
            {"is_new": (bool, Field(description="Whether the example was stored now."))},
        ),
    ]


ROUTES = Routes(
    router=router,
    actions={
        "PUT /v1/sessions/{session_id}/labels/must": "label",
        "DELETE /v1/sessions/{session_id}/labels/must": "label",
        "PUT /v1/examples/{example_id}": "label",
        "DELETE /v1/examples/{example_id}": "label",
        "GET /v1/examples": "read",
        "POST /v1/examples": "label",
    },
    answers=_answers,
)
