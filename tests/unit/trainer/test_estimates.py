"""Which sessions a version is estimated from, which are kept for that, and what is said of a version."""

import dataclasses
import math

import numpy as np
import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, groups_by_status, make_turn, update_record

from trainer.claims.claims import Claims
from trainer.claims.ledger import ClaimedBatch, RunProgress
from trainer.features import FEATURES, Settings
from trainer.features.estimates import why_worse
from turnwise.features import estimates
from turnwise.features.estimates import (
    ESTIMATE,
    Logged,
    candidates,
    estimate,
    in_words,
    is_certainly_as_good,
    nothing,
)
from turnwise.features.labels import Label, set_label
from turnwise.features.statistics.off_policy import Surprise
from turnwise.store import rows, schema
from turnwise.store.turns import append_turns
from turnwise.store.updates import record_trained
from turnwise.types import IMPORT, Outcome, Split

NOW = RunProgress(num_batches=1)


def test_only_sessions_that_trained_nothing_and_were_not_chosen_by_their_rewards_count(database):
    for name in ("trained", "waits", "dropped", "kept"):
        add_finished(database, name)
    add_finished(database, "evaluated", split=Split.EVAL, agent="codex")
    add_finished(database, "imported", split=Split.EVAL, opened_by=IMPORT)
    add_finished(database, "denied", split=Split.EVAL, train=False)
    add_session(database, "open", split=Split.EVAL)
    with database.write() as conn:
        record_trained(conn, update_record(1), {("default", "trained"): {"trained-t1": 1.0}})
        for name, reason in {"dropped": "uniform", "kept": estimates.KEPT}.items():
            changed = sa.update(schema.groups).where(schema.groups.c.group_id == name)
            conn.execute(changed.values(status="dropped", reason=reason))
        set_label(conn, "default", "kept", Label(label="golden"))
        lost = make_turn("t9", session_id="waits", outcome=Outcome.ABORTED)
        append_turns(conn, [lost])
    with database.read() as conn:
        found = candidates(conn, 9)
        (newest,) = candidates(conn, 1).experiences
        older = candidates(conn, 9, before=candidates(conn, 1).oldest)
    assert [name for _, name in found.experiences] == ["evaluated", "kept", "waits"]
    assert newest == ("default", "evaluated")
    assert [name for _, name in older.experiences] == ["kept", "waits"]
    assert found.unread == {("default", "waits"): 1}
    assert found.slices["default", "kept"] == {"label": ["golden"], "harness": []}
    assert found.slices["default", "evaluated"]["harness"] == ["codex"]


@pytest.mark.parametrize(("num_trained", "share"), [(499, 0.5), (500, 0.5), (500, 0.0)])
def test_a_share_of_the_single_sessions_is_kept_once_a_policy_has_trained_500(database, num_trained, share):
    """They are the same ones at each look, and groups are not concerned."""
    with database.write() as conn:
        conn.execute(sa.insert(schema.updates).values(**rows.UPDATES.row(update_record(1, num_sessions=num_trained))))
    for number in range(40):
        add_finished(database, f"s{number}")
    for run in range(2):
        add_finished(database, f"g{run}", group_id="g", group_size=2)
    source = Claims(database, Settings(groups_per_batch=1, singles_per_group=1, kept_share=share), holds=FEATURES.holds)
    batch = source.next(NOW)
    assert isinstance(batch, ClaimedBatch)
    dropped = groups_by_status(database).get("dropped", 0)
    assert (10 < dropped < 30) if num_trained == 500 and share else dropped == 0
    with database.read() as conn:
        waiting = candidates(conn, 99).experiences
        reasons = set(conn.scalars(sa.select(schema.groups.c.reason).where(schema.groups.c.status == "dropped")))
    assert reasons <= {estimates.KEPT}
    assert len(waiting) == 41, "of 41 groups one is claimed"
    source.close()


def logged(num=120, *, step=0.1, tenant="default", **fields):
    """Sessions of ten choices, good ones more likely by e^step now; a reward of 1 for more than five good ones."""
    rng = np.random.default_rng(0)
    good = rng.binomial(10, 0.5, num)
    up, down = step, math.log(2 - math.exp(step))
    return [
        Logged(
            log_weight=up * each + down * (10 - each),
            reward=float(each > 5),
            cluster=number,
            version=3,
            tenant=tenant,
            **fields,
        )
        for number, each in enumerate(good.tolist())
    ]


def test_a_version_that_does_more_of_what_was_rewarded_is_estimated_to_gain():
    """P(more than 5 of 10) is 0.377 at 0.5 and 0.511 at 0.5 e^0.1."""
    found = estimate(logged(300, slices={"label": ["golden"]}), {"greedy": 2})
    assert found["low"] < 0.134 < found["high"]
    assert found["reason"] is None
    assert found["versions"] == {"3": 300}
    assert [(each["by"], each["value"]) for each in found["slices"]] == [("label", "golden"), ("version", "3")]
    words = in_words(found)
    assert words.startswith(f"mean reward {found['change']:+.3f} [")
    assert words.endswith("; 2 turns have no known probability, and their sessions are left out")
    assert why_worse(found) is None


def test_a_version_that_does_less_of_it_is_not_served():
    found = estimate(logged(300, step=-0.1), {})
    assert found["high"] < 0
    assert why_worse(found).startswith("estimated: mean reward -0.")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (logged(60), "60 sessions can be compared, and 100 are needed"),
        (logged(step=0.5), "it has moved too far to tell; try it on some sessions (canary); "),
        ([each for each in logged(300) if each.log_weight > 0], "the mean weight is "),
        ([dataclasses.replace(each, surprise=Surprise(1.0, 1.0)) for each in logged()], "(11.0 standard errors)"),
    ],
    ids=["few", "far", "wrong propensity", "unknown temperature"],
)
def test_no_number_is_said_where_none_can_be_known(found, words):
    said = estimate(found, {})
    assert (said["change"], said["low"], said["high"]) == (None, None, None)
    assert words in said["reason"]
    assert in_words(said) == said["reason"]
    assert said["is_off"] is words.startswith(("the mean weight", "(11.0"))
    assert why_worse(said) is None


def test_a_tenant_reads_no_labels_of_another_ones_sessions():
    of = {"slices": {"label": ["secret"], "harness": ["codex"]}}
    found = estimate([*logged(100, **of), *logged(100, tenant="other", **of)], {})
    assert [each["by"] for each in found["slices"]] == ["version"]


def test_only_sessions_of_the_served_version_say_that_a_version_is_as_good():
    found = {ESTIMATE: estimate(logged(300), {})}
    assert is_certainly_as_good(found, served=3, drop=0.1)
    assert not is_certainly_as_good(found, served=4, drop=0.1)
    assert not is_certainly_as_good({ESTIMATE: estimate(logged(300, step=-0.1), {})}, served=3, drop=0.1)
    assert not is_certainly_as_good({ESTIMATE: nothing("3 sessions")}, served=3, drop=0.1)
    assert not is_certainly_as_good({}, served=3, drop=0.1)


def test_sessions_of_one_task_count_as_one():
    alone = logged(200)
    together = [dataclasses.replace(each, cluster=number // 50) for number, each in enumerate(alone)]
    widths = [found["high"] - found["low"] for found in (estimate(alone, {}), estimate(together, {}))]
    assert widths[0] < widths[1]
