"""Updates in a few numbers: rewards by task and name, and dropped groups, of one tenant."""

from __future__ import annotations

from support.ledger_samples import add_session, update_record

from turnwise.store import claims, experiences, rewards, selection, sessions
from turnwise.store.database import Database
from turnwise.store.updates import Mean, summarise_updates
from turnwise.types import Credit, Reward


def add_judged(database: Database, session_id: str, group_id: str, task_id: str, tenant: str, *values: float) -> None:
    """Store a finished session of a group of two with rewards `a`, `b` and so on."""
    add_session(database, session_id, tenant=tenant, group_id=group_id, group_size=2, task_id=task_id)
    lines = [
        Reward(session_id=session_id, tenant=tenant, value=value, name=name)
        for name, value in zip("ab", values, strict=False)
    ]
    with database.write() as connection:
        rewards.add_rewards(connection, lines)
        sessions.end_session(connection, tenant, session_id)


def test_an_update_has_the_mean_rewards_of_its_sessions_also_by_task_and_name(database: Database) -> None:
    add_judged(database, "s1", "g1", "t1", "mine", 1.0, 0.5)
    add_judged(database, "s2", "g1", "t1", "mine", 0.0)
    add_judged(database, "s3", "g2", "t2", "mine", 1.0)
    add_judged(database, "s4", "g2", "t2", "mine", 1.0)
    add_judged(database, "s5", "g3", "t1", "theirs", 9.0)
    add_judged(database, "s6", "g3", "t1", "theirs", 9.0)
    claimed = claims.claim(database, "t", max_groups=3, lease_seconds=60)
    assert claimed is not None
    update = update_record(4, policy_version=2, num_sessions=2, num_tokens=8, metrics={"kl": 0.5})
    with database.write() as connection:
        claims.ack(connection, claimed, update, refused={("mine", "g2"): "uniform_rewards"})
    with database.read() as connection:
        (mine,) = summarise_updates(connection, "mine")
        (nobodys,) = summarise_updates(connection, "nobody")
    assert (mine.update_id, mine.policy_version, mine.num_tokens, mine.metrics) == (4, 2, 8, {"kl": 0.5})
    # Rewards 1.5, 0, 1 and 1: their mean is 0.875.
    assert mine.reward == Mean(0.875, 4)
    assert mine.by_task == {"t1": Mean(0.75, 2), "t2": Mean(1.0, 2)}
    assert mine.by_name == {"a": Mean(0.75, 4), "b": Mean(0.5, 1)}
    assert mine.dropped == {"uniform_rewards": 1}
    assert (nobodys.reward, nobodys.by_task, nobodys.dropped, nobodys.metrics) == (None, {}, {}, {"kl": 0.5})


def test_the_newest_updates_are_listed_oldest_first(database: Database) -> None:
    for number in range(1, 4):
        add_judged(database, f"a{number}", f"g{number}", "t", "mine", 1.0)
        add_judged(database, f"b{number}", f"g{number}", "t", "mine", 0.0)
        claimed = claims.claim(database, "t", max_groups=1, lease_seconds=60)
        assert claimed is not None
        update = update_record(number, num_sessions=2, num_tokens=8)
        with database.write() as connection:
            claims.ack(connection, claimed, update)
    with database.read() as connection:
        assert [each.update_id for each in summarise_updates(connection, "mine", limit=2)] == [2, 3]


def test_a_session_has_the_credit_of_its_own_policy(database: Database) -> None:
    add_session(database, "s", turns=2, credit=Credit.STEP_WISE, gamma=0.5)
    with database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id="s", step=step, value=1.0) for step in (0, 1)])
    with database.read() as connection:
        credit = experiences.session_credit(connection, selection.session_row(connection, "default", "s").session_pk)
    assert credit is not None
    assert credit.turn_rewards == {"s-t1": 1.0, "s-t2": 1.0}
    # 1 + 0.5 * 1 = 1.5
    assert credit.turn_returns == {"s-t1": 1.5, "s-t2": 1.0}
