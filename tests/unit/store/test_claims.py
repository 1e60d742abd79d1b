"""Claim, lease, ack: a group is trained exactly once, also when trainers fail."""

import dataclasses
import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, finish, make_turn, update_record
from support.waiting import WAIT_SECONDS

from turnwise.errors import Conflict, LeaseLost, NotFound
from turnwise.features import retention, rewinds
from turnwise.features.page.updates import list_updates
from turnwise.store import claims, rows, schema, sessions, trainer_reports, turns, updates, versions
from turnwise.store.claims import Claim
from turnwise.store.database import Database
from turnwise.types import Outcome, PolicyVersion, Session, Turn, UpdateRecord, name_digest, utc_now

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
MINUTE = datetime.timedelta(minutes=1)


def add_ready(database: Database, *session_ids: str, **fields: Any) -> None:
    for session_id in session_ids:
        add_finished(database, session_id, **fields)


def claim(database: Database, trainer_id: str = "t", max_groups: int = 10, **options: Any) -> Claim:
    claimed = claims.claim(database, trainer_id, max_groups=max_groups, lease_seconds=60, **options)
    assert claimed is not None
    return claimed


def update(update_id: int = 1, trainer_id: str = "t") -> UpdateRecord:
    return update_record(update_id, trainer_id=trainer_id)


def ack(database: Database, claimed: Claim, record: UpdateRecord, **options: Any) -> bool:
    with database.write() as connection:
        return claims.ack(connection, claims.Finished(claimed, record, **options))


def group_rows(database: Database) -> dict[str, Any]:
    with database.read() as connection:
        return {row.group_id: row for row in connection.execute(sa.select(schema.groups))}


def leased_until(database: Database) -> datetime.datetime:
    return rows.from_micros(group_rows(database)["a"].leased_until)


def test_ready_groups_are_claimed_oldest_first_and_only_once(database):
    add_session(database, "unfinished")
    add_ready(database, "a", "b", "c", tenant="acme")
    first = claim(database, max_groups=2)
    assert [(group.group_id, group.tenant, group.fencing_token) for group in first.groups] == [
        ("a", "acme", 1),
        ("b", "acme", 1),
    ]
    assert [group.group_id for group in claim(database).groups] == ["c"]
    assert claims.claim(database, "t", max_groups=1, lease_seconds=60) is None


def test_a_group_with_an_expired_lease_can_be_claimed_with_the_next_fencing_token(database):
    add_ready(database, "a")
    first = claim(database, "slow", now=NOW)
    assert leased_until(database) == NOW + MINUTE
    assert claims.claim(database, "next", max_groups=1, lease_seconds=60, now=NOW + MINUTE / 2) is None
    second = claim(database, "next", now=NOW + MINUTE)
    assert second.groups[0].fencing_token == 2
    for act in (
        lambda: claims.renew(database, first, 60),
        lambda: claims.release(database, first),
        lambda: ack(database, first, update(trainer_id="slow")),
    ):
        with pytest.raises(LeaseLost, match="'a' is no longer held under fencing token 1"):
            act()
    assert ack(database, second, update(trainer_id="next"))


def test_a_late_ack_is_accepted_while_no_other_trainer_has_claimed_the_group(database):
    """The token decides, not the clock: finished work is not discarded without need."""
    add_ready(database, "a")
    claimed = claim(database, now=NOW - 10 * MINUTE)
    assert ack(database, claimed, update())


def test_what_a_trainer_holds_is_not_claimed_counted_or_dropped_for_it_after_its_lease(database):
    """As after a stop of the process, or a jump of the database's clock. Another trainer may claim it."""
    add_ready(database, "a", "b")
    held = claim(database, max_groups=1).group_pks
    with database.write() as connection:
        connection.execute(sa.update(schema.groups).where(schema.groups.c.group_pk.in_(held)).values(leased_until=1))
    with database.read() as connection:
        assert claims.num_claimable(connection, held=held) == (0, 1)
        assert claims.num_claimable(connection) == (0, 2)
    with database.write() as connection:
        rewinds.drop_sampled_by(connection, range(1), held=held).make(connection)
    add_ready(database, "c")
    too_old = {"max_groups": 10, "lease_seconds": 60, "min_policy_version": 1}
    assert claims.claim(database, "t", held=held, **too_old) is None
    statuses = {name: (row.status, row.reason) for name, row in group_rows(database).items()}
    assert statuses == {"a": ("claimed", None), "b": ("dropped", "undone"), "c": ("dropped", "stale")}
    assert claim(database, "other").group_pks == held


