import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.experience_factory import experience
from support.tiny_models import make_model

from trainer.algorithms.algorithm import loss_of
from trainer.batch.batch import build, minibatches, pack
from trainer.batch.chain import chain_of
from trainer.batch.forest import Forest, dense_mask
from trainer.batch.logprobs import LOGITS_IN_CHUNK, token_logprobs
from trainer.batch.selection import why_untrainable
from trainer.features import Settings
from trainer.features.estimates import moments_of
from trainer.model.agent import PolicyAgent, row_data
from trainer.model.model import Policy
from turnwise.chains import Experience, merge_session, split_session
from turnwise.types import Turn

CPU = torch.device("cpu")


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_a_common_prefix_of_sequences_is_laid_out_once():
    """1 2 3 4, 1 2 5 and 6 make the segments 1 2 | 3 4 | 5 | 6: six tokens instead of eight."""
    forest = Forest()
    for tokens in (ids(1, 2, 3, 4), ids(1, 2, 5), ids(6)):
        forest.insert(tokens)
    layout = forest.lay_out()
    assert forest.num_tokens == 6
    assert layout.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 0]
    assert layout.subtree_end.tolist() == [5, 5, 4, 4, 5, 6]
    assert dense_mask(layout, CPU).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert forest.places(ids(1, 2, 5)).tolist() == [0, 1, 4]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8))
def test_every_sequence_attends_to_exactly_its_own_tokens(sequences):
    """For any sequences: its positions hold its tokens at their depths, and each token attends to its prefix."""
    forest = Forest()
    for tokens in sequences:
        expected = forest.num_tokens + forest.num_new_tokens(ids(*tokens))
        forest.insert(ids(*tokens))
        assert forest.num_tokens == expected
    layout = forest.lay_out()
    attention = dense_mask(layout, CPU).numpy()
    assert (
        len(layout.tokens) == forest.num_tokens == len({tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)})
    )
    for tokens in sequences:
        places = forest.places(ids(*tokens))
        assert layout.tokens[places].tolist() == tokens
        assert layout.positions[places].tolist() == list(range(len(tokens)))
        for depth, place in enumerate(places):
            assert np.flatnonzero(attention[place]).tolist() == sorted(places[: depth + 1].tolist())


def test_weights_equal_the_numbers_worked_by_hand():
    """Session s has 4 trained tokens in two chains, session t has 2."""
    batch = build(
        [experience(session_id="s"), experience(session_id="s"), experience(session_id="t")],
        [np.ones(1)] * 3,
        policy_version=0,
    )
    everything = [0, 1, 2]
    np.testing.assert_allclose(batch.weights(everything, "token_mean", 8), [1 / 6] * 6)
    np.testing.assert_allclose(batch.weights(everything, "session_mean", 8), [1 / 8] * 4 + [1 / 4] * 2)
    np.testing.assert_allclose(batch.weights(everything, "session_sum", 8), [1 / 16] * 6)
    np.testing.assert_allclose(batch.weights([2], "session_mean", 8), [0] * 4 + [1 / 2] * 2)


def test_advantages_apply_to_the_tokens_of_their_own_turn():
    batch = build([experience(turns=2)], [np.array([1.0, -2.0])], policy_version=0)
    assert batch.table.advantages.tolist() == [1.0, 1.0, -2.0, -2.0]
    assert batch.table.place.tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, -9999.0])
def test_a_turn_with_a_logprob_that_is_not_finite_has_no_loss(broken):
    one = experience(turns=2, logprobs=[0, -1, broken, 0, -1, -1])
    assert why_untrainable(one) == ["broken_logprobs", None]
    assert build([one], [np.ones(2)], policy_version=0).table.place.tolist() == [4, 5]


