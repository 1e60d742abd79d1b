"""Several policies in one trainer: adapters of one model in memory."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support import trainer_ledger
from support.commands import invoke
from support.ledger_samples import groups_by_status
from support.migrated import new_database
from support.tiny_models import VOCABULARY, load_model
from support.trainer_ledger import GOOD, Rollouts, new_policy, train, train_policies
from transformers import AutoModelForCausalLM

from trainer.features import policies as trained_policies
from trainer.update import Updates
from turnwise.errors import Conflict, EngineDisagrees
from turnwise.features import policies
from turnwise.features.page import updates as page_updates
from turnwise.features.page.updates import list_updates
from turnwise.store import serving, sessions, versions
from turnwise.store.rewards import add_rewards
from turnwise.store.trainer_reports import TrainerState, trainer_statuses
from turnwise.store.turns import append_turns
from turnwise.types import DEFAULT_POLICY, Reward, Session, Turn
from turnwise.version_directory import read_manifest


def settings_for(directory, model, **changes):
    defaults = {"kind": "lora", "lora_rank": 4, "learning_rate": 1e-2, "num_minibatches": 2, "total_batches": 2}
    return trainer_ledger.settings_for(directory, model, max_staleness=10, **(defaults | changes))


def play(db, model, policy_id, *, num_groups=6, **options):
    rollouts = Rollouts(db, load_model(model), policy_id=policy_id, **options)
    rollouts.play(f"of {policy_id}", num_groups=num_groups, seed=policy_id)


def updates(db):
    with db.read() as conn:
        return [(each.policy_id, each.policy_version) for each in reversed(list_updates(conn)[0])]


def adapter(db, version):
    with db.read() as conn:
        return load_file(Path(versions.get_version(conn, version).path, "adapter_model.safetensors"))


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reports(db):
    with db.read() as conn:
        return {each.trainer_id: (each.state, each.text) for each in trainer_statuses(conn)}


def play_together(db, model, other, *, stored):
    """Play six groups of four sessions: the policy of the session in each, another one in the first three of a group.

    Only the turns of the policies in `stored` are stored, and only sessions with one of those. The rewards are those of
    all turns.
    """
    sampler, num_players = Rollouts(db, load_model(model)), {0: 4, other: 3}
    group_size = max(num_players[each] for each in stored)
    for group, run in itertools.product(range(6), range(group_size)):
        session_id = f"g{group}-{run}"
        turns, rewards = [], []
        for number, policy_id in enumerate((0, other)):
            rng = torch.Generator().manual_seed(1000 * number + 10 * group + run)
            prompt = torch.randint(1, VOCABULARY, (6,), generator=rng).tolist()
            sampled, logprobs, _ = sampler._sample(prompt, rng)
            if run >= num_players[policy_id]:
                continue
            rewards.append(np.mean(np.array(sampled) < GOOD))
            turns.append(
                Turn(
                    turn_id=f"{session_id}-{number}",
                    chain_id=f"{session_id}-{number}",
                    session_id=session_id,
                    step=number,
                    policy_id=policy_id if stored == {0, other} else DEFAULT_POLICY,
                    prompt_delta=np.array(prompt, np.int32),
                    prompt_length=len(prompt),
                    token_ids=np.array(sampled, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                )
            )
        with db.write() as conn:
            of_group = {"group_id": f"g{group}", "group_size": group_size, "task_id": f"g{group}", "run": run}
            sessions.create_session(conn, Session(session_id=session_id, **of_group))
            append_turns(conn, [turn for number, turn in enumerate(turns) if (0, other)[number] in stored])
            add_rewards(conn, [Reward(session_id=session_id, value=float(np.mean(rewards)))])
            sessions.end_session(conn, "default", session_id)


def test_two_policies_of_the_same_sessions_get_the_weights_of_two_that_share_none(tmp_path, model, ledger):
    """Bit for bit: each is trained from its own turns, with the rewards of the sessions in which it has sampled.

    Nothing of one policy's tensors, moments or random numbers reaches another's.
    """
    other = new_policy(ledger, "other")
    play_together(ledger, model, other, stored={0, other})
    states = train_policies(settings_for(tmp_path, model))
    assert states[0].policy is states[other].policy
    assert updates(ledger) == [(0, 1), (other, 2), (0, 3), (other, 4)]
    for policy_id, numbers in ((0, (1, 3)), (other, (2, 4))):
        directory = tmp_path / f"alone {policy_id}"
        directory.mkdir()
        alone = new_database(directory / "ledger.db")
        play_together(alone, model, other, stored={policy_id})
        train(settings_for(directory, model))
        for number, version in enumerate(numbers, 1):
            assert are_equal(adapter(alone, number), adapter(ledger, version))
        alone.close()
    assert not are_equal(adapter(ledger, 3), adapter(ledger, 4))
    with ledger.read() as conn:
        of_updates = {
            each.update.update_id: each.sessions for each in page_updates.list_update_views(conn, "default")[0]
        }
    trained = {turn for each in of_updates.values() for one in each for turn in one.advantages}
    assert len(trained) == sum(len(one.advantages) for each in of_updates.values() for one in each) == 42
    assert {turn[-1] for one in (*of_updates[1], *of_updates[3]) for turn in one.advantages} == {"0"}
    assert {turn[-1] for one in (*of_updates[2], *of_updates[4]) for turn in one.advantages} == {"1"}


def test_a_policy_that_is_created_during_a_run_takes_turns_with_a_longer_queue(tmp_path, model, ledger, monkeypatch):
    monkeypatch.setattr(trained_policies, "LOOK_SECONDS", 0.0)
    play(ledger, model, 0, num_groups=12)

    class CreatesPolicy:
        def write(self, scalars, step):
            if "num_groups" in scalars and step == 1:
                play(ledger, model, new_policy(ledger, "late"), num_groups=12)

        def close(self):
            pass

    def recorders(settings, _policy):
        return [CreatesPolicy()] if settings.trainer_id == "trainer" else []

    train_policies(settings_for(tmp_path, model, total_batches=4), recorders=recorders)
    assert [policy_id for policy_id, _ in updates(ledger)] == [0, 0, 1, 0, 1, 0, 1, 1]


def test_an_exported_version_loads_in_peft_alone_and_merged_in_transformers_alone(tmp_path, model, ledger):
    """Both compute the same; a policy can start from the exported directory, and a trainer trains it on."""
    own = new_policy(ledger, "own")
    for policy_id in (0, own):
        play(ledger, model, policy_id)
    settings = settings_for(tmp_path, model, total_batches=1)
    states = train_policies(settings)
    with ledger.write() as conn:
        serving.activate_version(conn, states[own].progress.policy_version)
    exported, merged = tmp_path / "exported", tmp_path / "merged"
    place = ["--database", settings.database.get_secret_value()]
    for arguments in (
        ["export", "own", str(exported)],
        ["export", "own", str(merged), "--merge"],
        ["create", "brought", "--adapter", str(exported)],
    ):
        done = invoke("policies", *arguments, *place)
        assert done.exit_code == 0, done.output
    ids = torch.arange(8)[None]
    whole, base = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (merged, model))
    with torch.no_grad():
        untrained = base(ids).logits
        adapted = PeftModel.from_pretrained(base, exported)(ids).logits
        assert not torch.allclose(adapted, untrained, atol=1e-5)
        assert torch.allclose(whole(ids).logits, adapted, atol=1e-4)
    with ledger.read() as conn:
        brought = policies.find_policy(conn, "default", "brought")
    Rollouts(ledger, load_model(model), policy_id=brought.policy_id, version=brought.base_version).play(
        "more", num_groups=3
    )
    states = train_policies(settings.model_copy(update={"max_logprob_gap": 10.0}))
    assert states[brought.policy_id].progress.recent_versions[0] == brought.base_version
    assert states[brought.policy_id].progress.policy_version > brought.base_version


def test_a_policy_that_is_deleted_during_a_run_leaves_no_file_and_the_others_go_on(
    tmp_path, model, ledger, monkeypatch
):
    monkeypatch.setattr(trained_policies, "LOOK_SECONDS", 0.0)
    gone = new_policy(ledger, "gone")
    for policy_id in (0, gone):
        play(ledger, model, policy_id, num_groups=12)

    class DeletesPolicy:
        def write(self, scalars, step):
            if "num_groups" in scalars and step == 1:
                with ledger.write() as conn:
                    policies.delete_policies(conn, "default")

        def close(self):
            pass

    def recorders(settings, _policy):
        return [DeletesPolicy()] if settings.trainer_id == f"trainer/{gone}" else []

    train_policies(settings_for(tmp_path, model, total_batches=4), recorders=recorders)
    assert updates(ledger) == [(0, 1), (0, 3), (0, 4), (0, 5)]  # its batch was not acknowledged yet
    assert not (tmp_path / "policies" / str(gone)).exists()
    assert reports(ledger).keys() == {"trainer"}


def test_a_policy_that_fails_is_set_aside_with_its_reason_and_the_others_go_on(tmp_path, model, ledger):
    """Its sessions were sampled by another model. The next start tries it again, and the others are where they were."""
    bad, good = new_policy(ledger, "bad"), new_policy(ledger, "good")
    play(ledger, model, bad, num_groups=12, gap=0.5)
    for policy_id in (0, good):
        play(ledger, model, policy_id, num_groups=12)
    with pytest.raises(EngineDisagrees):
        train_policies(settings_for(tmp_path, model, groups_per_batch=12, total_batches=1))
    assert updates(ledger) == [(0, 1), (good, 2)]
    state, text = reports(ledger)[f"trainer/{bad}"]
    assert (state, text[:30]) == (TrainerState.DIED, "policy 'bad': EngineDisagrees:")
    assert groups_by_status(ledger) == {"trained": 24, "ready": 12}
    settings = settings_for(tmp_path, model, groups_per_batch=12, total_batches=1, max_logprob_gap=1.0)
    assert train_policies(settings)[good].progress.policy_version == 2
    assert updates(ledger) == [(0, 1), (good, 2), (bad, 3)]


def test_a_policy_whose_recorder_does_not_start_is_set_aside_and_the_others_go_on(tmp_path, model, ledger):
    other = new_policy(ledger, "other")
    for policy_id in (0, other):
        play(ledger, model, policy_id)

    def recorders(settings, _policy):
        if settings.trainer_id == f"trainer/{other}":
            raise OSError("no space left for event files")
        return []

    with pytest.raises(OSError, match="no space left"):
        train_policies(settings_for(tmp_path, model), recorders=recorders)
    assert updates(ledger) == [(0, 1), (0, 2)]
    assert reports(ledger)[f"trainer/{other}"] == (
        TrainerState.DIED,
        "policy 'other': OSError: no space left for event files",
    )


def test_a_policy_without_memory_or_with_infinite_rewards_leaves_the_others_training(
    tmp_path, model, ledger, monkeypatch
):
    """The first is set aside with its reason; the groups of the second are refused, and it waits for others."""
    large, infinite, good = (new_policy(ledger, name) for name in ("large", "infinite", "good"))
    for policy_id in (0, large, infinite, good):
        play(ledger, model, policy_id, num_groups=6)
    with ledger.write() as conn:
        own = "SELECT session_pk FROM sessions WHERE policy_id = ?"
        conn.exec_driver_sql(f"UPDATE rewards SET value = 9e999 WHERE session_pk IN ({own})", (infinite,))
    take = Updates.take

    def failing(updates, *arguments):
        if updates._learner.settings.trainer_id == f"trainer/{large}":
            raise torch.OutOfMemoryError("there is no memory")
        return take(updates, *arguments)

    monkeypatch.setattr(Updates, "take", failing)
    with pytest.raises(torch.OutOfMemoryError):
        train_policies(settings_for(tmp_path, model, total_batches=2))
    trained = sorted(policy_id for policy_id, version in updates(ledger) if version is not None)
    assert [policy_id for policy_id in trained if policy_id != infinite] == [0, 0, good, good]
    state, text = reports(ledger)[f"trainer/{large}"]
    assert (state, text) == (TrainerState.DIED, "policy 'large': OutOfMemoryError: there is no memory")


def test_a_policy_starts_from_the_version_that_it_was_cloned_from_also_after_a_restart(tmp_path, model, ledger):
    """Its first batch is refused, which leaves no checkpoint. The version stays on disk as long as it is needed."""
    play(ledger, model, 0, num_groups=9)
    train_policies(settings_for(tmp_path, model, total_batches=1))
    clone = new_policy(ledger, "clone", "default@1")
    Rollouts(ledger, load_model(model), policy_id=clone, version=1).play("of clone", num_groups=3)
    states = train_policies(settings_for(tmp_path, model, total_batches=1, max_logprob_gap=1e-9))
    assert states[clone].progress.recent_versions == (1,)
    states[clone].enter()
    started = {name.replace(".default", ""): value for name, value in states[clone].policy.trained_state().items()}
    assert are_equal(started, adapter(ledger, 1))
    Rollouts(ledger, load_model(model), policy_id=clone, version=1).play("more of clone", num_groups=3)
    states = train_policies(settings_for(tmp_path, model, total_batches=2, keep_versions=1, max_logprob_gap=10.0))
    assert states[clone].progress.recent_versions == (1, states[clone].progress.policy_version)
    with ledger.read() as conn:
        made = Path(versions.get_version(conn, states[clone].progress.policy_version).path)
    assert made.parent == tmp_path / "policies" / str(clone)
    assert read_manifest(made)["parent"] == 1


def test_whole_weights_are_not_trained_below_named_policies_and_the_reports_say_why(tmp_path, model, ledger):
    other = new_policy(ledger, "other")
    play(ledger, model, 0)
    with pytest.raises(Conflict, match="which would change the model below the adapters of named policies"):
        train_policies(settings_for(tmp_path, model, kind="full"))
    died = {name: text for name, (state, text) in reports(ledger).items() if state is TrainerState.DIED}
    assert died["trainer"].startswith("Conflict: version 1 has whole weights")
    assert died[f"trainer/{other}"].startswith("policy 'other': SettingsError: named policies are adapters")
