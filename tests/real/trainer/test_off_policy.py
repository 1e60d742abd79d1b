from __future__ import annotations

import numpy as np
from support.ledger_samples import add_session, finish
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for

from proxy.routes.summaries import summarise_updates
from trainer.claims.claims import Claims
from trainer.claims.ledger import Ledger, RunProgress
from trainer.replay import ReplayBuffer
from trainer.settings import TrainerSettings
from trainer.workflows import OffPolicyWorkflow
from turnwise.errors import StoreUnavailable
from turnwise.store import experiences, processes, retention, updates
from turnwise.store.schema import groups
from turnwise.store.selection import SessionFilter
from turnwise.types import name_digest


def workflow_for(tmp_path, model, **changes):
    defaults = {"groups_per_batch": 2, "buffer_groups": 4, "buffer_min_groups": 4, "learning_rate": 1e-6}
    return OffPolicyWorkflow.build_from_config(settings_for(tmp_path, model, **(defaults | changes)), enable_jit=False)


def test_the_buffer_warms_up_then_trains_and_evicts_the_oldest(tmp_path, model, ledger):
    """Capacity 4, batches of 2: two arrive (warm-up), two more (first update), two more push the first two out."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    workflow = workflow_for(tmp_path, model)
    buffer = workflow.replay_buffer
    state = workflow.setup(0)
    _, state = workflow.step(state)
    assert state.progress.num_optimizer_steps == 0
    assert not buffer.can_sample(state.buffer)
    _, state = workflow.step(state)
    assert state.progress.num_optimizer_steps == 1
    assert buffer.is_full(state.buffer)
    assert sum(entry.num_uses for entry in buffer.entries(state.buffer)) == 2
    _, state = workflow.step(state)
    assert [entry.arrived for entry in buffer.entries(state.buffer)] == [2, 3, 4, 5]
    assert state.progress.policy_version == 2
    # Of each sample: all but those of equal rewards.
    workflow.commits.finish_writing()
    last = last_update(ledger)
    assert last.num_groups == last.metrics["num_groups"] - last.metrics["num_refused_groups"] > 0
    workflow.close()


def test_the_buffer_survives_a_restart_also_before_the_first_checkpoint(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=4)
    first = workflow_for(tmp_path, model)
    _, state = first.step(first.setup(0))
    first.close()
    second = workflow_for(tmp_path, model)
    resumed = second.setup(0)
    assert resumed.buffer == state.buffer
    _, trained = second.step(resumed)
    assert trained.progress.policy_version == 1
    second.close()
    third = workflow_for(tmp_path, model)
    assert third.setup(0).buffer == trained.buffer
    third.close()


def test_the_buffer_is_in_no_update_that_tenants_read_and_a_deletion_reaches_it(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=2)
    workflow = workflow_for(tmp_path, model)
    _, state = workflow.step(workflow.setup(0))
    with ledger.read() as conn:
        (shown,), _ = updates.list_update_views(conn, "default")
        (batch,) = summarise_updates(conn, "default")
        claimed = conn.execute(groups.select()).all()
        kept = processes.kept_state(conn, 0)
    assert (
        shown.update.metrics
        == batch.metrics
        == {"num_buffered_groups": 2, "policy_version": 0, "num_refused_groups": 0}
    )
    assert tuple(kept["buffer"]) == state.buffer
    for group in claimed:
        assert group.group_id not in str(kept), "the buffer names a group"
    first = SessionFilter(tenant="default", group_id=claimed[0].group_id)
    retention.delete_all(ledger, lambda conn: retention.delete_sessions(conn, first))
    with ledger.read() as conn:
        left = processes.kept_state(conn, 0)["buffer"]
    assert [entry["group"] for entry in left] == [name_digest(("default", claimed[1].group_id))]
    workflow.close()


def test_a_sample_is_read_again_after_an_outage_of_the_database(tmp_path, model, ledger, monkeypatch):
    Rollouts(ledger, load_model(model)).play("a", num_groups=4)
    workflow = workflow_for(tmp_path, model, groups_per_batch=4)
    state = workflow.setup(0)
    read, num_reads = experiences.experiences_of_groups, 0

    def failing_once(*arguments, **named):
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:  # the first one reads the arrivals, the second one the sample
            raise StoreUnavailable("the database is down")
        return read(*arguments, **named)

    monkeypatch.setattr(experiences, "experiences_of_groups", failing_once)
    _, state = workflow.step(state)
    assert (state.progress.policy_version, num_reads) == (1, 3)
    workflow.close()


def last_update(ledger):
    with ledger.read() as conn:
        return updates.last_update(conn)


def buffer_json(priorities):
    return tuple(
        {"group_pk": pk, "group": str(pk), "arrived": pk, "num_uses": 0, "priority": priority}
        for pk, priority in enumerate(priorities)
    )


def draws(ledger, sampling, priorities, num_draws=400):
    buffer = ReplayBuffer(Ledger(ledger, TrainerSettings()), capacity=10, min_groups=1, sampling=sampling)
    rng = np.random.default_rng(0)
    drawn = [buffer.sample(buffer_json(priorities), 1, rng)[0][0] for _ in range(num_draws)]
    return np.bincount(drawn, minlength=len(priorities))


def test_each_sampling_mode_has_its_documented_distribution(ledger):
    """Uniform: equal. Recency: at a half-life of a quarter, the newest of 4 is 8 times as frequent.

    Of 400 draws, recency expects 400 * (1, 2, 4, 8) / 15 = 27, 53, 107, 213; three standard deviations are at most 30.
    """
    assert np.abs(draws(ledger, "uniform", [1.0] * 4) - 100).max() < 30
    assert np.abs(draws(ledger, "recency", [1.0] * 4) - [27, 53, 107, 213]).max() < 30
    assert draws(ledger, "priority", [0.0, 0.0, 1.0, 0.0])[2] > 380


def test_a_sample_holds_no_group_twice(ledger):
    buffer = ReplayBuffer(Ledger(ledger, TrainerSettings()), capacity=10, min_groups=1, sampling="uniform")
    drawn, after = buffer.sample(buffer_json([1.0] * 5), 9, np.random.default_rng(0))
    assert sorted(drawn) == [0, 1, 2, 3, 4]
    assert [entry.num_uses for entry in buffer.entries(after)] == [1] * 5


def test_a_group_that_has_the_number_of_a_deleted_group_is_not_sampled(tmp_path, model, ledger):
    """SQLite assigns the number of the newest group again after the group was deleted."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=2)
    workflow = workflow_for(tmp_path, model)
    _, state = workflow.step(workflow.setup(0))
    kept, deleted = state.buffer
    pks = [kept["group_pk"], deleted["group_pk"]]
    buffer = (kept, {**deleted, "group": name_digest(("default", "deleted"))})
    both = workflow.replay_buffer.read(state.buffer, pks)
    assert {name_digest(each.group_key) for each in both} == {kept["group"], deleted["group"]}
    found = workflow.replay_buffer.read(buffer, pks)
    assert {name_digest(each.group_key) for each in found} == {kept["group"]}
    workflow.close()


def test_a_group_is_not_sampled_for_the_group_of_another_tenant_with_the_same_name(database):
    """Zeta's group gets the number of acme's group after that is deleted."""
    for tenant in ("acme", "zeta"):
        add_session(database, "kim", tenant=tenant)
        finish(database, "kim", 1, tenant)
    rule = TrainerSettings(groups_per_batch=2, singles_per_group=1, wait_seconds=0.0)
    source = Claims(database, rule)
    buffer = ReplayBuffer(source, capacity=10, min_groups=1, sampling="uniform")
    batch = source.next(RunProgress(num_batches=1))
    of_group = {entry["group"]: entry for entry in buffer.add((), batch)}
    acme, zeta = (of_group[name_digest((tenant, "kim"))] for tenant in ("acme", "zeta"))
    zeta_pk = zeta["group_pk"]

    def sampled(stored):
        return [each.group_key for each in buffer.read(stored, [zeta_pk])]

    assert sampled((zeta,)) == [("zeta", "kim")]
    assert sampled(({**acme, "group_pk": zeta_pk},)) == []
