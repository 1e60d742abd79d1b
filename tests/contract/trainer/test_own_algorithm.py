"""An algorithm of the user's own: it is loaded, checked and called once at the start, and trains."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.algorithms import algorithm, selected
from support.experience_factory import experience
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train

from trainer.algorithms.grpo import GRPO
from trainer.algorithms.loading import load, provided
from trainer.algorithms.trial import try_algorithm
from trainer.batch.batch import build
from trainer.main import check_startable
from turnwise.commands.init import algorithm_table
from turnwise.errors import SettingsError

EXAMPLE = Path(__file__).parents[3] / "examples/gigpo"


@pytest.fixture
def gigpo(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    yield lambda **settings: load({"name": "gigpo:GiGPO", **settings})
    sys.modules.pop("gigpo", None)


def test_gigpo_adds_the_advantage_among_turns_that_observed_the_same_by_hand(gigpo):
    """Rewards 1 and 0: GRPO gives ± 0.7071 to each turn. Discount 0.5.

    Both second turns observed token 4: their values are 1 and 0, so ± 0.7071 again, times ω = 2. The first turns of s
    observed 1 and that of t 9: nothing is added.
    """
    s = experience(session_id="s", turns=2, reward=1.0, tokens=[1, 2, 3, 4, 5, 6])
    t = experience(session_id="t", turns=2, reward=0.0, tokens=[9, 2, 3, 4, 5, 6])
    chosen = selected([s, t], gigpo(step_weight=2.0, discount=0.5))
    expected = [[0.7071, 3 * 0.7071], [-0.7071, -3 * 0.7071]]
    np.testing.assert_allclose(chosen.advantages, expected, atol=1e-4)


def test_gigpo_trains_a_batch_of_the_ledger(gigpo, tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=1, algorithm={"name": "gigpo:GiGPO", "step_weight": 0.5}))
    assert state.progress.policy_version == 1
    assert state.metrics["clip_fraction"] == 0.0
    assert gigpo().table()["name"] == "gigpo:GiGPO"


class ByToken(GRPO):
    """Advantages of each token, a gauge, and a reward of the user's own."""

    def reward(self, rewards, metadata):
        return 2 * rewards["reward"] + len(metadata)

    def advantages(self, group):
        return [chain.experience.reward * np.arange(chain.num_tokens) for chain in group.chains]

    def gauges(self, tokens):
        return {"mine": tokens.advantages}


def test_advantages_by_token_and_a_reward_of_ones_own_reach_the_tokens_by_hand():
    """Reward 2 · 1.5 = 3; the sampled tokens are at 1 and 2: advantages 3 and 6, of which the turn has the mean."""
    own = ByToken(GRPO.Settings())
    chosen = selected([experience(reward=1.5)], own)
    assert build(chosen.experiences, chosen.advantages, policy_version=0).table.advantages.tolist() == [3.0, 6.0]
    assert chosen.advantages_by_session({"s-0"}) == {("default", "s"): {"s-0": 4.5}}
    assert try_algorithm(own) == ("mine",)


class Broken(GRPO):
    """Fails in the way that its name says."""


class WrongShape(Broken):
    def advantages(self, group):
        return [np.zeros(3) for _ in group.chains]


class AloneInItsState(Broken):
    def advantages(self, group):
        met = {}
        for turn in (turn for chain in group.chains for turn in chain.turns):
            met.setdefault(turn.observed.tobytes(), {})[turn.turn_id] = turn.total
        found = {}
        for values in met.values():
            found |= zip(values, self.centre(np.array(list(values.values()))), strict=True)
        return [np.array([found[turn.turn_id] for turn in chain.turns]) for chain in group.chains]


class WrongSignature(Broken):
    def policy_loss(self):
        return None


class NoGradient(Broken):
    def policy_loss(self, tokens):
        return tokens.advantages


class OneNumber(Broken):
    def loss(self, tokens):
        return tokens.logprobs.sum()


class TakenName(Broken):
    def gauges(self, tokens):
        return {"kl": tokens.entropy}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (WrongShape, r"a chain of 2 turns and 6 tokens got advantages of shape \(3,\)"),
        (AloneInItsState, "in line \\d+ of test_own_algorithm.py: RuntimeWarning"),
        (WrongSignature, "TypeError: .*policy_loss"),
        (NoGradient, "loss has no gradient"),
        (OneNumber, r"loss is a tensor of shape \(\), not one number for each of the"),
        (TakenName, "'kl' is that of a gauge of the trainer"),
    ],
)
def test_a_fault_in_a_class_ends_the_start_and_is_named(tmp_path, model, monkeypatch, kind, named):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Mine=kind))
    settings = settings_for(tmp_path, model, algorithm="mine:Mine")
    with pytest.raises(SettingsError, match=named):
        check_startable(settings)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("grop", "there is no algorithm 'grop'; did you mean 'grpo'"),
        ("nowhere:Mine", "algorithm='nowhere:Mine' cannot be imported"),
        ("json:loads", "is no class that derives from trainer.algorithms.algorithm:Algorithm"),
        ({"name": "grpo", "clip_lo": 1}, r"\[trainer.algorithm\] has no setting 'clip_lo' .*did you mean 'clip_low'"),
        ({"name": "gspo", "clip_low": -1}, r"clip_low=-1 .*does not fit"),
        (3, "algorithm=3 is neither a name nor a table"),
    ],
)
def test_a_name_or_a_setting_that_does_not_exist_is_refused(tmp_path, model, given, named):
    with pytest.raises(SettingsError, match=named):
        settings_for(tmp_path, model, algorithm=given)


@pytest.mark.parametrize("name", sorted(set(provided()) - {"correction", "distillation"}))
def test_every_algorithm_passes_the_call_at_the_start_and_can_be_written_down(name):
    made = algorithm(name)
    assert isinstance(try_algorithm(made), tuple)
    assert f'name = "{name}"' in algorithm_table(name)
    assert load({"name": name, **made.settings.model_dump(exclude_none=True)}).settings == made.settings


def test_a_gauge_of_ones_own_is_recorded_as_the_mean_over_tokens(tmp_path, model, ledger, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Mine=ByToken))
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    state = train(settings_for(tmp_path, model, total_batches=1, algorithm="mine:Mine"))
    assert state.metrics["mine"] > 0
    assert torch.isfinite(torch.tensor(state.metrics["loss"]))
