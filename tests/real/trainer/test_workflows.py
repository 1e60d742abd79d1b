import json
import os
import signal
import threading
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import load_file
from support import trainer_ledger
from support.killed_trainer import STAGES, dying
from support.ledger_samples import groups_by_status
from support.tiny_models import load_model, logprobs_of
from support.trainer_ledger import Rollouts, train
from support.waiting import wait_until

from trainer.algorithms.algorithm import loss_of
from trainer.main import run
from trainer.model import agent
from trainer.publish.checkpoint import Checkpoints
from trainer.workflows import OnPolicyWorkflow
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.features import rewinds
from turnwise.features.page import updates as page_updates
from turnwise.features.page.updates import list_updates
from turnwise.store import updates
from turnwise.store.schema import groups, turns
from turnwise.store.trainer_reports import trainer_statuses
from turnwise.store.versions import LOST, add_metrics, list_versions
from turnwise.version_directory import read_manifest, weights_digest

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """Raised where a process would be killed; no code may catch it."""


def settings_for(tmp_path, model, **changes):
    defaults = {"num_minibatches": 2, "total_batches": 2, "max_staleness": 10, "row_tokens": 64}
    return trainer_ledger.settings_for(tmp_path, model, **(defaults | changes))


def weights(tmp_path, version):
    return load_file(tmp_path / "policies" / f"v{version:06d}" / "model.safetensors")


