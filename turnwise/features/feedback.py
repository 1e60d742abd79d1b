"""Feedback of people: what they said is stored as they said it, and what can be trained of it follows from it.

A thumb or a rating is also a line of the reward ledger. A demonstration makes a group of sessions like those of an
import: one with the better reply and a reward of 1, and for each reply that it was preferred to one with a reward of 0.
So SFT imitates the better reply and DPO trains the pair, and reinforcement learning leaves the group alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from turnwise import chains
from turnwise.chains import Experience
from turnwise.errors import InvalidRequest, NotFound, TurnwiseError
from turnwise.features import forks, retention
from turnwise.features.copies import session_copies
from turnwise.parts import Part, part
from turnwise.store import rewards, rows
from turnwise.store.extensions import Extension
from turnwise.store.rewards import add_rewards, claim_key
from turnwise.store.rows import StoredRow
from turnwise.store.schema import columns_of, groups, metadata, sessions
from turnwise.store.selection import SessionFilter, lock_sessions, session_row, sessions_of_turns
from turnwise.store.sessions import create_sessions, end_session
from turnwise.store.statements import insert_rows, is_among
from turnwise.store.turns import append_turns
from turnwise.types import IMPORT, GroupStatus, Json, Outcome, Reward, Session, TokenIds, Turn, utc_now

MAX_FEEDBACK = 1000
MAX_COPIES = 1000
"""Most sessions that are made from the demonstrations of one session."""
FEEDBACK = "feedback"
"""What ends the sessions that a demonstration is trained in."""
CORRECTION = "correction"
HINTS = "hints"


class FeedbackKind(enum.StrEnum):
    """Kinds of feedback, with the names that TensorZero gave them."""

    BOOLEAN = "boolean"
    """A thumb: true is up."""
    FLOAT = "float"
    """A number, or a rating on a scale."""
    COMMENT = "comment"
    """Text."""
    DEMONSTRATION = "demonstration"
    """A better reply: the turn's own as a person edited it, or the turn's own where it was chosen among several."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a person said about a session or a turn. A later one of the same target, kind and name replaces it."""

    session_id: str
    tenant: str = "default"
    turn_id: str = ""
    """The turn that it is about; empty for the whole session."""
    kind: FeedbackKind
    name: str = "feedback"
    """For thumbs and ratings the name of the reward; it also separates the feedback of several people."""
    content: Json
    """`value`, and where they were given `scale`, the lowest and the highest rating, and `over`, the turns that a
    demonstration was preferred to."""
    group_id: str | None = None
    """The group that a demonstration is trained in by SFT and DPO; None for other kinds."""
    source: str | None = None
    """Where it comes from, such as the name of an application; free text."""
    written_by: str | None = None
    """The API key that wrote it; set by the proxy."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)


RATINGS = (FeedbackKind.BOOLEAN, FeedbackKind.FLOAT)
AS_GROUP = "`sft`, `dpo` and `chord` train it as a group of its own"
TRAINED_BY = {
    (FeedbackKind.COMMENT, True): "The algorithm `correction` trains it; others do not.",
    (FeedbackKind.DEMONSTRATION, True): f"{AS_GROUP}, and `correction` as a correction; other algorithms do not.",
    (FeedbackKind.DEMONSTRATION, False): f"{AS_GROUP}; other algorithms do not.",
}
"""By the kind of feedback and whether it is a text: which algorithms train it."""
feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), nullable=False),
    *columns_of(Feedback, omit=frozenset({"session_id", "tenant"})),
    sa.PrimaryKeyConstraint("session_pk", "turn_id", "kind", "name"),
)
_ROWS = rows.RowFormat(Feedback, feedback, joined=("session_id", "tenant"), free_text=("source",))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A session of a demonstration's group. Its only turn has the whole prompt of a turn of another session."""

    session: Session
    turn: Turn
    reward: float
    source: str
    copied: str


def new_group_id() -> str:
    return f"{FEEDBACK}-{uuid.uuid4().hex}"


def sampled(path: Sequence[Turn], given: Feedback, original: Session, number: int, size: int) -> Member:
    """Return a member with the reply that was sampled; number 0 has the better reply.

    The path has the turns from the root of a chain to the turn that is copied, inclusive.
    """
    session = Session(
        session_id=f"{given.group_id}-{number}",
        tenant=given.tenant,
        task_id=original.task_id,
        run=number,
        group_id=given.group_id,
        group_size=size,
        split=original.split,
        policy_id=original.policy_id,
        user_id=original.user_id,
        metadata={FEEDBACK: {"session_id": given.session_id, "turn_id": given.turn_id}},
        opened_by=IMPORT,
    )
    turn_id = f"{session.session_id}-t0"
    turn = forks.copy_of(chains.as_root(path), session, turn_id=turn_id, chain_id=turn_id)
    return Member(
        session=session, turn=turn, reward=0.0 if number else 1.0, source=path[-1].session_id, copied=path[-1].turn_id
    )


