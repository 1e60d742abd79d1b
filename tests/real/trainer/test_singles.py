"""Single sessions: what they are compared with, and what is trained of them."""

import dataclasses
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.algorithms import algorithm, assigned
from support.algorithms import selected as selected_by
from support.experience_factory import experience
from support.ledger_samples import groups_by_status
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, settings_for, train

from trainer.batch.advantages import MOST_ROWS, WINDOW, SingleValue, baseline, moved_on
from trainer.batch.selection import SelectionRule
from turnwise.store.database import Database
from turnwise.store.experiences import agent_digest
from turnwise.store.rewards import add_rewards
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import list_sessions
from turnwise.types import Reward
from turnwise.version_directory import STATE_FILE

NONE = np.empty(0)


def single(name, reward, *, agent="shop", task="", role="main", **changes):
    found = experience(session_id=name, group_id=name, reward=reward, **changes)
    return dataclasses.replace(found, task_id=task, is_single=True, agent=agent, role=role)


def selected(experiences, window=(), chosen="grpo", kind_pattern=None, **settings):
    return selected_by(experiences, algorithm(chosen, **settings), window, kind_pattern=kind_pattern)


def advantages_of(chosen):
    return {each.session_id: turns.tolist() for each, turns in zip(chosen.experiences, chosen.advantages, strict=True)}


def test_the_baseline_of_a_single_session_is_the_mean_of_the_others_and_of_the_window():
    # Pool 1, 0, 0, 3: the others' mean is 1, 4/3, 4/3. Mean 1, std sqrt((0 + 1 + 1 + 4) / 3) = 1.414214.
    values, past = np.array([1.0, 0.0, 0.0]), np.array([3.0])
    centred = baseline(values, past, is_scaled=False)
    np.testing.assert_allclose(centred, [0, -4 / 3, -4 / 3])
    np.testing.assert_allclose(baseline(values, past, is_scaled=True), [0, -0.942809, -0.942809], atol=1e-6)


def test_a_rare_success_has_an_advantage_of_at_most_four():
    """One of 64 succeeds: std is 1/8, so that it would be 8; the floor is a quarter of the range."""
    advantages = baseline(np.array([1.0] + [0.0] * 63), NONE, is_scaled=True)
    assert advantages[0] == pytest.approx(4.0)
    np.testing.assert_allclose(advantages[1:], -4 / 63)


def test_equal_rewards_and_a_lone_session_have_no_advantage():
    assert not baseline(np.full(8, 0.1), np.full(3, 0.1), is_scaled=True).any()
    assert baseline(np.array([5.0]), NONE, is_scaled=True).tolist() == [0.0]


def test_a_constant_reward_trains_nothing_and_the_reason_is_given():
    chosen = selected([single("a", 1.0), single("b", 1.0), single("c", 1.0, agent="other")])
    assert not chosen.experiences
    assert chosen.refused == {
        ("default", "a"): "uniform_rewards",
        ("default", "b"): "uniform_rewards",
        ("default", "c"): "first_of_its_kind",
    }


def test_a_reward_at_the_mean_of_the_others_is_refused_with_that_reason():
    chosen = selected([single("a", 0.0), single("b", 1.0), single("c", 2.0)])
    assert chosen.refused == {("default", "b"): "equals_baseline"}


def test_a_reward_that_differs_by_kind_alone_teaches_no_kind():
    """Easy users give 0.9 and 1.0, hard ones 0.0 and 0.1: each kind sums to zero, and none is better than the other."""
    easy = [single("e0", 0.9, agent="easy"), single("e1", 1.0, agent="easy")]
    hard = [single("h0", 0.0, agent="hard"), single("h1", 0.1, agent="hard")]
    found = advantages_of(selected(easy + hard))
    assert found["e0"] == pytest.approx(found["h0"])
    assert found["e1"] == pytest.approx(found["h1"])
    assert found["e0"][0] == pytest.approx(-found["e1"][0])
    constant = [single("e", 1.0, agent="easy"), single("f", 1.0, agent="easy"), single("h", 0.0, agent="hard")]
    assert not selected([*constant, single("i", 0.0, agent="hard")]).experiences


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"role": "sub_agent"}, {"agent": "other"}])
def test_tenant_role_and_system_prompt_make_the_kind(other):
    chosen = selected([single("a", 0.0), single("b", 1.0), single("c", 9.0, **other)])
    assert sorted(advantages_of(chosen)) == ["a", "b"]