def test_each_claimed_batch_becomes_one_published_version(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    state = train(settings_for(tmp_path, model))
    assert (state.progress.num_batches, state.progress.num_optimizer_steps, state.progress.policy_version) == (2, 4, 2)
    assert groups_by_status(ledger) == {"trained": 6}
    with ledger.read() as conn:
        published, _ = list_versions(conn)
        record = updates.last_update(conn)
        (newest, _), _ = page_updates.list_update_views(conn, "default")
    assert [policy.version for policy in published] == [2, 1, 0]
    assert published[-1].path == str(model)
    assert published[0].path == str(tmp_path / "policies" / "v000002")
    assert (record.update_id, record.policy_version, record.num_groups, record.num_sessions) == (2, 2, 3, 12)
    assert record.num_tokens == 12 * 2 * 4
    assert record.batch_digest is not None
    assert published[0].weights_digest == weights_digest(tmp_path / "policies" / "v000002")
    assert (newest.update, len(newest.groups), len(newest.sessions)) == (record, 3, 12)
    assert sum(sum(session.advantages.values()) for session in newest.sessions) == pytest.approx(0.0)


def test_a_version_is_published_from_memory_then_written_then_acknowledged(tmp_path, model, ledger, monkeypatch):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    seen = []
    write_directory, write_state = Checkpoints.write_policy, Checkpoints.write_state

    def look():
        with ledger.read() as conn:
            newest = list_versions(conn)[0][0]
            seen.append((newest.version, newest.is_written, updates.last_update(conn) is not None))

    def noted(write):
        def write_noted(*args):
            look()
            return write(*args)

        return write_noted

    monkeypatch.setattr(Checkpoints, "write_policy", noted(write_directory))
    monkeypatch.setattr(Checkpoints, "write_state", noted(write_state))
    train(settings_for(tmp_path, model, total_batches=1))
    look()
    assert seen == [(1, False, False), (1, True, False), (1, True, True)]


def test_a_trainer_whose_leases_ran_out_claims_other_groups_and_records_those_that_it_holds(tmp_path, model, ledger):
    """As after a stop of the process, or a jump of the database's clock, while no state contains the first batch."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    workflow = OnPolicyWorkflow.build_from_config(
        settings_for(tmp_path, model, checkpoint_every=2, wait_seconds=None), enable_jit=False
    )
    _, state = workflow.step(workflow.setup(0))
    with ledger.write() as connection:
        connection.execute(sa.update(groups).where(groups.c.status == "claimed").values(leased_until=1))
    workflow.learn(state)
    workflow.close()
    assert groups_by_status(ledger) == {"trained": 6}
    with ledger.read() as connection:
        views, _ = page_updates.list_update_views(connection, "default")
    assert [{session.group_id for session in view.sessions} for view in views] == [
        {"a-3", "a-4", "a-5"},
        {"a-0", "a-1", "a-2"},
    ]


def test_a_version_that_was_not_written_fails_at_the_restart_and_its_number_is_not_used_again(
    tmp_path, model, ledger, monkeypatch
):
    """Killed while it writes version 2, which engines may have: turns of it keep their number and its reason."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    die = Mock(side_effect=Killed)
    monkeypatch.setattr(*dying(STAGES["the policy's directory half written"], die))
    with pytest.raises(Killed):
        train(settings_for(tmp_path, model))
    train(settings_for(tmp_path, model))
    with ledger.read() as conn:
        found = {policy.version: policy for policy in list_versions(conn)[0]}
        made = [record.policy_version for record in list_updates(conn)[0]]
    assert (list(found), made) == ([3, 2, 1, 0], [3, 1])
    assert (found[2].status, found[2].error) == ("failed", LOST)


def test_a_batch_is_not_acknowledged_where_its_version_could_not_be_written(tmp_path, model, ledger, monkeypatch):
    """The thread's error ends the trainer: here the disk is full."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    monkeypatch.setattr(Checkpoints, "write_policy", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        train(settings_for(tmp_path, model, total_batches=1))
    with ledger.read() as conn:
        assert updates.last_update(conn) is None


def test_the_engines_directory_holds_only_model_files_and_two_manifests(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    train(settings_for(tmp_path, model, total_batches=1))
    directory = tmp_path / "policies" / "v000001"
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "lineage.json",
        "model.safetensors",
        "turnwise.json",
    }
    manifest = read_manifest(directory)
    assert (manifest["version"], manifest["parent"], manifest["kind"]) == (1, 0, "full")
    probe = manifest["probe"]
    for recorded, weights_of in ((probe, directory), (probe["base"], model)):
        expected = logprobs_of(load_model(weights_of), probe["token_ids"])
        np.testing.assert_allclose(recorded["logprobs"], expected.numpy(), atol=1e-5)
    assert (tmp_path / "policies" / "latest").read_text() == "v000001\n"


def test_a_run_continues_after_a_refused_batch_and_a_restart(tmp_path, model, ledger):
    """A refused batch leaves no checkpoint, and its number is not used again."""
    policy = load_model(model)
    Rollouts(ledger, policy, gap=0.5).play("a", num_groups=3)
    train(settings_for(tmp_path, model, total_batches=1))
    Rollouts(ledger, policy).play("b", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=2))
    assert (state.progress.num_batches, state.progress.policy_version) == (2, 1)


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {"7": 2.0}}


@pytest.mark.parametrize(
    "sampling", [{}, PENALTIES, {"top_k": 6} | PENALTIES], ids=["scaled", "penalised", "truncated"]
)
@pytest.mark.parametrize(
    "algorithm",
    ["grpo", {"name": "dpo", "reference": "behaviour"}, {"name": "grpo", "kl_coef": 0.1}],
    ids=["grpo", "dpo", "kl"],
)
def test_the_distribution_that_was_sampled_is_reproduced(tmp_path, model, ledger, algorithm, sampling):
    """On-policy tokens have no gap, and no KL from the same weights, because all logits are processed alike."""
    Rollouts(ledger, load_model(model), sampling={"temperature": 0.7} | sampling).play("a", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=1, num_minibatches=1, algorithm=algorithm))
    assert state.metrics["logprob_gap_max"] < 1e-5
    assert state.metrics["num_turns_left_out"] == 0
    if "kl" in state.metrics:
        assert abs(state.metrics["kl"]) < 1e-5


def test_a_token_without_a_support_is_left_out_and_the_others_of_its_turn_are_trained(tmp_path, model, ledger):
    """Of each turn's four tokens one is; the weights are finite, and the gap is that of the others."""
    Rollouts(ledger, load_model(model), sampling={"top_k": 6}, unknown=1).play("a", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=1))
    assert state.metrics["logprob_gap_max"] < 1e-5
    assert (state.metrics["num_tokens_sampled"], state.metrics["num_tokens_left_out_unknown_support"]) == (96, 24)
    assert (state.metrics["tokens"], state.metrics["trained_share"]) == (72, 0.75)
    assert state.metrics["num_turns_left_out"] == 0


