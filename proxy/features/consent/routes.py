"""Routes by which sessions, end users, keys and tenants are marked as not to be trained."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field, StrictBool, model_validator

from proxy.features.consent.marks import restrict_by
from proxy.routes.control import Body, Caller, CheckedRoute, Here, answer, describe_answer, page
from proxy.routes.declared import Routes
from proxy.sessions.identities import MAX_USER_ID, next_prefix
from turnwise.features import consent
from turnwise.features.consent import ConsentMark, ConsentOf
from turnwise.store import keys

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1/consent", route_class=CheckedRoute, tags=["sessions"])


class NewConsent(Body):
    """Whose calls are not trained, or are trained again."""

    kind: Literal["session", "user", "key", "tenant"]
    name: Annotated[str, Field(max_length=MAX_USER_ID)] = ""
    """The id of the session, the end user or the key; empty for the caller's tenant."""
    train: StrictBool = False
    """True removes a mark: sessions that are created from now on are trained. A session that is marked stays so."""
    record: StrictBool = True
    """False: nothing is stored either of what is said from now on."""

    @model_validator(mode="after")
    def _names_what_it_marks(self) -> NewConsent:
        if (self.kind == "tenant") == bool(self.name):
            raise ValueError("`name` is the id of the session, user or key; leave it out for kind `tenant`")
        if self.train and (self.kind == "session" or not self.record):
            raise ValueError("a marked session stays so, and what is not recorded is not trained")
        return self


@dataclasses.dataclass(slots=True)
class Consent:
    """What a mark has changed."""

    kind: str
    name: str
    train: bool
    record: bool
    num_sessions: int
    """Sessions that were marked, copies of their turns in other sessions included."""


@router.get("", responses=describe_answer("ConsentList"))
async def list_consent(
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(description="`KIND:NAME` of the last mark of the page before.")] = None,
) -> Response:
    """List the marks of end users, keys and the tenant; the sessions are those of `GET /v1/sessions?train=false`."""
    kind, _, name = (after or "").partition(":")
    before = None if after is None else (kind, name)
    found, more = await services.database.fetch(consent.list_marks, principal.tenant, limit=limit, after=before)
    return page(found, has_more=more)


@router.post("", responses=describe_answer("ConsentAnswer"))
async def change_consent(services: Here, principal: Caller, wanted: NewConsent) -> Response:
    """Mark a session, an end user, a key or the tenant as not to be trained, its sessions until now included.

    What a trainer has trained stays trained. Keys and tenants are marked, and marks removed, by an admin key.
    """
    if wanted.train or wanted.kind in ("key", "tenant"):
        principal.require("keys")
    tenant, number, restrict = principal.tenant, 0, restrict_by(services)
    if wanted.kind == "session":
        of = tenant, wanted.name, next_prefix(wanted.name), wanted.record
        number = await restrict(consent.restrict_session, *of)
    else:
        if wanted.kind == "key":
            await services.database.fetch(keys.get_key, wanted.name, tenant)
        kind = ConsentOf(wanted.kind)
        mark = ConsentMark(
            tenant=tenant, kind=kind, name=wanted.name, record=wanted.record, written_by=principal.key_id
        )
        await services.writer.do(consent.lift_mark if wanted.train else consent.put_mark, mark)
        services.forget_keys()
        number = 0 if wanted.train else await restrict(consent.restrict_marked, mark)
    return answer(Consent(wanted.kind, wanted.name, wanted.train, wanted.record, number))


def _answers() -> list[type[Answer]]:
    from proxy.routes.models import answer_model, page_model

    return [answer_model("ConsentAnswer", Consent), page_model("ConsentList", ConsentMark, "Some marks.")]


ROUTES = Routes(
    router=router,
    actions={"GET /v1/consent": "read", "POST /v1/consent": "label"},
    answers=_answers,
)