def test_leases_are_measured_by_the_databases_own_clock(database):
    add_ready(database, "a")
    claim(database)
    assert abs(leased_until(database) - MINUTE - utc_now()) < MINUTE / 2
    assert claims.claim(database, "next", max_groups=1, lease_seconds=60) is None


def test_a_lease_from_before_the_clock_was_set_back_is_void(database):
    """Otherwise no trainer could claim a dead trainer's groups until the clock has caught up."""
    add_ready(database, "a")
    dead = claim(database, now=NOW)
    almost = datetime.timedelta(seconds=claims.LONGEST_LEASE_SECONDS) - MINUTE
    assert claims.claim(database, "next", max_groups=1, lease_seconds=60, now=NOW - almost) is None
    again = claim(database, "next", now=NOW - almost - datetime.timedelta(seconds=1))
    assert again.groups[0].fencing_token == dead.groups[0].fencing_token + 1


def test_no_lease_is_longer_than_the_longest(database):
    add_ready(database, "a")
    claimed = claims.claim(database, "t", max_groups=1, lease_seconds=1e6, now=NOW)
    assert leased_until(database) == NOW + 60 * MINUTE
    claims.renew(database, claimed, 1e6, now=NOW + MINUTE)
    assert leased_until(database) == NOW + 61 * MINUTE


def test_an_update_shows_gauges_alone_and_what_a_trainer_keeps_lasts_until_a_version_holds_it(database):
    """Other tenants read updates. A deletion removes sessions and groups, which are named by digests, from the rest."""
    add_ready(database, "a", "b")
    add_ready(database, "c")
    digests = {name: name_digest(("default", name)) for name in "abc"}
    kept = {
        "buffer": [{"group": digests[name], "priority": 0.5} for name in "ac"],
        "singles": [["kind", "reward", digests[name], 1.0] for name in "ab"],
    }
    gauges = {"loss": 0.5, "num_groups": 3, "kl": None, "refused": "gap"}
    metrics = {**gauges, "buffer": [{"tenant": "t"}], "note": "a word"}
    claimed = claim(database)
    ack(database, claimed, dataclasses.replace(update(), metrics=metrics), state=kept)
    with database.read() as connection:
        (shown,), _ = list_updates(connection)
        assert shown.metrics == gauges
        assert trainer_reports.kept_state(connection, 0) == kept
    retention.delete_all(database, lambda connection: retention.delete_session(connection, "default", "a"))
    with database.read() as connection:
        left = trainer_reports.kept_state(connection, 0)
    assert left == {"buffer": kept["buffer"][1:], "singles": kept["singles"][1:]}
    add_ready(database, "d")
    claimed, made = claim(database), dataclasses.replace(update(), update_id=2, policy_version=2)
    ack(database, claimed, made, policy=PolicyVersion(version=2, path="/2"))
    with database.read() as connection:
        assert trainer_reports.kept_state(connection, 0) is None, "the checkpoint of the version holds it"


def test_an_ack_is_all_or_nothing(database):
    """The second group was lost: the first is not trained, the update not recorded, the policy not published."""
    add_ready(database, "a")
    add_ready(database, "b")
    claimed = claim(database)
    with database.write() as connection:
        connection.execute(sa.update(schema.groups).where(schema.groups.c.group_id == "b").values(fencing_token=7))
    with pytest.raises(LeaseLost, match="'b'"):
        ack(database, claimed, update(), policy=PolicyVersion(version=1, path="/1"))
    assert group_rows(database)["a"].status == "claimed"
    with database.read() as connection:
        assert updates.last_update(connection) is None
        with pytest.raises(NotFound):
            versions.get_version(connection, 1)


def test_a_deleted_group_stops_neither_the_lease_nor_the_update_of_the_others(database):
    """Its number may be that of a newer group, which a later claim of the same trainer holds."""
    add_ready(database, "a")
    add_ready(database, "b")
    claimed = claim(database)
    number = group_rows(database)["b"].group_pk
    with database.write() as connection:
        retention.delete_session(connection, "default", "b")
    add_ready(database, "c")
    is_c = schema.sessions.c.session_id == "c"
    with database.write() as connection:  # what SQLite does by itself
        connection.execute(sa.update(schema.sessions).where(is_c).values(group_pk=None))
        connection.execute(sa.update(schema.groups).where(schema.groups.c.group_id == "c").values(group_pk=number))
        connection.execute(sa.update(schema.sessions).where(is_c).values(group_pk=number))
    later = claim(database)
    assert [(group.group_pk, group.fencing_token) for group in later.groups] == [(number, 1)]
    claims.renew(database, claimed, 60)
    assert ack(database, claimed, update())
    assert {name: row.status for name, row in group_rows(database).items()} == {"a": "trained", "c": "claimed"}
    claims.release(database, later)
    assert group_rows(database)["c"].status == "ready"