def written(member: Member, text: str, token_ids: TokenIds) -> Member:
    turn = dataclasses.replace(
        member.turn,
        sampling={},
        response={"role": "assistant", "content": text},
        token_ids=token_ids,
        logprobs=np.empty(0, np.float32),
        finish_reason="stop",
        outcome=Outcome.UNTRAINABLE,
        reason=chains.IMPORTED,
        policy_version_first=chains.NO_POLICY,
        policy_version_last=chains.NO_POLICY,
        parts={name: packed for name, packed in member.turn.parts.items() if part(name).is_of_prompt},
    )
    return dataclasses.replace(member, turn=turn)


def add(
    conn: sa.Connection,
    given: Feedback,
    *,
    reward: float | None = None,
    group: Sequence[Member] = (),
    idempotency_key: str | None = None,
    body_digest: bytes = b"",
    retrain: bool = False,
) -> Feedback:
    """Store feedback in place of an earlier one of the same target, kind and name; return what is in force.

    A demonstration's sessions, the group, are stored in the same transaction, so none is left of feedback that is
    refused. The same demonstration again keeps its sessions, which may have been trained. A replay with the same key
    and session writes nothing, and None as the reward writes no reward. With `retrain` a trained session becomes
    ready again.

    Raises:
        InvalidRequest: the session has `MAX_FEEDBACK` others, or `MAX_COPIES` sessions were made of it.
        Conflict: the key was used with another body.
    """
    named = {given.session_id, *(one.source for one in group)}
    locked = lock_sessions(conn, {(given.tenant, session_id) for session_id in named})
    (session_pk,) = (row.session_pk for row in locked if row.session_id == given.session_id)
    earlier = _earlier(conn, given, session_pk)
    if idempotency_key is not None:
        known = claim_key(conn, given.tenant, given.session_id, idempotency_key, body_digest)
        if known is not None:
            return given if earlier is None else earlier
    is_same = earlier is not None and earlier.content == given.content
    if earlier is not None and is_same:
        given = dataclasses.replace(given, group_id=earlier.group_id)
    conn.execute(sa.delete(feedback).where(_is_same(given, session_pk)))
    _check_number(conn, given, session_pk)
    insert_rows(conn, feedback, [_ROWS.row(given, session_pk=session_pk)])
    if reward is not None:
        line = Reward(
            session_id=given.session_id,
            tenant=given.tenant,
            turn_id=given.turn_id or None,
            value=reward,
            name=given.name if given.kind in RATINGS else CORRECTION,
            source=given.source or FEEDBACK,
            written_by=given.written_by,
        )
        add_rewards(conn, [line], retrain=retrain)
    if group and not is_same:
        if earlier is not None:
            _delete_group(conn, earlier)
        _store(conn, given, group)
    return given


def withdraw(conn: sa.Connection, given: Feedback, *, retrain: bool = False) -> Feedback:
    """Remove the feedback of a target, kind and name, with its reward and the sessions it has made; none is no error.

    What a policy has learned from it stays learned; with `retrain` its group is trained again.
    """
    (session,) = lock_sessions(conn, {(given.tenant, given.session_id)})
    earlier = _earlier(conn, given, session.session_pk)
    if earlier is None:
        return given
    conn.execute(sa.delete(feedback).where(_is_same(given, session.session_pk)))
    if earlier.group_id is not None:
        _delete_group(conn, earlier)
    is_rating, c = given.kind in RATINGS, feedback.c
    corrections = c.session_pk == session.session_pk, c.turn_id == given.turn_id, c.kind.not_in(list(RATINGS))
    if is_rating or not conn.execute(sa.select(c.name).where(*corrections)).all():  # all of a turn have one reward
        name = given.name if is_rating else CORRECTION
        rewards.take_back(conn, session, given.turn_id or None, name, retrain=retrain)
    return given


def _delete_group(conn: sa.Connection, demonstration: Feedback) -> None:
    of_group = SessionFilter(tenant=demonstration.tenant, group_id=demonstration.group_id)
    while retention.delete_sessions(conn, of_group).has_more:
        pass


_WITH_SESSION = sa.select(feedback, sessions.c.session_id, sessions.c.tenant).join_from(feedback, sessions)


def feedback_of(conn: sa.Connection, tenant: str, session_id: str) -> list[Feedback]:
    session_pk = session_row(conn, tenant, session_id).session_pk
    own = _WITH_SESSION.where(feedback.c.session_pk == session_pk).order_by(feedback.c.created_at)
    return [_ROWS.record(row) for row in conn.execute(own)]


def feedback_from(
    conn: sa.Connection, tenant: str, source: str, *, after: str | None = None, num_sessions: int = 100
) -> tuple[list[Feedback], bool]:
    """Return what a source said that is in force, of the first sessions after one; and whether there are more."""
    begin = -1 if after is None else session_row(conn, tenant, after).session_pk
    of_source = sessions.c.tenant == tenant, feedback.c.source == source
    later = _WITH_SESSION.where(*of_source, feedback.c.session_pk > begin)
    found = conn.execute(
        later.with_only_columns(feedback.c.session_pk)
        .distinct()
        .order_by(feedback.c.session_pk)
        .limit(num_sessions + 1)
    ).scalars()
    pks = list(found)
    of_page = later.where(is_among(conn.dialect, feedback.c.session_pk, pks[:num_sessions]))
    rows_of_page = conn.execute(of_page.order_by(feedback.c.session_pk, feedback.c.created_at))
    return [_ROWS.record(row) for row in rows_of_page], len(pks) > num_sessions


