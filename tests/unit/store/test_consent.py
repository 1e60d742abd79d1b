"""Marks of sessions, users, keys and tenants: what they reach, what wins, and what no trainer sees any more."""

import dataclasses
from typing import Any

import pytest
from support.ledger_samples import add_finished, add_session, finish

from turnwise.errors import Conflict
from turnwise.features import consent, forks, retention, sentinels, training_note
from turnwise.features.consent import ConsentMark, ConsentOf
from turnwise.store import claims, experiences, selection, sessions
from turnwise.store.database import Database
from turnwise.types import Session

HOLDER = {"user": {"user_id": "kim"}, "key": {"key_id": "k1"}, "tenant": {}}


def mark(kind: str, name: str = "", tenant: str = "default", *, record: bool = True) -> ConsentMark:
    return ConsentMark(tenant=tenant, kind=ConsentOf(kind), name=name, record=record)


def apply(database: Database, wanted: ConsentMark) -> set[str]:
    """Put a mark and let it reach all sessions that there are; return their tenants and ids."""
    with database.write() as conn:
        consent.put_mark(conn, wanted)
    return restrict(database, consent.restrict_marked, wanted)


def restrict(database: Database, change: Any, *of: Any) -> set[str]:
    reached, after = [], 0
    while True:
        with database.write() as conn:
            found, after = change(conn, *of, after)
        if not found:
            assert len(reached) == len(set(reached))
            return {f"{tenant}/{session_id}" for tenant, session_id in reached}
        reached += found


def consent_of(database: Database, session_id: str, tenant: str = "default") -> tuple[bool, bool]:
    with database.read() as conn:
        session = sessions.read_session(conn, tenant, session_id)
    return session.train, session.record


@pytest.mark.parametrize("kind", ["user", "key", "tenant"])
def test_a_mark_reaches_the_sessions_that_there_are_and_new_ones_but_no_other_tenant(database, kind):
    [(_, name)] = HOLDER[kind].items() or [("", "")]
    own = HOLDER[kind]
    for tenant in ("default", "other"):
        add_session(database, "s", tenant=tenant, **own)
    add_session(database, "else", user_id="lee", key_id="k2")
    reached = {"default/s"} | ({"default/else"} if kind == "tenant" else set())
    assert apply(database, mark(kind, name)) == reached
    add_session(database, "new", **own)
    add_session(database, "new", tenant="other", **own)
    assert consent_of(database, "new") == (False, True)
    assert consent_of(database, "s", "other") == consent_of(database, "new", "other") == (True, True)
    assert consent_of(database, "else") == (kind != "tenant", True)
    with database.write() as conn:
        consent.lift_mark(conn, mark(kind, name))
    add_session(database, "later", **own)
    assert (consent_of(database, "later"), consent_of(database, "new")) == ((True, True), (False, True))


def test_the_strictest_of_session_user_key_and_tenant_wins_and_a_mark_only_becomes_stricter(database):
    apply(database, mark("user", "kim", record=False))
    apply(database, mark("user", "kim"))
    apply(database, mark("tenant"))
    add_session(database, "both", user_id="kim", train=True)
    add_session(database, "one")
    assert (consent_of(database, "both"), consent_of(database, "one")) == ((False, False), (False, True))
    with database.write() as conn, pytest.raises(Conflict, match="stays so"):
        sessions.change_session(conn, Session(session_id="one", train=True), {"train"})


def test_copies_and_sessions_that_continue_a_marked_one_are_marked_with_it_and_after_it(database):
    add_session(database, "s", turns=2)
    add_session(database, "s~2", continues="s")
    fork(database, "copy", "s-t2")
    fork(database, "deep", forks.copy_id(Session(session_id="copy"), "s-t1"))
    reached = restrict(database, consent.restrict_session, "default", "s", "s~", True)
    assert reached == {"default/s", "default/s~2", "default/copy", "default/deep"}
    fork(database, "late", "s-t1")
    add_session(database, "s~3", continues="s~2")
    assert consent_of(database, "late") == consent_of(database, "s~3") == (False, True)
    restrict(database, consent.restrict_session, "default", "copy", "copy~", False)
    assert (consent_of(database, "deep"), consent_of(database, "s")) == ((False, False), (False, True))


