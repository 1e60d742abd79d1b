"""Imported sessions mixed into reinforcement learning (CHORD): the numbers by hand, and short runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.experience_factory import experience
from support.trainer_ledger import Rollouts, load_model, settings_for, store_imported, train
from torch import tensor

from trainer.learning.batch import build, minibatches
from trainer.learning.losses import loss_of
from trainer.learning.mixing import MixingRule, imported_loss, mu_of, parts, phi, step_weights
from trainer.learning.ratios import TrainedTokens
from trainer.policy.agent import RowLoss
from turnwise.errors import SettingsError
from turnwise.store import claims, experiences, groups
from turnwise.store.database import Database

LN2 = math.log(2.0)
PROMPT = [7, 8, 9]
WANTED, OTHER = [40, 41, 42], [43, 44, 45]
"""Replies that an untrained model samples with a probability of about 1e-5."""


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-6, rtol=0)


def test_mu_rises_linearly_and_falls_as_half_a_cosine_by_hand():
    """One batch up to 0.8, two down to 0.2: 0.8 · 1/2, 0.8, 0.2 + 0.6 · (1 + cos π/2) / 2 = 0.5, then 0.2."""
    rule = MixingRule(mix_imported="sft", mix_mu=0.8, mix_mu_end=0.2, mix_warmup_batches=1, mix_decay_batches=2)
    close([mu_of(number, rule) for number in range(5)], [0.4, 0.8, 0.5, 0.2, 0.2])
    constant = MixingRule(mix_imported="sft", mix_mu=0.3)
    close([mu_of(number, constant) for number in (0, 1000)], [0.3, 0.3])


def test_phi_weighs_uncertain_tokens_most_and_carries_no_gradient_by_hand():
    """p = 0.5: 0.25, p = 0.9: 0.09, p = 0.1: 0.09. The gradient of −φ log p is −φ."""
    logprobs = tensor([0.5, 0.9, 0.1]).log().requires_grad_()
    close(phi(logprobs), [0.25, 0.09, 0.09])
    (phi(logprobs) * -logprobs).sum().backward()
    close(logprobs.grad, [-0.25, -0.09, -0.09])


def test_the_loss_of_a_step_is_the_weighted_sum_of_both_means_by_hand():
    """μ = 0.2; a sampled session of two tokens, two imported ones of two tokens with p = 1/2 each.

    Weights: 0.8 / 2 = 0.4 for sampled tokens, 0.2 / 4 = 0.05 for imported ones. REINFORCE with A = 1 and log p = −1 and
    −2: 0.4 · 3 = 1.2. SFT: 4 · 0.05 · ln 2 = 0.2 ln 2; with φ = 1/4 a quarter of that.
    """
    sessions = [experience(session_id=name) for name in ("a", "i", "j")]
    batch = build(sessions, [np.ones(1)] * 3, policy_version=0, num_imported=2, mu=0.2)
    rule = MixingRule(algorithm="reinforce", mix_imported="sft")
    weights = step_weights(batch, [0, 1, 2], rule, "token_mean", 1)
    close(weights, [0.4, 0.4, 0.05, 0.05, 0.05, 0.05])
    close(step_weights(batch, [0], rule, "token_mean", 1), [0.5, 0.5, 0, 0, 0, 0])
    tokens = TrainedTokens(
        logprobs=tensor([-1.0, -2.0, *[-LN2] * 4]),
        entropy=torch.zeros(6),
        behaviour=torch.zeros(6),
        advantages=torch.ones(6),
        weights=torch.from_numpy(weights),
        sequence=tensor([0, 0, 1, 1, 2, 2]),
    )
    sampled, imported = parts(tokens, tensor([False, False, True, True, True, True]))
    close(loss_of(sampled, rule), 1.2)
    close(imported_loss(imported, rule), 0.2 * LN2)
    close(imported_loss(imported, rule.model_copy(update={"mix_phi": True})), 0.05 * LN2)


def test_a_row_of_imported_tokens_alone_has_no_policy_loss():
    """Every loss accepts no tokens, also those over whole chains."""
    tokens = TrainedTokens(
        logprobs=torch.zeros(2, requires_grad=True),
        **dict.fromkeys(("entropy", "behaviour", "advantages", "weights"), torch.ones(2)),
        sequence=tensor([0, 0]),
    )
    sampled, _ = parts(tokens, tensor([True, True]))
    for algorithm in ("ppo", "gspo", "topr", "cispo"):
        assert loss_of(sampled, MixingRule(algorithm=algorithm, off_policy_mask=0.1)).item() == 0.0


def test_a_custom_loss_does_not_see_a_row_of_imported_tokens_alone():
    """It may count chains by the largest index, which does not exist without tokens."""
    tokens = TrainedTokens(
        logprobs=torch.zeros(2, requires_grad=True),
        **dict.fromkeys(("entropy", "behaviour", "advantages", "weights"), torch.ones(2)),
        sequence=tensor([0, 0]),
    )
    loss = RowLoss(MixingRule(algorithm="custom", custom_loss="support.world_tasks:chain_loss"))
    sampled, imported = parts(tokens, tensor([True, True]))
    assert (loss.of(sampled).item(), loss.of(imported).item()) == (0.0, 2.0)
    loss.of(sampled).backward()


def test_each_optimizer_step_gets_its_share_of_both():
    """Four sampled and two imported groups in two steps: two and one in each."""
    sessions = [experience(session_id=name, group_id=name) for name in ("a", "b", "c", "d", "i", "j")]
    batch = build(sessions, [np.ones(1)] * 6, policy_version=0, num_imported=2, mu=0.2)
    steps = list(minibatches(batch, 2, np.random.default_rng(0)))
    assert [sum(map(batch.is_imported, step)) for step in steps] == [1, 1]
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
    with torch.no_grad():
        logits = load_model(directory)(torch.tensor([PROMPT + reply])).logits[0, len(PROMPT) - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(reply)[:, None]).sum())


@pytest.mark.parametrize("loss", [{"mix_imported": "sft"}, {"mix_imported": "sft", "mix_phi": True, "mix_mu": 0.9}])
def test_imported_replies_are_imitated_beside_the_policy_loss(tmp_path, model, loss):
    """The better reply of each pair gains; the update records its session, and its group stays for later batches."""
    database, settings = played(tmp_path, model, reuse_epochs=4, **loss)
    state = train(settings)
    assert (state.metrics["num_imported_sessions"], state.metrics["num_sessions"]) == (2, 2 * 4 + 2)
    assert state.metrics["imported_tokens"] == 4 * 2 * len(WANTED)
    assert logprob(tmp_path / "policies" / "v000001", WANTED) > logprob(model, WANTED) + 0.01
    with database.read() as conn:
        assert (claims.num_claimable(conn), claims.num_claimable(conn, with_imported=True)) == ((0, 0), (2, 0))
        pairs = list(experiences.experiences_of_groups(conn, groups.imported_groups(conn), with_imported=True))
    assert [[update.update_id for update in one.trained_in] for one in pairs] == [[1], [], [1], []]
    database.close()


def test_imported_pairs_are_preferred_beside_the_policy_loss(tmp_path, model):
    database, settings = played(tmp_path, model, reuse_epochs=4, mix_imported="dpo", mix_mu=0.5)
    database.close()
    assert train(settings).metrics["num_imported_sessions"] == 4
    newest = tmp_path / "policies" / "v000001"
    before = logprob(model, WANTED) - logprob(model, OTHER)
    assert logprob(newest, WANTED) - logprob(newest, OTHER) > before + 0.05


def test_imported_sessions_are_trained_while_no_reward_differs(tmp_path, model):
    """As at the start of a hard task: groups without an advantage are dropped, and the update imitates, in one step."""
    database, settings = played(tmp_path, model, group_size=1, mix_imported="sft", singleton="zero", num_minibatches=2)
    database.close()
    metrics = train(settings).metrics
    assert metrics["num_updates"] == 1
    assert (metrics["num_uniform_groups"], metrics["num_sessions"], metrics["tokens"]) == (2, 2, 0)
    assert logprob(tmp_path / "policies" / "v000001", WANTED) > logprob(model, WANTED)


@pytest.mark.parametrize("estimator", ["grpo", pytest.param("gae", marks=pytest.mark.slow)])
def test_a_run_with_imported_sessions_resumes_bit_for_bit(tmp_path, model, estimator):
    """Two batches at once, or one and then one after a restart; one imported group of two is drawn for each."""
    changes = {"mix_imported": "sft", "mix_groups": 1, "groups_per_batch": 1, "estimator": estimator}
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


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mix_imported": "sft", "algorithm": "sft"}, "remove mix_imported"),
        ({"mix_imported": "dpo", "dpo_reference": "behaviour"}, "set dpo_reference='base'"),
        ({"mix_imported": "dpo", "mix_phi": True}, "remove one of them"),
    ],
)
def test_mixing_that_contradicts_another_setting_is_refused(tmp_path, model, given, named):
    with pytest.raises((SettingsError, ValueError), match=named):
        settings_for(tmp_path, model, **given)