def _is_same(given: Feedback, session_pk: int) -> sa.ColumnElement[bool]:
    same = {"session_pk": session_pk, "turn_id": given.turn_id, "kind": given.kind.value, "name": given.name}
    return sa.and_(*(feedback.c[name] == value for name, value in same.items()))


def _earlier(conn: sa.Connection, given: Feedback, session_pk: int) -> Feedback | None:
    row = conn.execute(_WITH_SESSION.where(_is_same(given, session_pk))).one_or_none()
    return None if row is None else _ROWS.record(row)


def _check_number(conn: sa.Connection, given: Feedback, session_pk: int) -> None:
    count = sa.select(sa.func.count())
    if conn.execute(count.where(feedback.c.session_pk == session_pk)).scalar_one() >= MAX_FEEDBACK:
        raise InvalidRequest(
            f"session {given.session_id!r} has {MAX_FEEDBACK} other feedback, which is the limit; replace one by its "
            "target, kind and name"
        )


def _store(conn: sa.Connection, given: Feedback, group: Sequence[Member]) -> None:
    present = sessions_of_turns(conn, given.tenant, [one.copied for one in group])
    if missing := [one.copied for one in group if one.copied not in present]:
        raise NotFound(f"there is no turn {missing[0]!r} any more; its session was deleted", param="turn_id")
    of_edits = session_copies.c.source_id == given.session_id, session_copies.c.made_by == FEEDBACK
    num_copies = sa.select(sa.func.count()).where(session_copies.c.tenant == given.tenant, *of_edits)
    if conn.execute(num_copies).scalar_one() + len(group) > MAX_COPIES:
        raise InvalidRequest(
            f"the demonstrations of session {given.session_id!r} have made {MAX_COPIES} sessions, which is the limit; "
            "replace one by its target and name"
        )
    for created in create_sessions(conn, [one.session for one in group]):
        if isinstance(created, TurnwiseError):
            raise created
    for one in group:
        forks.note_copy(conn, one.session, {given.session_id, one.source}, FEEDBACK)
    append_turns(conn, [one.turn for one in group])
    for one in group:
        tenant, session_id = one.session.tenant, one.session.session_id
        reward = Reward(session_id=session_id, tenant=tenant, value=one.reward, source=FEEDBACK)
        end_session(conn, tenant, session_id, FEEDBACK, reward=reward)


class Hints(Part):
    """What people corrected, by turn: the first `kept` tokens of its prompt, and then `token_ids`, are it with that."""

    name = HINTS
    is_always_shown = False

    def load(
        self,
        conn: sa.Connection,
        sessions: Sequence[StoredRow],
        turns: Mapping[int, Sequence[Turn]],
        *,
        with_files: bool,
    ) -> Mapping[int, Any]:
        is_own = is_among(conn.dialect, feedback.c.session_pk, [session.session_pk for session in sessions])
        found = sa.select(feedback.c.session_pk, feedback.c.content).where(is_own).order_by(feedback.c.created_at)
        hints: defaultdict[int, dict[str, Json]] = defaultdict(dict)
        for row in conn.execute(found):
            hint = json.loads(row.content).get("hint")
            if hint is not None:
                hints[row.session_pk][hint["turn_id"]] = hint
        return hints

    def join(self, path: Sequence[Turn], trained: Collection[str], loaded: Any) -> Mapping[str, Json] | None:
        return {turn_id: hint for turn_id, hint in (loaded or {}).items() if turn_id in trained} or None

    def of_experience(self, joined: Mapping[str, Json] | None, experience: Experience) -> Json:
        return {"info": experience.info | {HINTS: joined}}


def hints_of(experience: Experience) -> Mapping[str, Json]:
    """Return what people corrected in the turns that a chain trains, by their ids."""
    found: Mapping[str, Json] = experience.parts.get(HINTS, {})
    return found


def _findings(conn: sa.Connection, tenant: str | None) -> Iterator[tuple[str, str]]:
    of_tenant = sa.true() if tenant is None else groups.c.tenant == tenant
    is_edit = groups.c.imported.is_not(None), groups.c.group_id.startswith(f"{FEEDBACK}-")
    waiting = sa.select(groups.c.group_pk).where(*is_edit, groups.c.status == GroupStatus.READY.value, of_tenant)
    number = conn.execute(sa.select(sa.func.count()).select_from(waiting.limit(MAX_COPIES).subquery())).scalar_one()
    if number:
        text = f"{number} edited or chosen replies are not trained: only `sft`, `dpo` and `chord` train their groups, "
        yield "edits", text + "and `correction` what was written; set `algorithm`, or leave them stored"


EXTENSION = Extension(tables_of_sessions=(feedback,), findings=_findings)