def test_a_replayed_ack_writes_nothing_and_another_trainers_is_a_conflict(database):
    add_ready(database, "a")
    claimed = claim(database)
    assert ack(database, claimed, update())
    assert not ack(database, claimed, update())
    with pytest.raises(Conflict, match="update 1 was recorded by trainer 't'"):
        ack(database, claimed, update(trainer_id="other"))
    with pytest.raises(Conflict, match="as policy version 1"):
        ack(database, claimed, update_record(1, trainer_id="t", policy_version=7))


def test_a_claim_is_over_once_its_groups_were_acked_released_or_taken_back(database):
    """No other trainer has claimed them meanwhile, so the fencing token is the same."""
    add_ready(database, "acked", "released", "taken")
    acked, released, taken = (claim(database, max_groups=1) for _ in range(3))
    ack(database, acked, update())
    claims.release(database, released)
    claims.take_back(database, "t")
    for number, held in enumerate((acked, released, taken), 2):
        with pytest.raises(LeaseLost):
            ack(database, held, update(number))
    assert [row.update_id for row in group_rows(database).values()] == [1, None, None]


def test_a_trainer_reclaims_only_the_groups_of_its_own_dead_process(database):
    add_ready(database, "a", "b", "c")
    dead = claim(database, "t", max_groups=1)
    claim(database, "other", max_groups=1)
    with database.read() as connection:
        assert claims.num_claimable(connection) == (0, 1)
    assert claims.take_back(database, "t") == 1
    with database.read() as connection:
        assert claims.num_claimable(connection) == (0, 2)
    again = claim(database, "t")
    assert [(group.group_id, group.fencing_token) for group in again.groups] == [("a", 2), ("c", 1)]
    with pytest.raises(LeaseLost):
        ack(database, dead, update())


def test_groups_with_a_trainable_turn_that_is_too_old_are_dropped_as_stale(database):
    for session_id, sampled_by in (("old", (3, 1)), ("new", (2, 3)), ("old_error", (2,)), ("no_turns", ())):
        with database.write() as connection:
            sessions.create_session(connection, Session(session_id=session_id))
            for n, version in enumerate(sampled_by, 1):
                turn = make_turn(f"t{n}", session_id=session_id, policy_version_first=version)
                turns.append_turns(connection, [_named(turn, f"{session_id}-{n}")])
            failed = make_turn("t9", session_id=session_id, policy_version_first=0, outcome=Outcome.ERROR)
            turns.append_turns(connection, [_named(failed, f"{session_id}-9")])
        finish(database, session_id)
    for session_id, version in (("newer", 3), ("older", 1)):
        add_session(database, session_id, turns=0, group_id="pair", group_size=2)
        with database.write() as connection:
            turn = make_turn("t1", session_id=session_id, policy_version_first=version)
            turns.append_turns(connection, [_named(turn, f"{session_id}-1")])
        finish(database, session_id)
    claimed = claim(database, min_policy_version=2)
    assert [group.group_id for group in claimed.groups] == ["new", "old_error", "no_turns"]
    assert claimed.num_stale == 2
    for stale in (group_rows(database)[name] for name in ("old", "pair")):
        assert (stale.status, stale.reason) == ("dropped", "stale")


def _named(turn: Turn, turn_id: str) -> Turn:
    return dataclasses.replace(turn, turn_id=turn_id, chain_id=turn_id)


def test_trainers_that_claim_at_once_share_the_groups_without_overlap(database, database_url):
    """Each trainer has its own connections, as separate processes have; every group is acked once."""
    names = [f"s{n}" for n in range(24)]
    add_ready(database, *names, turns=0)
    barrier = threading.Barrier(4)
    claimed: list[str] = []

    def train(worker: int) -> None:
        own = Database(database_url, pool_size=1, lock_timeout_seconds=WAIT_SECONDS)
        barrier.wait(WAIT_SECONDS)
        number = worker * 100
        deadline = time.monotonic() + WAIT_SECONDS
        # PostgreSQL skips rows that another trainer has locked, so an empty answer is not the end.
        while len(claimed) < len(names):
            assert time.monotonic() < deadline, f"only {len(claimed)} groups were trained"
            batch = claims.claim(own, f"trainer-{worker}", max_groups=2, lease_seconds=60)
            if batch is not None:
                number += 1
                ack(own, batch, update(number, f"trainer-{worker}"))
                claimed.extend(group.group_id for group in batch.groups)
        own.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4), timeout=WAIT_SECONDS))
    assert sorted(claimed) == sorted(names)
    assert {row.status for row in group_rows(database).values()} == {"trained"}
    assert {row.fencing_token for row in group_rows(database).values()} == {1}