def test_a_turn_without_loss_in_a_trained_group_is_counted_by_its_reason_and_not_recorded_as_trained(
    tmp_path, model, ledger
):
    """One turn was sampled greedily and one from a part of the distribution. Turns of refused groups are not counted.

    A group has four sessions of two turns of four tokens, or three such turns; one of the four groups is too long.
    """
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    Rollouts(ledger, load_model(model), num_turns=3).play("long", num_groups=1, seed=7)
    changed = {"a-0-0-t1": {"temperature": 0.0}, "a-1-2-t0": {"top_p": 0.9}}
    with ledger.write() as connection:
        for turn_id, sampling in changed.items():
            chosen = turns.c.turn_id == turn_id
            connection.execute(sa.update(turns).where(chosen).values(sampling=json.dumps(sampling)))
    state = train(settings_for(tmp_path, model, total_batches=1, groups_per_batch=4, max_chain_tokens=20))
    counted = {name: value for name, value in state.metrics.items() if name.startswith("num_turns_left_out")}
    assert counted == {"num_turns_left_out": 2, "num_turns_left_out_greedy": 1, "num_turns_left_out_top_p": 1}
    tokens = {name: value for name, value in state.metrics.items() if name.startswith("num_tokens_")}
    assert tokens == {
        "num_tokens_sampled": 3 * 32 + 48,
        "num_tokens_left_out_chain_too_long": 48,
        "num_tokens_left_out_greedy": 4,
        "num_tokens_left_out_top_p": 4,
    }
    assert state.metrics["trained_share"] == pytest.approx(88 / 144)
    assert state.metrics["tokens"] == 88
    with ledger.read() as connection:
        views, _ = page_updates.list_update_views(connection, "default")
    recorded = {turn_id for session in views[0].sessions for turn_id in session.advantages}
    sampled = {f"a-{group}-{run}-t{n}" for group in range(3) for run in range(4) for n in range(2)}
    assert recorded == sampled - set(changed)