def test_the_pattern_of_a_task_makes_the_kind_in_place_of_the_system_prompt():
    sessions = [
        single("a", 0.0, task="refund-1", agent="x"),
        single("b", 1.0, task="refund-2", agent="y"),
        single("c", 5.0, task="address-1", agent="x"),
    ]
    chosen = selected(sessions, kind_pattern=r"^(\w+)-")
    assert sorted(advantages_of(chosen)) == ["a", "b"]
    assert chosen.refused == {("default", "c"): "first_of_its_kind"}
    with pytest.raises(ValueError, match="no regular expression"):
        SelectionRule(kind_pattern="(")


def test_groups_and_single_sessions_of_a_batch_have_their_own_baselines_on_one_scale():
    """Group: 0 and 1, std 0.7071. Singles 10 and 12: the others' mean is 2 away, std 1.4142."""
    group = [experience(session_id=name, reward=reward) for name, reward in (("s", 0.0), ("t", 1.0))]
    found = advantages_of(selected([*group, single("a", 10.0), single("b", 12.0)]))
    assert found["s"] == pytest.approx([-0.7071], abs=1e-4)
    assert found["a"] == pytest.approx([-1.4142], abs=1e-4)
    assert found["b"] == pytest.approx([1.4142], abs=1e-4)


def test_single_sessions_with_step_wise_credit_are_compared_step_by_step():
    """Returns (1, 4) and (3, 0): each is 2 below or above the other at step 0, 4 at step 1; only centred."""
    batch = [
        single("a", 9.0, turns=2, turn_returns=(1.0, 4.0), credit="step_wise"),
        single("b", 9.0, turns=2, turn_returns=(3.0, 0.0), credit="step_wise"),
    ]
    assert [turns.tolist() for turns in assigned(batch, "rloo")] == [[-2.0, 4.0], [2.0, -4.0]]


def test_sub_agents_of_a_session_share_its_reward_and_count_once():
    chains = [single("a", 1.0), single("a", 1.0), single("b", 0.0)]
    found = assigned(chains, "rloo")
    assert [turns.tolist() for turns in found] == [[1.0], [1.0], [-1.0]]


def test_named_rewards_of_single_sessions_are_compared_by_name():
    def named(name, **rewards):
        found = single(name, sum(rewards.values()))
        return dataclasses.replace(found, rewards=rewards)

    batch = [named("a", solved=1.0, polite=0.0), named("b", solved=0.0, polite=0.01)]
    chosen = selected(batch, chosen="gdpo", reward_weights={"solved": 2.0})
    assert advantages_of(chosen)["a"][0] > 0 > advantages_of(chosen)["b"][0]
    assert {row.part for row in chosen.single_values} == {"reward solved", "reward polite"}


def test_the_window_gives_a_batch_of_one_session_its_baseline():
    before = selected([single("a", 0.0), single("b", 1.0)])
    window = moved_on((), before.single_values)
    # Pool 2, 0, 1: the others' mean is 0.5, std 1.
    assert advantages_of(selected([single("c", 2.0)], window)) == {"c": [pytest.approx(1.5)]}


def test_a_session_that_is_trained_again_is_not_its_own_baseline():
    """Session a had 0 and has 1 now: the window without it holds only b's 0.5."""
    window = moved_on((), selected([single("a", 0.0), single("b", 0.5)]).single_values)
    again = selected([single("a", 1.0)], window, chosen="rloo")
    assert advantages_of(again) == {"a": [0.5]}
    assert sorted(row.value for row in moved_on(window, again.single_values)) == [0.5, 1.0]


