import math

import pytest
import torch
from support.algorithms import algorithm, close
from torch import tensor

from trainer.algorithms import cispo, dppo, grpo, gspo, masked_is, sapo, topr
from trainer.algorithms.algorithm import loss_of
from trainer.batch import ratios
from trainer.batch.ratios import ImportanceRule, TrainedTokens, ratio_of
from turnwise.errors import SettingsError

LN2 = math.log(2.0)


def test_reinforce_gives_the_numbers_worked_by_hand():
    """-A log p: -2 * -1 = 2, and 3 * -0.5 = -1.5."""
    tokens = of_chains(logprobs=tensor([-1.0, -0.5, 0.0]), advantages=tensor([2.0, -3.0, 0.0]))
    close(algorithm("reinforce").loss(tokens), [2.0, -1.5, 0.0])


def test_ppo_clips_higher_than_lower_by_hand():
    """Bounds 0.8 and 1.28.

    r = 1.5, A = 1: min(1.5, 1.28) = 1.28.  r = 1.5, A = -1: min(-1.5, -1.28) = -1.5, not clipped.
    r = 0.5, A = 1: min(0.5, 0.8) = 0.5.    r = 0.5, A = -1: min(-0.5, -0.8) = -0.8.
    """
    ratio, advantages = tensor([1.5, 1.5, 0.5, 0.5]), tensor([1.0, -1.0, 1.0, -1.0])
    close(grpo.ppo_clip(ratio, advantages, 0.2, 0.28), [-1.28, 1.5, -0.5, 0.8])


def test_gspo_uses_the_geometric_mean_of_each_sequence_by_hand():
    """Sequence 0 has log ratios ln 2 and 0, mean ln 2 / 2, ratio 2 ** 0.5; sequence 1 has ratio 1 / 2."""
    logprobs = tensor([-1.0 + LN2, -1.0, -2.0 - LN2], requires_grad=True)
    ratio = gspo.gspo_ratio(logprobs, tensor([-1.0, -1.0, -2.0]), tensor([0, 0, 1]))
    close(ratio.detach(), [2**0.5, 2**0.5, 0.5])
    ratio.sum().backward()
    # The gradient of a token's ratio by its own logprob is the ratio itself.
    close(logprobs.grad, [2**0.5, 2**0.5, 0.5])


def test_cispo_clips_the_weight_and_keeps_the_gradient_by_hand():
    """A ratio of 2 is cut to 1.28: loss -1.28 * 1 * -0.5 = 0.64, gradient -1.28."""
    logprobs = tensor([-0.5], requires_grad=True)
    loss = cispo.cispo(logprobs, tensor([2.0]), tensor([1.0]), 0.2, 0.28)
    close(loss.detach(), [0.64])
    loss.sum().backward()
    close(logprobs.grad, [-1.28])


def test_masked_importance_sampling_excludes_tokens_out_of_bounds_by_hand():
    """Ratios 2 and 0.5 are outside of [0.8, 1.28]; ratio 1.1 gives -1.1 * 2 * -1 = 2.2."""
    loss = masked_is.masked_importance(tensor([-1.0] * 3), tensor([2.0, 0.5, 1.1]), tensor([1.0, 1.0, 2.0]), 0.2, 0.28)
    close(loss, [0.0, 0.0, 2.2])


def test_dppo_truncates_the_ratio_of_a_rare_token_and_its_gradient():
    """A token goes from 1e-7 to 0.02: its ratio is 200,000 and moves less than the bound, but weighs 20."""
    new = torch.log(torch.tensor([0.02, 0.4])).requires_grad_()
    old = torch.log(torch.tensor([1e-7, 0.2]))
    found = dppo.dppo(new, old, torch.tensor([1.0, 1.0]), 0.2, 0.3)
    torch.testing.assert_close(found.detach(), torch.tensor([-20.0, -2.0]))
    found.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([-20.0, -2.0]))


def test_dppo_masks_by_the_change_of_probability_by_hand():
    """From 0.01 to 0.04 the ratio is 4 and only 0.03 of probability moved: kept. From 0.4 to 0.8, 0.4 moved: masked."""
    new, old = tensor([0.04, 0.8, 0.8]).log(), tensor([0.01, 0.4, 0.4]).log()
    close(dppo.dppo(new, old, tensor([1.0, 1.0, -1.0]), 0.2, 0.2), [-4.0, 0.0, 2.0])