def test_imitation_also_trains_turns_that_were_sampled_greedily_or_from_a_part_of_the_distribution(
    tmp_path, model, ledger
):
    """SFT forms no importance ratio. The loss of the whole batch by plain torch, of greedy turns at temperature 1."""
    policy = load_model(model)
    Rollouts(ledger, policy, num_turns=1).play("a", num_groups=3, group_size=1)
    with ledger.write() as connection:
        for turn_id, sampling in {"a-0-0-t0": {"temperature": 0.0}, "a-1-0-t0": {"top_p": 0.1}}.items():
            of_nucleus = np.zeros(4, np.float32).tobytes()
            changed = sa.update(turns).where(turns.c.turn_id == turn_id)
            connection.execute(changed.values(sampling=json.dumps(sampling), logprobs=of_nucleus))
    losses = []
    with ledger.read() as connection, torch.no_grad():
        for row in connection.execute(sa.select(turns)):
            prompt, reply = np.frombuffer(row.prompt_delta, np.int32), np.frombuffer(row.token_ids, np.int32)
            logits = policy(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
            losses += torch.nn.functional.cross_entropy(logits, torch.tensor(reply).long(), reduction="none").tolist()
    settings = settings_for(
        tmp_path, model, total_batches=1, num_minibatches=1, algorithm={"name": "sft", "min_reward": -1.0}
    )
    state = train(settings)
    assert len(losses) == 3 * 4 == state.metrics["tokens"]
    assert state.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert (state.metrics["num_turns_left_out"], state.metrics["num_gap_refused_groups"]) == (0, 0)
    assert state.metrics["logprob_gap_max"] < 1e-5
    assert groups_by_status(ledger) == {"trained": 3}


def test_groups_that_are_too_old_are_dropped(tmp_path, model, ledger):
    """With max_staleness 0, no token of version 0 is trained after version 1 is published."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=4)
    settings = settings_for(tmp_path, model, max_staleness=0, total_batches=1)
    train(settings)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)

    def stop_once_it_is_dropped():
        try:
            wait_until(lambda: groups_by_status(ledger).get("dropped"), "the group is dropped")
        finally:
            workflow.claims.stop()

    stopping = threading.Thread(target=stop_once_it_is_dropped)
    stopping.start()
    metrics, _ = workflow.step(state)
    stopping.join()
    workflow.close()
    assert metrics == {}
    assert groups_by_status(ledger) == {"trained": 3, "dropped": 1}


def test_a_signal_ends_the_run_and_leaves_no_claimed_group(tmp_path, model, ledger):
    before = signal.getsignal(signal.SIGTERM)

    def send_once_it_is_handled():
        wait_until(lambda: signal.getsignal(signal.SIGTERM) is not before, "the trainer handles the signal")
        os.kill(os.getpid(), signal.SIGTERM)

    sending = threading.Thread(target=send_once_it_is_handled)
    sending.start()
    assert run(settings_for(tmp_path, model)) == 0
    sending.join()
    assert groups_by_status(ledger) == {}
    assert last_report(ledger) == ("stopped", "stopped")


def last_report(ledger):
    with ledger.read() as conn:
        (status,) = trainer_statuses(conn)
    return status.state.value, status.text


def test_a_missing_trainer_state_is_refused_with_a_sentence(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, total_batches=1)
    train(settings)
    (tmp_path / "policies" / "v000001.trainer" / "state.pt").unlink()
    with pytest.raises(BadCheckpoint, match="version 1 has no trainer state"):
        train(settings)


def test_a_stop_between_two_states_writes_one_and_acknowledges_every_batch(tmp_path, model, ledger):
    """Three versions with a state each second one: the end of the run writes the state of the third."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    train(settings_for(tmp_path, model, groups_per_batch=1, total_batches=3, checkpoint_every=2, keep_versions=9))
    assert groups_by_status(ledger) == {"trained": 3}
    states = sorted(path.name for path in (tmp_path / "policies").glob("*.trainer"))
    assert states == ["v000002.trainer", "v000003.trainer"]


def test_a_refused_batch_behind_an_unwritten_state_is_acknowledged_with_it(tmp_path, model, ledger):
    """The second batch is refused while version 1 has no state: both are recorded in order at the end."""
    policy = load_model(model)
    Rollouts(ledger, policy).play("a", num_groups=3)
    Rollouts(ledger, policy, sampled=1, num_turns=1).play("b", num_groups=3, group_size=1)
    train(settings_for(tmp_path, model, checkpoint_every=3, kind_pattern=".*"))
    assert groups_by_status(ledger) == {"trained": 3, "dropped": 3}
    with ledger.read() as conn:
        assert [(one.update_id, one.policy_version) for one in list_updates(conn)[0]] == [(2, 1), (1, 1)]


def test_old_versions_are_deleted_but_never_one_in_use(tmp_path, model, ledger):
    """Version 4 is the newest, and engines may still be on its parent 3."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=4)
    train(settings_for(tmp_path, model, groups_per_batch=1, total_batches=4, keep_versions=1))
    left = {path.name for path in (tmp_path / "policies").glob("v*")}
    assert left == {"v000003", "v000003.trainer", "v000004", "v000004.trainer"}


def test_every_second_and_the_best_version_stay_on_disk(tmp_path, model, ledger):
    """Of versions 1 to 6, number 1 has the best evaluation, 2, 4 and 6 are even, and 5 and 6 are the newest."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    changes = {"groups_per_batch": 1, "keep_versions": 1, "keep_every": 2, "keep_best": 1}
    train(settings_for(tmp_path, model, total_batches=1, **changes))
    with ledger.write() as conn:
        add_metrics(conn, 1, {"eval": {"reward_mean": 0.75}})
    train(settings_for(tmp_path, model, total_batches=2, **changes))
    with ledger.write() as conn:
        add_metrics(conn, 2, {"eval": {"reward_mean": 0.5}})
    train(settings_for(tmp_path, model, total_batches=6, **changes))
    left = {path.name for path in (tmp_path / "policies").glob("v*[0-9]")}
    assert left == {f"v00000{version}" for version in (1, 2, 4, 5, 6)}


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_logged(tmp_path, model, ledger, monkeypatch):
    """The weights stay unchanged and the run continues; JSON has no NaN, so the line has null."""
    losses = iter([1.0, float("nan")])
    monkeypatch.setattr(agent, "loss_of", lambda tokens, chosen: loss_of(tokens, chosen) * next(losses))
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=1, row_tokens=1000))
    assert (state.progress.num_optimizer_steps, state.metrics["num_skipped_updates"]) == (2, 1)
    lines = [json.loads(line) for line in (tmp_path / "policies" / "trainer.jsonl").read_text().splitlines()]
    assert [line["grad_norm"] is None for line in lines] == [False, True, False]
    assert lines[1]["loss"] is None
    assert all(bool(torch.isfinite(value).all()) for value in weights(tmp_path, 1).values())
    with ledger.read() as conn:
        assert updates.last_update(conn).metrics["loss"] is None