def test_the_window_keeps_the_latest_values_of_each_kind():
    rows = [SingleValue("busy", "session", f"s{number}", float(number)) for number in range(WINDOW + 5)]
    window = moved_on((SingleValue("rare", "session", "r", 7.0),), rows)
    assert window[0].value == 7.0
    assert [row.value for row in window[1:]] == [float(number) for number in range(5, WINDOW + 5)]
    many = [SingleValue(f"k{number}", "session", f"s{number}", 0.0) for number in range(MOST_ROWS + 1)]
    assert [row.kind for row in (*moved_on((), many)[:1],)] == ["k1"]


def test_the_digest_of_an_agent_is_that_of_its_system_prompt_without_numbers():
    def digest(*texts, role="system"):
        return agent_digest([{"role": role, "content": text} for text in texts] + [{"role": "user", "content": "Hi"}])

    assert digest("Today is 2026-11-23.") == digest("Today is 2027-1-4.")
    assert digest("Help.") != digest("Refuse.")
    assert digest("Help.") == digest("Help.", role="developer")
    assert digest() == agent_digest([{"role": "user", "content": "Something else"}])


@pytest.fixture
def played(tmp_path):
    """Return a model's directory beside a ledger with twelve single sessions whose rewards differ."""
    model = make_model(tmp_path / "model")
    database = new_database(tmp_path / "ledger.db")
    players = Rollouts(database, load_model(model), has_groups=False)
    players.play("a", num_groups=3, group_size=4)
    yield SimpleNamespace(model=model, database=database, directory=tmp_path, players=players)
    database.close()


BATCHES = {"groups_per_batch": 2, "singles_per_group": 2}


def test_a_run_that_is_resumed_has_the_weights_and_the_window_of_one_that_was_not(played, tmp_path):
    """Three batches of four sessions, all at once, and in two processes."""
    whole = tmp_path / "whole"
    shutil.copytree(played.directory, whole, ignore=shutil.ignore_patterns("whole"))
    expected = train(settings_for(whole, played.model, total_batches=3, **BATCHES))
    train(settings_for(played.directory, played.model, total_batches=2, **BATCHES))
    for file in played.directory.rglob(STATE_FILE):  # one of an earlier commit says nothing of heads
        torch.save({name: value for name, value in torch.load(file).items() if name != "heads"}, file)
    state = train(settings_for(played.directory, played.model, total_batches=3, **BATCHES))
    assert (state.progress.num_sessions, len(state.singles)) == (12, 12)
    assert state.singles == expected.singles
    for name, tensor in expected.policy.trained_state().items():
        assert torch.equal(state.policy.trained_state()[name], tensor), name


def test_the_window_of_batches_that_train_nothing_is_resumed_from_the_ledger(played):
    """With rewards that are all equal no version is made, so that no checkpoint holds what the batches added.

    A batch that teaches nothing takes the other sessions that are ready, too.
    """
    make_rewards_equal(played.database)
    before = train(settings_for(played.directory, played.model, total_batches=1, **BATCHES))
    assert (before.progress.policy_version, len(before.singles)) == (0, 12)
    played.players.play("b", num_groups=1, group_size=4)
    make_rewards_equal(played.database)
    after = train(settings_for(played.directory, played.model, total_batches=2, **BATCHES))
    assert len(after.singles) == 16
    assert after.singles[:12] == before.singles
    assert groups_by_status(played.database) == {"dropped": 16}


def make_rewards_equal(database: Database) -> None:
    with database.write() as connection:
        sessions, _ = list_sessions(connection, SessionFilter(), limit=100)
        lines = [Reward(session_id=one.session_id, step=step, value=0.5) for one in sessions for step in (0, 1)]
        add_rewards(connection, lines)
