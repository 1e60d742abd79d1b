"""Images in packed rows: the pixels the engine saw, in the stored places, with the gradient of a row a chain."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.tiny_vision import IMAGE, KINDS, Chains, make_vision_model, picture

from trainer.batch.batch import build, pack
from trainer.model.model import Policy
from trainer.settings import TrainerSettings

A, B, C = picture(1, (48, 32)), picture(2, (32, 32)), picture(3, (48, 32))


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def chains(directory):
    return Chains(directory)


def loaded(directory, **settings):
    policy = Policy(TrainerSettings(model=str(directory), device="cpu", **settings))
    policy.load(0)
    return policy


def batch_of(*experiences):
    return build(experiences, [np.ones(len(each.turn_ids)) for each in experiences], policy_version=0)


def computed(policy, batch, row_tokens):
    """Return the logprobs of the batch's trained tokens, and the gradient of their weighed sum by parameter."""
    found = torch.zeros(len(batch.table))
    weights = torch.linspace(0.5, 1.5, len(found))
    for parameter in policy.model.parameters():
        parameter.grad = None
    rows = pack(batch, range(len(batch.experiences)), row_tokens)
    for row in rows:
        targets = torch.from_numpy(batch.table.target[row.token])
        logprobs, _ = policy.logprobs(policy.inputs(row, torch.ones(len(targets)), targets))
        (logprobs * weights[row.token]).sum().backward()
        found[row.token] = logprobs.detach()
    gradient = {name: each.grad.clone() for name, each in policy.model.named_parameters() if each.grad is not None}
    return found, gradient, rows


def difference(left, right):
    assert left.keys() == right.keys()
    return float(
        torch.stack([(left[name] - right[name]).norm() for name in left]).norm()
        / torch.stack([each.norm() for each in right.values()]).norm()
    )


def branches(chains):
    """Four chains: two share a trunk with an image, one has a trunk that differs in its image alone."""
    trunk = ([1, 2], A, [3, 4], (5, 6), [7])
    return (
        chains.chain("text", *trunk, [8, 9], (10, 11, 12)),
        chains.chain("image", *trunk, B, [9], (10, 13)),
        chains.chain("other", [1, 2], C, [3, 4], (5, 6)),
        chains.chain("twice", *trunk, B, [14], A, (15, IMAGE, 16), [17], (18, 19)),
    )


@pytest.mark.parametrize("settings", [{"vision": "all"}, {"kind": "lora", "lora_rank": 2}], ids=["full", "lora"])
def test_a_packed_forest_with_images_gives_the_logprobs_and_the_gradient_of_a_row_a_chain(directory, chains, settings):
    """In float64: the same images are computed once where chains share them, and their gradients add up."""
    policy = loaded(directory, **settings)
    policy.model.double()
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = batch_of(*branches(chains))
    packed, gradient, (row,) = computed(policy, batch, 4096)
    alone, expected, rows = computed(policy, batch, None)
    assert len(rows) == 4
    assert len(row.layout.tokens) < sum(len(each.layout.tokens) for each in rows)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=0)
    assert difference(gradient, expected) <= 1e-6


def test_swapping_one_image_changes_the_logprobs_behind_it_and_the_gradient(directory, chains):
    policy = loaded(directory)
    text, image, *_ = branches(chains)
    place = [one.digest for one in image.images].index(chains.chain("b", B, (1,)).images[0].digest)
    swapped = list(image.images)
    other = chains.chain("d", picture(4, (32, 32)), (1,)).images[0]
    swapped[place] = dataclasses.replace(swapped[place], digest=other.digest, content=other.content)
    before, gradient, _ = computed(policy, batch_of(text, image), 4096)
    after, changed, _ = computed(policy, batch_of(text, dataclasses.replace(image, images=tuple(swapped))), 4096)
    own = batch_of(text, image).table.experience == 1
    behind = own & (batch_of(text, image).table.place >= swapped[place].offset)
    assert torch.equal(before[~behind], after[~behind])
    assert (before - after)[behind].abs().min() > 1e-3
    assert difference(changed, gradient) > 1e-3


def test_the_models_own_forward_pass_gives_the_same_logprobs(directory, chains):
    """The model merges by id, so the chain has no sampled placeholder."""
    policy = loaded(directory)
    chain = chains.chain("s", [1, 2], A, [3, 4], (5, 6), [7], B, (10, 11))
    assert policy.why_unseen(chain) is None
    found, _, _ = computed(policy, batch_of(chain), None)
    pixels = [policy.vision._pixels(image) for image in chain.images]
    joined = {
        name: torch.cat([one[name] for one in pixels], dim=int(name.startswith("pixel") and pixels[0][name].ndim == 5))
        for name in pixels[0]
    }
    tokens = torch.from_numpy(chain.tokens.astype(np.int64))[None]
    if "image_grid_thw" in joined:
        joined["mm_token_type_ids"] = (tokens == IMAGE).long()
    with torch.no_grad():
        log_p = policy.model(input_ids=tokens, **joined).logits[0, :-1].log_softmax(-1)
    expected = log_p.gather(1, tokens[0, 1:, None])[:, 0][chain.loss_mask[1:]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