def of_chains(**columns):
    given = {
        "logprobs": tensor([-1.0, -1.0, -1.0]),
        "entropy": torch.zeros(3),
        "behaviour": tensor([-1.0, -1.0, -1.0]),
        "advantages": tensor([1.0, 1.0, 1.0]),
        "weights": torch.full((3,), 1 / 3),
        "sequence": tensor([0, 0, 1]),
    }
    return TrainedTokens(**(given | columns))


def test_a_sequences_correction_is_the_product_over_its_chain_by_hand():
    """Chain 0 has ratios 2 and 2, together 4, cut to 3; chain 1 has ratio 2. By token all three are 2."""
    tokens = of_chains(proximal=tensor([-1.0, -1.0, -1.0]), behaviour=tensor([-1.0 - LN2] * 3))
    for name, weights in (("sequence_tis", [3.0, 3.0, 2.0]), ("tis", [2.0] * 3), ("sequence_mis", [0.0, 0.0, 2.0])):
        close(ratios.importance_weight(tokens, ImportanceRule(correction=name, correction_cap=3.0)), weights)


def test_the_off_policy_mask_excludes_bad_old_chains_by_hand():
    """Both chains became ln 2 nats less probable; that of negative advantage is left out over a bound of 0.5."""
    tokens = of_chains(behaviour=tensor([-1.0 + LN2] * 3), advantages=tensor([-1.0, -1.0, 1.0]))
    close(ratios.importance_gate(tokens, ImportanceRule(off_policy_mask=0.5)), [0.0, 0.0, 1.0])
    close(ratios.importance_gate(tokens, ImportanceRule(off_policy_mask=0.7)), [1.0, 1.0, 1.0])
    close(algorithm("reinforce", off_policy_mask=0.5).loss(tokens), [0.0, 0.0, 1.0])


def test_an_algorithm_equals_one_with_the_same_settings():
    assert algorithm("grpo") == algorithm("grpo")
    assert algorithm("grpo") != algorithm("grpo", clip_high=0.5)


def test_dpo_needs_the_policy_that_it_compares_with():
    needs = {given: algorithm("dpo", reference=given) for given in ("base", "behaviour")}
    assert [(each.needs_reference, each.needs_behaviour) for each in needs.values()] == [(True, False), (False, True)]


def test_a_ratio_is_not_counted_twice():
    """Without proximal logprobs PPO's ratio is the whole importance weight: the correction changes nothing."""
    tokens = of_chains(behaviour=tensor([-1.2] * 3))
    assert float(loss_of(tokens, algorithm(correction="tis", correction_cap=1.1))) == float(
        loss_of(tokens, algorithm())
    )
    assert algorithm(correction="tis", correction_cap=1.1).needs_proximal
    assert not algorithm("reinforce", correction="tis", correction_cap=1.1).needs_proximal


def test_the_dual_clip_bounds_the_loss_of_bad_tokens_by_hand():
    """A = -1: ratio 5 would give loss 5, the dual clip makes it 3; ratio 2 stays 2. A = 1 is not touched."""
    ratio, advantages = tensor([5.0, 2.0, 5.0]), tensor([-1.0, -1.0, 1.0])
    close(grpo.ppo_clip(ratio, advantages, 0.2, 0.28, 3.0), [3.0, 2.0, -1.28])


def test_sapo_gives_the_numbers_worked_by_hand():
    """At ratio 1 the gate is 4/tau * 1/2 = 2/tau, with slope 1; at ratio 2 and tau 1, 4 * sigmoid(1) = 2.924234."""
    ratio = tensor([1.0, 2.0, 1.0], requires_grad=True)
    loss = sapo.sapo(ratio, tensor([1.0, 1.0, -1.0]), (1.0, 2.0))
    close(loss.detach(), [-2.0, -2.924234, 1.0])
    loss.sum().backward()
    close(ratio.grad[[0, 2]], [-1.0, 1.0])


def test_topr_keeps_good_samples_whole_and_tapers_bad_ones_by_hand():
    """Chain ratio 1/4: good tokens weigh 1, bad ones 1/4; above 1 bad ones weigh 1 too."""
    logprobs = tensor([-2.0, -2.0, -2.0])
    log_ratio = tensor([-2 * LN2, -2 * LN2, LN2])
    close(topr.topr(logprobs, log_ratio, tensor([1.0, -1.0, -1.0])), [2.0, -0.5, -2.0])


@pytest.mark.parametrize("correction", ["tis", "mis", "sequence_tis", "sequence_mis"])
def test_topr_takes_no_correction_because_its_loss_has_the_ratio_itself(correction):
    with pytest.raises(SettingsError, match=f"correction='{correction}' would weigh by it once more"):
        algorithm("topr", correction=correction)


