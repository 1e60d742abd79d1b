"""Imported sessions mixed into reinforcement learning (CHORD): the numbers by hand, and short runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.algorithms import algorithm, close
from support.experience_factory import experience
from support.tiny_models import load_model, logprobs_of
from support.trainer_ledger import Rollouts, settings_for, store_imported, train
from torch import tensor

from trainer.algorithms import chord
from trainer.algorithms.algorithm import loss_of, parts, step_weights
from trainer.algorithms.chord import phi
from trainer.batch.batch import build, minibatches
from trainer.batch.ratios import TrainedTokens
from turnwise.store import claims, experiences, groups
from turnwise.store.database import Database

LN2 = math.log(2.0)
PROMPT = [7, 8, 9]
WANTED, OTHER = [40, 41, 42], [43, 44, 45]
"""Replies that an untrained model samples with a probability of about 1e-5."""


def test_mu_falls_as_half_a_cosine_by_hand():
    """Two batches from 0.85 down to 0.05: 0.85, 0.05 + 0.8 · (1 + cos π/2) / 2 = 0.45, then 0.05."""
    share = algorithm("chord", mu=0.85, decay_batches=2).imitation.share
    close([share(number) for number in range(4)], [0.85, 0.45, 0.05, 0.05])
    constant = algorithm("chord", mu=0.3).imitation.share
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
    batch = build(sessions, [np.ones(1)] * 3, policy_version=0, num_imported=2, mu=0.2)
    chord = algorithm("chord")
    weights = step_weights(batch, [0, 1, 2], chord)
    close(weights, [0.4, 0.4, 0.05, 0.05, 0.05, 0.05])
    close(step_weights(batch, [0], chord), [0.5, 0.5, 0, 0, 0, 0])
    tokens = TrainedTokens(
        logprobs=tensor([-1.0, -2.0, *[-LN2] * 4]),
        entropy=torch.zeros(6),
        behaviour=tensor([-1.0, -2.0, 0.0, 0.0, 0.0, 0.0]),
        advantages=torch.ones(6),
        weights=torch.from_numpy(weights),
        sequence=tensor([0, 0, 1, 1, 2, 2]),
        is_imported=tensor([False, False, True, True, True, True]),
    )
    sampled, imported = parts(tokens)
    close(loss_of(sampled, chord), -0.8)
    close(loss_of(imported, chord.imitation.algorithm), 0.2 * LN2)
    close(loss_of(imported, algorithm("chord", imitation="phi").imitation.algorithm), 0.05 * LN2)


def test_a_row_of_imported_tokens_alone_has_no_policy_loss():
    """No algorithm sees a row without tokens: it may count chains by the largest index."""
    tokens = TrainedTokens(
        logprobs=torch.zeros(2, requires_grad=True),
        **dict.fromkeys(("entropy", "behaviour", "advantages", "weights"), torch.ones(2)),
        sequence=tensor([0, 0]),
        is_imported=tensor([True, True]),
    )
    sampled, _ = parts(tokens)
    for name in ("grpo", "gspo", "topr", "cispo"):
        assert loss_of(sampled, algorithm(name, off_policy_mask=0.1)).item() == 0.0


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
        pairs = list(experiences.experiences_of_groups(conn, groups.imported_groups(conn), with_imported=True))
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
    monkeypatch.setattr(chord, "IMPORTED_GROUPS", 1)
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
