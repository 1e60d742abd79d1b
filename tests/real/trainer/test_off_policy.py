import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.algorithms import algorithm, close
from support.experience_factory import experience
from support.ledger_samples import add_finished
from support.tiny_models import load_model, logprobs_of
from support.trainer_ledger import Rollouts, settings_for, store_imported, train
from torch import tensor

from proxy.features.page.summaries import summarise_updates
from trainer.algorithms.algorithm import loss_of
from trainer.algorithms.chord import phi
from trainer.batch.batch import build, minibatches, pack
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Mixed
from trainer.claims.claims import Claims
from trainer.claims.ledger import Ledger, RunProgress
from trainer.features import Settings, imported
from trainer.features.replay import Entry, ReplayBuffer, read_buffer
from trainer.workflows import OffPolicyWorkflow
from turnwise.errors import StoreUnavailable
from turnwise.features import retention
from turnwise.features.imported import imported_groups
from turnwise.features.page import updates as page_updates
from turnwise.store import claims, experiences, schema, trainer_reports, updates
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import name_digest


def workflow_for(tmp_path, model, **changes):
    defaults = {"groups_per_batch": 2, "buffer_groups": 4, "buffer_min_groups": 4, "learning_rate": 1e-6}
    return OffPolicyWorkflow.build_from_config(settings_for(tmp_path, model, **(defaults | changes)), enable_jit=False)


def held(state):
    return read_buffer(state.kept)


def test_the_buffer_warms_up_then_trains_and_evicts_the_oldest(tmp_path, model, ledger):
    """Capacity 4, batches of 2: two arrive (warm-up), two more (first update), two more push the first two out."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    workflow = workflow_for(tmp_path, model)
    buffer = workflow.replay_buffer
    state = workflow.setup(0)
    _, state = workflow.step(state)
    assert state.progress.num_optimizer_steps == 0
    assert not buffer.can_sample(held(state))
    _, state = workflow.step(state)
    assert state.progress.num_optimizer_steps == 1
    assert len(held(state)) == 4
    assert sum(entry.num_uses for entry in held(state)) == 2
    _, state = workflow.step(state)
    assert [entry.arrived for entry in held(state)] == [2, 3, 4, 5]
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
    assert held(resumed) == held(state)
    _, trained = second.step(resumed)
    assert trained.progress.policy_version == 1
    second.close()
    third = workflow_for(tmp_path, model)
    assert held(third.setup(0)) == held(trained)
    third.close()


def test_the_buffer_is_in_no_update_that_tenants_read_and_a_deletion_reaches_it(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=2)
    workflow = workflow_for(tmp_path, model)
    _, state = workflow.step(workflow.setup(0))
    with ledger.read() as conn:
        (shown,), _ = page_updates.list_update_views(conn, "default")
        (batch,) = summarise_updates(conn, "default")
        claimed = conn.execute(schema.groups.select()).all()
        kept = trainer_reports.kept_state(conn, 0)
    assert (
        shown.update.metrics
        == batch.metrics
        == {"num_buffered_groups": 2, "policy_version": 0, "num_refused_groups": 0}
    )
    assert [Entry(**one) for one in kept["buffer"]] == list(held(state))
    for group in claimed:
        assert group.group_id not in str(kept), "the buffer names a group"
    first = SessionFilter(tenant="default", group_id=claimed[0].group_id)
    retention.delete_all(ledger, lambda conn: retention.delete_sessions(conn, first))
    with ledger.read() as conn:
        left = trainer_reports.kept_state(conn, 0)["buffer"]
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


def entries(priorities):
    return tuple(
        Entry(group_pk=pk, group=str(pk), arrived=pk, priority=priority) for pk, priority in enumerate(priorities)
    )


def draws(ledger, sampling, priorities):
    settings = Settings(buffer_sampling=sampling)
    buffer = ReplayBuffer(Ledger(ledger, settings), settings)
    rng = np.random.default_rng(0)
    drawn = [buffer.sample(entries(priorities), 1, rng)[0][0] for _ in range(400)]
    return np.bincount(drawn, minlength=len(priorities))


def test_each_sampling_mode_has_its_documented_distribution(ledger):
    """Uniform: equal. Recency: at a half-life of a quarter, the newest of 4 is 8 times as frequent.

    Of 400 draws, recency expects 400 * (1, 2, 4, 8) / 15 = 27, 53, 107, 213; three standard deviations are at most 30.
    """
    assert np.abs(draws(ledger, "uniform", [1.0] * 4) - 100).max() < 30
    assert np.abs(draws(ledger, "recency", [1.0] * 4) - [27, 53, 107, 213]).max() < 30
    assert draws(ledger, "priority", [0.0, 0.0, 1.0, 0.0])[2] > 380


def test_a_sample_holds_no_group_twice(ledger):
    buffer = ReplayBuffer(Ledger(ledger, Settings()), Settings())
    drawn, after = buffer.sample(entries([1.0] * 5), 9, np.random.default_rng(0))
    assert sorted(drawn) == [0, 1, 2, 3, 4]
    assert [entry.num_uses for entry in after] == [1] * 5


def test_a_group_that_has_the_number_of_a_deleted_group_is_not_sampled(tmp_path, model, ledger):
    """SQLite assigns the number of the newest group again after the group was deleted."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=2)
    workflow = workflow_for(tmp_path, model)
    _, state = workflow.step(workflow.setup(0))
    kept, deleted = held(state)
    pks = [kept.group_pk, deleted.group_pk]
    buffer = (kept, dataclasses.replace(deleted, group=name_digest(("default", "deleted"))))
    both = workflow.replay_buffer.read(held(state), pks)
    assert {name_digest(each.group_key) for each in both} == {kept.group, deleted.group}
    found = workflow.replay_buffer.read(buffer, pks)
    assert {name_digest(each.group_key) for each in found} == {kept.group}
    workflow.close()