def test_the_kl_in_the_reward_is_summed_over_the_rest_of_the_chain_by_hand():
    """Divergences 1, 2 and 4: the sums are 3 and 2 in chain 0, and 4 in chain 1; coefficient 0.5."""
    tokens = of_chains(reference=tensor([-2.0, -3.0, -5.0]))
    close(grpo.kl_in_advantages(tokens, 0.5), [1 - 1.5, 1 - 1.0, 1 - 2.0])


def test_the_fraction_of_clipped_tokens_depends_on_the_algorithm():
    """Ratios 2 with A > 0: PPO cuts it off; GSPO's sequence ratio does too; reinforce has no bound."""
    tokens = of_chains(behaviour=tensor([-1.0 - LN2] * 3))
    found = {name: int(algorithm(name).gauges(tokens)["clip_fraction"].sum()) for name in ("grpo", "gspo")}
    assert found == {"grpo": 3, "gspo": 3}
    assert algorithm("reinforce").gauges(tokens) == {}
    bad = of_chains(behaviour=tensor([-1.0 - LN2] * 3), advantages=-torch.ones(3))
    assert int(algorithm("grpo").gauges(bad)["clip_fraction"].sum()) == 0
    assert int(algorithm("cispo").gauges(bad)["clip_fraction"].sum()) == 3


CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("name", "settings", "at_2", "at_half"),
    [
        ("reinforce", {}, 1.0, -1.0),
        ("reinforce", {"correction": "tis", "correction_cap": 1.1}, 1.1, -0.5),
        ("grpo", CLIPS, -1.28, 0.8),
        ("gspo", CLIPS, -1.28, 0.8),
        ("cispo", CLIPS, 1.28, -0.8),
        ("masked_is", CLIPS, 0.0, 0.0),
        ("dppo", CLIPS, -2.0, 0.0),  # probabilities move by e⁻¹ / 2 = 0.18, and by e⁻¹ = 0.37
        ("sft", {}, 1.0, 1.0),
    ],
)
def test_each_algorithm_applies_its_bounds_to_the_ratio_by_hand(name, settings, at_2, at_half):
    """Tokens with log p = -1: ratio 2 and A = 1, then ratio 1/2 and A = -1."""
    chosen = algorithm(name, **settings)
    close(loss_of(of_chains(behaviour=tensor([-1.0 - LN2] * 3)), chosen), at_2)
    close(loss_of(of_chains(behaviour=tensor([-1.0 + LN2] * 3), advantages=-torch.ones(3)), chosen), at_half)


def test_entropy_and_the_kl_to_the_reference_are_added_to_the_loss_by_hand():
    """-A log p = 1; entropy 2 takes 0.1 · 2 off; log ratio ln 2 to the reference adds 0.3 (2 - 1 - ln 2)."""
    tokens = of_chains(entropy=torch.full((3,), 2.0), reference=tensor([-1.0 + LN2] * 3))
    close(loss_of(tokens, algorithm("reinforce", entropy_coef=0.1, kl_coef=0.3)), 1 - 0.2 + 0.3 * (1 - LN2))


def test_dpo_sums_the_chains_of_a_session_and_weighs_each_pair_once():
    """Pair 0: chosen margins 1 + 1 over two chains, rejected 0 - 1; beta 0.5: -log sigmoid(1.5) = 0.201413."""
    tokens = TrainedTokens(
        logprobs=tensor([-1.0, -1.0, -2.0]),
        entropy=torch.zeros(3),
        behaviour=tensor([-2.0, -2.0, -1.0]),
        advantages=torch.ones(3),
        weights=tensor([0.25, 0.25, 0.5]),
        sequence=tensor([0, 1, 2]),
        pair=tensor([0, 0, 0]),
        chosen=tensor([True, True, False]),
    )
    close(loss_of(tokens, algorithm("dpo", beta=0.5, reference="behaviour")), 0.201413)


def test_one_broken_token_cannot_make_a_ratio_infinite():
    assert torch.isfinite(ratio_of(tensor([0.0]), tensor([-1000.0]))).all()


def test_stale_tokens_weigh_what_the_trainer_would_sample_of_them_by_hand():
    """At the first step the PPO ratio to the start of the batch is 1: the weight is min(π_prox / μ, 3) = 2 alone."""
    tokens = of_chains(proximal=tensor([-1.0] * 3), behaviour=tensor([-1.0 - LN2] * 3))
    close(loss_of(tokens, algorithm(correction="tis", correction_cap=3.0)), -2.0)