def test_tokens_are_on_policy_if_the_trained_version_alone_sampled_their_chain():
    spanning = dataclasses.replace(experience(session_id="spanning", version=1), policy_version_last=2)
    chains = [experience(version=1), spanning, experience(session_id="old", version=0)]
    batch = build(chains, [np.ones(1)] * 3, policy_version=1)
    assert batch.table.on_policy.tolist() == [True, True, False, False, False, False]


def test_a_turn_under_a_sampler_mask_keeps_its_position_and_has_no_loss():
    batch = build([experience(turns=2, sampling=[{"top_k": 5}, {}])], [np.ones(2)], policy_version=0)
    assert batch.table.place.tolist() == [4, 5]


def test_minibatches_partition_the_batch_and_never_split_a_session():
    members = [experience(session_id=f"s{i // 2}", group_id=f"g{i // 6}") for i in range(24)]
    batch = build(members, [np.ones(1)] * 24, policy_version=0)
    parts = list(minibatches(batch, 5, np.random.default_rng(0)))
    assert [len(part) for part in parts] == [6, 6, 4, 4, 4]
    assert sorted(index for part in parts for index in part) == list(range(24))
    for part in parts:
        assert all({2 * (index // 2), 2 * (index // 2) + 1} <= set(part) for index in part)
    again = list(minibatches(batch, 5, np.random.default_rng(0)))
    other = list(minibatches(batch, 5, np.random.default_rng(1)))
    assert again == parts != other


def test_rows_stay_within_the_token_budget_without_padding():
    members = [experience(session_id=f"s{i}", tokens=[i, 50 + i, 60 + i]) for i in range(10)]
    batch = build(members, [np.ones(1)] * 10, policy_version=0)
    rows = pack(batch, range(10), row_tokens=7)
    # The last sampled token needs no computation, so each takes 2 tokens, and 3 of them fit into 7.
    assert [len(row.layout.tokens) for row in rows] == [6, 6, 6, 2]
    assert sorted(np.concatenate([row.token for row in rows]).tolist()) == list(range(20))
    assert len(pack(batch, range(10), row_tokens=1)) == 10


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    policy = Policy(Settings(model=str(make_model(tmp_path_factory.mktemp("model"))), device="cpu"))
    policy.load(0)
    return policy


def branching_session():
    rng = np.random.default_rng(0)

    def turn(name, parent, prompt_length, fresh, sampled):
        return Turn(
            turn_id=name,
            session_id="s",
            parent_turn_id=parent,
            chain_id="t0",
            prompt_delta=rng.integers(1, 48, fresh).astype(np.int32),
            prompt_length=prompt_length,
            token_ids=rng.integers(1, 48, sampled).astype(np.int32),
            logprobs=-rng.exponential(1.0, sampled).astype(np.float32),
        )

    return [
        turn("t0", None, 7, 7, 5),
        turn("t1", "t0", 15, 3, 4),
        turn("b1", "t0", 14, 2, 6),
        turn("t2", "t1", 21, 2, 3),
    ]


def as_experiences(sequences):
    return [
        chain_of(
            Experience(
                session_id="s",
                group_id="g",
                turn_ids=tuple(turn.turn_id for turn in sequence.turns),
                turn_steps=tuple(range(len(sequence.turns))),
                tokens=sequence.tokens,
                prompt_length=sequence.prompt_length,
                loss_mask=sequence.loss_mask,
                turn_index=sequence.turn_index,
                logprobs=sequence.logprobs,
                turn_rewards=np.zeros(len(sequence.turns)),
                turn_own_rewards=np.zeros(len(sequence.turns)),
                turn_returns=np.zeros(len(sequence.turns)),
                turn_shares=np.ones((2, len(sequence.turns))),
                reward=0.0,
                policy_version_first=0,
                policy_version_last=0,
            )
        )
        for sequence in sequences
    ]


def loss_and_gradient(policy, experiences, credit, row_tokens, algorithm):
    agent = PolicyAgent(policy, Settings(algorithm={"name": algorithm, "entropy_coef": 0.01}))
    advantages = [np.array([credit[turn_id] for turn_id in e.turn_ids]) for e in experiences]
    batch = build(experiences, advantages, policy_version=0)
    weights = batch.weights(range(len(experiences)), "session_mean", 1)
    policy.model.zero_grad()
    total = 0.0
    rows = pack(batch, range(len(experiences)), row_tokens)
    for row in rows:
        loss = loss_of(agent.tokens(*row_data(policy, batch, row, weights, None)), agent.algorithm)
        loss.backward()
        total += loss.item()
    gradient = torch.cat([p.grad.flatten().clone() for p in policy.parameters()])
    return total, gradient, sum(len(row.layout.tokens) for row in rows)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "cispo", "masked_is"])
@pytest.mark.parametrize("row_tokens", [16, 30, 1000])
def test_packed_and_merged_training_equals_one_row_per_turn(policy, algorithm, row_tokens):
    """Merging, branching and packing change the computation, never the loss or the gradient."""
    turns = branching_session()
    credit = {"t0": 1.0, "t1": -0.5, "b1": 2.0, "t2": 0.7}
    merged = as_experiences(merge_session(turns))
    split = as_experiences(split_session(turns))
    assert (len(merged), len(split)) == (2, 4)
    expected = loss_and_gradient(policy, split, credit, 1, algorithm)
    actual = loss_and_gradient(policy, merged, credit, row_tokens, algorithm)
    assert actual[0] == pytest.approx(expected[0], abs=1e-5)
    assert float((actual[1] - expected[1]).abs().max()) <= 1e-5
    assert actual[2] < expected[2]


def test_logprobs_from_logits_and_their_gradient_equal_autograd_through_log_softmax(monkeypatch):
    """In chunks of two predictors, one of them shared, at several temperatures, with entropy in the loss."""
    monkeypatch.setitem(LOGITS_IN_CHUNK, "cpu", 2 * 11)
    torch.manual_seed(0)
    logits = torch.randn(5, 11, requires_grad=True)
    which, target = torch.tensor([0, 1, 1, 4, 3]), torch.tensor([2, 3, 9, 0, 10])
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])
    pull, push = torch.randn(5), torch.randn(5)

    logprobs, entropy = token_logprobs(logits, None, which, target, temperature)
    (pull @ logprobs + push @ entropy).backward()

    plain = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(plain / temperature[:, None].double(), -1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)[which]
    (pull.double() @ log_p[which, target] + push.double() @ expected_entropy).backward()
    torch.testing.assert_close(logprobs.double(), log_p[which, target], atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-6, rtol=0)
    expected_variance = (log_p.exp() * log_p**2).sum(-1) - (log_p.exp() * log_p).sum(-1) ** 2
    *same, variance = moments_of(logits, None, which, target, temperature)
    assert torch.equal(torch.stack(same), torch.stack([logprobs, entropy]))
    torch.testing.assert_close(variance.double(), expected_variance[which], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.grad.double(), plain.grad, atol=1e-6, rtol=0)


def test_logprobs_from_hidden_states_equal_those_from_logits_and_so_do_all_gradients(monkeypatch):
    """Logits exist for two predictors at a time; gradients reach hidden states and the output layer's weight."""
    monkeypatch.setitem(LOGITS_IN_CHUNK, "cpu", 2 * 11)
    torch.manual_seed(0)
    which, target = torch.tensor([0, 1, 1, 4, 3]), torch.tensor([2, 3, 9, 0, 10])
    temperature, pull, push = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0]), torch.randn(5), torch.randn(5)
    hidden, weight = torch.randn(5, 7), torch.randn(11, 7)
    found = []
    for compute in (token_logprobs, lambda h, w, *rest: token_logprobs(h @ w.T, None, *rest)):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = compute(*inputs, which, target, temperature)
        (pull @ logprobs + push @ entropy).backward()
        found.append([logprobs, entropy, inputs[0].grad, inputs[1].grad])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