def test_a_group_is_not_sampled_for_the_group_of_another_tenant_with_the_same_name(database):
    """Zeta's group gets the number of acme's group after that is deleted."""
    for tenant in ("acme", "zeta"):
        add_finished(database, "kim", tenant=tenant, value=1)
    rule = Settings(groups_per_batch=2, singles_per_group=1, wait_seconds=0.0)
    source = Claims(database, rule)
    buffer = ReplayBuffer(source, rule)
    batch = source.next(RunProgress(num_batches=1))
    of_group = {entry.group: entry for entry in buffer.add((), batch)}
    acme, zeta = (of_group[name_digest((tenant, "kim"))] for tenant in ("acme", "zeta"))
    zeta_pk = zeta.group_pk

    def sampled(stored):
        return [each.group_key for each in buffer.read(stored, [zeta_pk])]

    assert sampled((zeta,)) == [("zeta", "kim")]
    assert sampled((dataclasses.replace(acme, group_pk=zeta_pk),)) == []


LN2 = math.log(2.0)
PROMPT = [7, 8, 9]
WANTED, OTHER = [40, 41, 42], [43, 44, 45]
"""Replies that an untrained model samples with a probability of about 1e-5."""


def test_mu_falls_as_half_a_cosine_by_hand():
    """Two batches from 0.85 down to 0.05: 0.85, 0.05 + 0.8 · (1 + cos π/2) / 2 = 0.45, then 0.05."""
    share = algorithm("chord", mu=0.85, decay_batches=2).share
    close([share(number) for number in range(4)], [0.85, 0.45, 0.05, 0.05])
    constant = algorithm("chord", mu=0.3).share
    close([constant(number) for number in (0, 1000)], [0.3, 0.3])


def test_phi_weighs_uncertain_tokens_most_and_carries_no_gradient_by_hand():
    """p = 0.5: 0.25, p = 0.9: 0.09, p = 0.1: 0.09. The gradient of −φ log p is −φ."""
    logprobs = tensor([0.5, 0.9, 0.1]).log().requires_grad_()
    close(phi(logprobs), [0.25, 0.09, 0.09])
    (phi(logprobs) * -logprobs).sum().backward()
    close(logprobs.grad, [-0.25, -0.09, -0.09])


def test_the_loss_of_a_step_is_the_weighted_sum_of_both_means_by_hand():
    """μ = 0.2; a sampled session of two tokens, two imported ones of two tokens with p = 1/2 each.

    Weights: 0.8 / 2 = 0.4 for sampled tokens, 0.2 / 4 = 0.05 for imported ones. Ratios of 1 with A = 1:
    0.4 · −2 = −0.8.
    SFT: 4 · 0.05 · ln 2 = 0.2 ln 2; with φ = 1/4 a quarter of that.
    """
    sessions = [experience(session_id=name) for name in ("a", "i", "j")]
    batch = build(sessions, [np.ones(1)] * 3, policy_version=0, mixed=Mixed(1, 0.2))
    chord = algorithm("chord")
    weights = chord.weights(batch, [0, 1, 2])
    close(weights, [0.4, 0.4, 0.05, 0.05, 0.05, 0.05])
    close(chord.weights(batch, [0]), [0.5, 0.5, 0, 0, 0, 0])
    tokens = TrainedTokens(
        logprobs=tensor([-1.0, -2.0, *[-LN2] * 4]),
        entropy=torch.zeros(6),
        behaviour=tensor([-1.0, -2.0, 0.0, 0.0, 0.0, 0.0]),
        advantages=torch.ones(6),
        weights=torch.from_numpy(weights),
        sequence=tensor([0, 0, 1, 1, 2, 2]),
    )
    (sampled, _), (imported, own) = chord.parts(tokens, batch, *pack(batch, range(3), 64))
    close(loss_of(sampled, chord), -0.8)
    close(loss_of(imported, own), 0.2 * LN2)
    close(loss_of(imported, algorithm("chord", imitation="phi").imitation), 0.05 * LN2)