def test_an_evaluation_follows_every_so_many_batches_and_is_recorded(tmp_path, model, ledger):
    class Exam:
        versions: ClassVar[list[int]] = []

        def evaluate(self, policy_version):
            self.versions.append(policy_version)
            return {"reward_mean": policy_version / 4}

    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, groups_per_batch=1, total_batches=3, evaluate_every=2)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    workflow.evaluation.evaluator = Exam()
    workflow.learn(workflow.setup(0))
    workflow.close()
    assert Exam.versions == [2, 3]
    lines = [json.loads(line) for line in (tmp_path / "policies" / "trainer.jsonl").read_text().splitlines()]
    found = [(line["step"], line["eval/reward_mean"]) for line in lines if "eval/reward_mean" in line]
    assert found == [(2, 0.5), (3, 0.75)]


def test_a_changed_learning_rate_takes_effect_after_a_restart_and_is_logged(tmp_path, model, ledger, caplog):
    """The saved optimizer state restores only the moments; rates and betas come from the settings."""
    caplog.set_level("INFO")
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    train(settings_for(tmp_path, model, total_batches=1))
    workflow = OnPolicyWorkflow.build_from_config(
        settings_for(tmp_path, model, learning_rate=1e-3, betas=(0.8, 0.9), num_warmup_updates=3), enable_jit=False
    )
    state = workflow.setup(0)
    workflow.close()
    group = state.optimizer.param_groups[0]
    # Two updates are done; the third of a warm-up of three has 3/4 of the rate.
    assert (group["lr"], group["betas"]) == (pytest.approx(1e-3 * 3 / 4), (0.8, 0.9))
    assert all(moments["step"] == 2 for moments in state.optimizer.state.values())
    assert "setting learning_rate changed from 0.003 to 0.001 and takes effect now" in caplog.text


def test_a_setting_that_the_weights_depend_on_cannot_change_within_a_run(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    train(settings_for(tmp_path, model, total_batches=1))
    workflow = OnPolicyWorkflow.build_from_config(settings_for(tmp_path, model, kind="lora"), enable_jit=False)
    with pytest.raises(SettingsError, match="kind was 'full' and is 'lora' now, but a run cannot change it"):
        workflow.setup(0)
    workflow.close()


def test_training_returns_to_a_pinned_version_with_when_pinned_set(tmp_path, model, ledger):
    """Version 3 is trained from the weights of the pinned version 1, also after a restart."""
    policy = load_model(model)
    Rollouts(ledger, policy).play("a", num_groups=6)
    changes = {"max_versions_in_flight": 1, "max_staleness": None, "when_pinned": "train_pinned", "keep_versions": 9}
    train(settings_for(tmp_path, model, **changes))
    with ledger.write() as conn:
        rewinds.pin_policy(conn, 1)
    Rollouts(ledger, policy).play("b", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=3, **changes))
    assert (state.progress.policy_version, state.progress.recent_versions) == (3, (0, 1, 3))
    assert read_manifest(tmp_path / "policies" / "v000003")["parent"] == 1
    assert groups_by_status(ledger) == {"trained": 9}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_training_goes_on_from_a_version_that_was_rolled_back_to_without_a_pin(tmp_path, model, ledger, is_restarted):
    """Version 4 is trained from version 1, and version 5 from 4, whether the trainer restarts in between or not."""
    policy = load_model(model)
    Rollouts(ledger, policy).play("a", num_groups=9)
    settings = settings_for(tmp_path, model, total_batches=None, keep_versions=9)

    def started():
        workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
        return workflow, workflow.setup(0)

    workflow, state = started()
    for batch in range(5):
        if batch == 3:
            with ledger.write() as conn:
                rewinds.choose_version(conn, 1, pin=False)
            Rollouts(ledger, policy).play("b", num_groups=6)
        if batch >= 3 and is_restarted:
            workflow.commits.flush(state)
            workflow.close()
            workflow, state = started()
        _, state = workflow.step(state)
    workflow.commits.flush(state)
    workflow.close()
    parents = [read_manifest(tmp_path / "policies" / f"v00000{version}")["parent"] for version in range(1, 6)]
    assert parents == [0, 1, 2, 1, 4]
    assert state.progress.recent_versions == (0, 1, 4, 5)