@pytest.mark.parametrize("record", [True, False])
def test_a_session_that_gets_a_marked_user_later_is_marked_with_its_copies(database, record):
    apply(database, mark("user", "kim", record=record))
    for name in ("open", "over"):
        add_session(database, name, turns=1)
    fork(database, "copy", "over-t1")
    finish(database, "over")
    with database.write() as conn:
        for name in ("open", "over"):
            changed = sessions.change_session(conn, Session(session_id=name, user_id="kim"), {"user_id"})
            assert (changed.train, changed.record) == (False, record)
    assert [consent_of(database, name) for name in ("open", "over", "copy")] == [(False, record)] * 3
    with database.read() as conn:
        assert claims.num_claimable(conn) == (0, 0)


def fork(database: Database, session_id: str, turn_id: str) -> None:
    session = Session(session_id=session_id)
    with database.write() as conn:
        path, _ = forks.read_path(conn, session, turn_id, before=False)
        forks.copy_turns(conn, session, path[0], path)


def test_a_marked_session_is_in_no_group_and_a_ready_one_leaves_the_claimable(database):
    add_finished(database, "ready", user_id="kim")
    add_finished(database, "denied", train=False)
    add_finished(database, "kept")
    with database.read() as conn:
        assert claims.num_claimable(conn) == (0, 2)
    apply(database, mark("user", "kim"))
    with database.read() as conn:
        assert claims.num_claimable(conn) == (0, 1)
        progress = training_note.progress_of(conn, sessions.read_session(conn, "default", "ready"))
    assert (progress.status, progress.reason) == ("dropped", "no_consent")


def test_of_a_claimed_group_the_sessions_without_a_mark_are_trained_and_the_lease_holds(database):
    for name in ("a", "b"):
        add_session(database, name, group_id="g", group_size=2, user_id=name)
        finish(database, name)
    held = claims.claim(database, "t", max_groups=1, lease_seconds=60)
    add_session(database, "a", tenant="other")
    apply(database, mark("user", "a"))
    with database.read() as conn:
        found = list(experiences.experiences_of_groups(conn, held.group_pks))
        assert [one.session_id for one in found] == ["b"]
        assert consent.denied_since(conn, {("default", "a"), ("default", "b"), ("other", "a")}) == {("default", "a")}
    apply(database, mark("tenant"))
    claims.renew(database, held, 60)
    with database.read() as conn:
        assert list(experiences.experiences_of_groups(conn, held.group_pks)) == []


def test_exports_and_the_regression_set_leave_marked_sessions_out_unless_they_are_asked_for(database):
    add_finished(database, "denied", train=False, metadata={"n": 1})
    add_finished(database, "kept")
    with database.read() as conn:
        for train, expected in ((True, ["kept"]), (False, ["denied"]), (None, ["denied", "kept"])):
            wanted = selection.SessionFilter(train=train)
            assert [one.session_id for one in experiences.experiences(conn, wanted)] == expected
        assert sentinels.live_sessions(conn, 9)[0].session_id == "kept"
        assert len(sentinels.live_sessions(conn, 9)) == 1


def test_a_tenants_marks_are_listed_in_pages_and_deleted_with_it(database):
    marks = [mark("key", "k1"), mark("tenant"), mark("user", "kim", record=False), mark("user", "lee")]
    for one in marks:
        apply(database, one)
    apply(database, mark("user", "kim", tenant="other"))
    with database.read() as conn:
        first, more = consent.list_marks(conn, "default", limit=2)
        rest, end = consent.list_marks(conn, "default", limit=9, after=("tenant", ""))
        assert consent.count_marks(conn, "default") == {"key": 1, "tenant": 1, "user": 2}
    stored = [
        dataclasses.replace(one, created_at=given.created_at) for one, given in zip(marks, first + rest, strict=True)
    ]
    assert (first + rest, more, end) == (stored, True, False)
    retention.delete_all(database, lambda conn: retention.delete_tenant(conn, "default"))
    with database.read() as conn:
        assert (consent.count_marks(conn, "default"), consent.count_marks(conn, None)) == ({}, {"user": 1})