def test_a_row_of_imported_tokens_alone_has_no_policy_loss():
    """No algorithm sees a row without tokens: it may count chains by the largest index."""
    tokens = TrainedTokens(
        logprobs=torch.zeros(2, requires_grad=True),
        **dict.fromkeys(("entropy", "behaviour", "advantages", "weights"), torch.ones(2)),
        sequence=tensor([0, 0]),
    )
    batch = build([experience()], [np.ones(1)], policy_version=0, mixed=Mixed(0, 0.2))
    (sampled, _), _ = algorithm("chord").parts(tokens, batch, *pack(batch, [0], 64))
    for name in ("grpo", "gspo", "topr", "cispo"):
        assert loss_of(sampled, algorithm(name, off_policy_mask=0.1)).item() == 0.0


def test_each_optimizer_step_gets_its_share_of_both():
    """Four sampled and two imported groups in two steps: two and one in each."""
    sessions = [experience(session_id=name, group_id=name) for name in ("a", "b", "c", "d", "i", "j")]
    batch = build(sessions, [np.ones(1)] * 6, policy_version=0, mixed=Mixed(4, 0.2))
    steps = list(minibatches(batch, 2, np.random.default_rng(0)))
    assert [sum(member >= 4 for member in step) for step in steps] == [1, 1]
    assert sorted(member for step in steps for member in step) == list(range(6))


def played(tmp_path: Path, model: Path, *, group_size: int = 4, **changes) -> tuple[Database, object]:
    """Return a ledger with groups of sampled sessions and pairs of imported ones, and a trainer's settings."""
    tmp_path.mkdir(exist_ok=True)
    database = Database(f"sqlite:///{tmp_path / 'ledger.db'}")
    database.upgrade()
    Rollouts(database, load_model(model)).play("a", num_groups=2, group_size=group_size)
    for number in range(2):
        store_imported(database, f"pair-{number}", PROMPT, {1.0: WANTED, 0.0: OTHER})
    return database, settings_for(tmp_path, model, **({"groups_per_batch": 2, "total_batches": 1} | changes))


def logprob(directory: Path, reply: list[int]) -> float:
    return float(logprobs_of(load_model(directory), PROMPT + reply)[-len(reply) :].sum())


@pytest.mark.parametrize("loss", [{}, {"imitation": "phi", "mu": 0.9}])
def test_imported_replies_are_imitated_beside_the_policy_loss(tmp_path, model, loss):
    """The better reply of each pair gains; the update records its session, and its group stays for later batches."""
    database, settings = played(tmp_path, model, reuse_epochs=4, algorithm={"name": "chord", **loss})
    state = train(settings)
    assert (state.metrics["num_imported_sessions"], state.metrics["num_sessions"]) == (2, 2 * 4 + 2)
    assert state.metrics["imported_tokens"] == 4 * 2 * len(WANTED)
    assert logprob(tmp_path / "policies" / "v000001", WANTED) > logprob(model, WANTED) + 0.01
    with database.read() as conn:
        assert (claims.num_claimable(conn), claims.num_claimable(conn, with_imported=True)) == ((0, 0), (2, 0))
        pairs = list(
            experiences.experiences_of_groups(
                conn, imported_groups(conn), experiences.Shape(merge="chain", with_imported=True)
            )
        )
    assert [[update.update_id for update in one.trained_in] for one in pairs] == [[1], [], [1], []]
    database.close()


def test_imported_pairs_are_preferred_beside_the_policy_loss(tmp_path, model):
    database, settings = played(
        tmp_path, model, reuse_epochs=4, algorithm={"name": "chord", "imitation": "dpo", "mu": 0.5}
    )
    database.close()
    assert train(settings).metrics["num_imported_sessions"] == 4
    newest = tmp_path / "policies" / "v000001"
    before = logprob(model, WANTED) - logprob(model, OTHER)
    assert logprob(newest, WANTED) - logprob(newest, OTHER) > before + 0.05


def test_imported_sessions_are_trained_while_no_reward_differs(tmp_path, model):
    """As at the start of a hard task: groups without an advantage are dropped, and the update imitates, in one step."""
    changes = {"kind_pattern": ".*", "num_minibatches": 2}  # each task's session is of a kind of its own
    database, settings = played(tmp_path, model, group_size=1, algorithm="chord", **changes)
    database.close()
    metrics = train(settings).metrics
    assert metrics["num_updates"] == 1
    assert (metrics["num_refused_groups"], metrics["num_sessions"], metrics["tokens"]) == (2, 2, 0)
    assert logprob(tmp_path / "policies" / "v000001", WANTED) > logprob(model, WANTED)


def test_a_run_with_imported_sessions_resumes_bit_for_bit(tmp_path, model, monkeypatch):
    """Two batches at once, or one and then one after a restart; one imported group of two is drawn for each."""
    monkeypatch.setattr(imported, "NUM_GROUPS", 1)
    changes = {"algorithm": "chord", "groups_per_batch": 1}
    database, settings = played(tmp_path / "whole", model, total_batches=2, **changes)
    database.close()
    whole = train(settings)
    database, settings = played(tmp_path / "parts", model, total_batches=1, **changes)
    database.close()
    train(settings)
    resumed = train(settings.model_copy(update={"total_batches": 2}))
    expected, found = whole.tensors()["model"], resumed.tensors()["model"]
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert dataclasses.asdict(whole.progress) == dataclasses.asdict(resumed.progress)
