"""Images in packed rows: the pixels the engine saw, in the stored places, with the gradient of a row a chain."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from cachetools import LRUCache
from safetensors.torch import load_file
from support.tiny_models import make_model
from support.tiny_vision import IMAGE, KINDS, VOCABULARY, Chains, make_vision_model, picture
from transformers import AutoImageProcessor

from trainer.batch.batch import build, pack
from trainer.features import FEATURES, Settings
from trainer.features.images import BACKENDS, opened
from trainer.model.model import Policy
from turnwise.engine_plugin.features.images import pixels_digest
from turnwise.errors import SettingsError
from turnwise.features.images import IMAGES

A, B, C = picture(1, (48, 32)), picture(2, (32, 32)), picture(3, (48, 32))


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def chains(directory):
    return Chains(directory)


def loaded(directory, terms=FEATURES.terms, **settings):
    policy = Policy(Settings(model=str(directory), device="cpu", **settings), terms)
    policy.load(0)
    return policy


def vision_of(policy):
    return policy.around[0]


@pytest.fixture(scope="module")
def untrained(directory):
    return loaded(directory)


@pytest.fixture
def policy(untrained):
    """A policy that knows no image yet."""
    vision_of(untrained)._pixels_of.clear()
    vision_of(untrained)._why_other = "not measured"
    return untrained


def batch_of(*experiences):
    return build(experiences, [np.ones(len(each.turn_ids)) for each in experiences], policy_version=0)


def computed(policy, batch, row_tokens):
    """Return the logprobs of the batch's trained tokens, and the gradient of their weighed sum by parameter."""
    found = torch.zeros(len(batch.table))
    weights = torch.linspace(0.5, 1.5, len(found))
    for parameter in policy.model.parameters():
        parameter.grad = None
    rows = [policy.with_parts(batch, row) for row in pack(batch, range(len(batch.experiences)), row_tokens)]
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


def test_swapping_one_image_changes_the_logprobs_behind_it_and_the_gradient(policy, chains):
    text, image, *_ = branches(chains)
    place = [one.digest for one in image.parts[IMAGES]].index(chains.chain("b", B, (1,)).parts[IMAGES][0].digest)
    swapped = list(image.parts[IMAGES])
    other = chains.chain("d", picture(4, (32, 32)), (1,)).parts[IMAGES][0]
    swapped[place] = dataclasses.replace(swapped[place], digest=other.digest, content=other.content)
    before, gradient, _ = computed(policy, batch_of(text, image), 4096)
    other_image = dataclasses.replace(image, parts={IMAGES: tuple(swapped)})
    after, changed, _ = computed(policy, batch_of(text, other_image), 4096)
    own = batch_of(text, image).table.experience == 1
    behind = own & (batch_of(text, image).table.place >= swapped[place].offset)
    assert torch.equal(before[~behind], after[~behind])
    assert (before - after)[behind].abs().min() > 1e-3
    assert difference(changed, gradient) > 1e-3


def test_the_models_own_forward_pass_gives_the_same_logprobs(policy, chains):
    """The model merges by id, so the chain has no sampled placeholder."""
    chain = chains.chain("s", [1, 2], A, [3, 4], (5, 6), [7], B, (10, 11))
    assert policy.why_unfit(chain) is None
    found, _, _ = computed(policy, batch_of(chain), None)
    pixels = [vision_of(policy)._pixels(image) for image in chain.parts[IMAGES]]
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


def test_a_sampled_placeholder_stays_text(tmp_path):
    """By hand: embeddings of the ids, features in the stored places, and the decoder alone."""
    directory = make_vision_model(tmp_path, "Idefics3")
    policy, chains = loaded(directory), Chains(directory)
    chain = chains.chain("s", [1, 2], A, [3], (IMAGE, 5), [IMAGE, 7], B, (10, IMAGE, 12))
    found, _, _ = computed(policy, batch_of(chain), None)
    model, tokens = policy.model, torch.from_numpy(chain.tokens.astype(np.int64))
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        for image in chain.parts[IMAGES]:
            start, length = image.runs[0]
            features = model.get_image_features(**vision_of(policy)._pixels(image), return_dict=True).pooler_output
            embedded[start : start + length] = features.flatten(0, 1)
        hidden = model.model.text_model(inputs_embeds=embedded[None], use_cache=False).last_hidden_state[0, :-1]
        log_p = model.lm_head(hidden).log_softmax(-1)
    expected = log_p.gather(1, tokens[1:, None])[:, 0][chain.loss_mask[1:]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert policy.why_unfit(chain) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"runs": ((3, 4),)}, r"it has 4 tokens in its turn, and \d+ features here"),
        ({"content": b""}, "its file is deleted"),
        ({"content": b"no image"}, "it cannot be read"),
        ({"processor": "ab"}, r"its processor is none of .*: train the model that was served, with the engine's"),
        ({"pixels": "float32:ab"}, "its processor is none of"),
    ],
)
def test_an_image_that_is_not_what_the_engine_saw_is_refused_by_name(policy, chains, change, words):
    chain = chains.chain("s", [1, 2], A, [3], (5,))
    assert policy.why_unfit(chain) is None
    image = dataclasses.replace(chain.parts[IMAGES][0], **{"digest": "0" * 64, **change})
    reason = policy.why_unfit(dataclasses.replace(chain, parts={IMAGES: (image,)}))
    assert re.match(f"media_processor: image 000000000000 is not what the engine saw: {words}", reason), reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_pixels_decide_and_not_the_settings_of_a_processor(directory, policy, chains, backend):
    """An engine may have another transformers or torchvision, and Qwen's sends bytes that it scales on its device."""
    chain = chains.chain("s", [1, 2], A, [3], (5,))
    processor = AutoImageProcessor.from_pretrained(directory, backend=backend)
    picture = [opened(A)]
    made = processor(picture, return_tensors="pt")["pixel_values"]
    plain = processor(picture, return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"]
    [first] = chain.parts[IMAGES]
    for pixels in (made, made.bfloat16(), plain.to(torch.uint8)):
        image = dataclasses.replace(first, processor="of another version", pixels=pixels_digest(pixels))
        assert policy.why_unfit(dataclasses.replace(chain, parts={IMAGES: (image,)})) is None, pixels.dtype


def test_an_image_that_is_larger_than_all_that_is_kept_is_computed(policy, chains, monkeypatch):
    keeping, batch = vision_of(policy)._pixels_of, batch_of(chains.chain("s", [1, 2], A, [3], (5,)))
    expected, _, _ = computed(policy, batch, None)
    monkeypatch.setattr(vision_of(policy), "_pixels_of", LRUCache(0, keeping.getsizeof))
    assert policy.why_unfit(batch.experiences[0]) is None
    torch.testing.assert_close(computed(policy, batch, None)[0], expected)


def test_a_model_that_sees_none_refuses_images_by_name(tmp_path, chains):
    make_model(tmp_path, vocab_size=VOCABULARY)
    reason = loaded(tmp_path).why_unfit(chains.chain("s", [1], A, [2], (3,)))
    assert reason == f"media_model: {str(tmp_path)!r} sees none: train the model that was served, in one process"


def test_a_trainer_without_the_feature_of_images_refuses_their_chain_by_its_name(tmp_path, chains):
    make_model(tmp_path, vocab_size=VOCABULARY)
    reason = loaded(tmp_path, ()).why_unfit(chains.chain("s", [1], A, [2], (3,)))
    assert reason == f"without_feature: nothing of this trainer computes {IMAGES}, which the chain has"


@pytest.mark.parametrize(
    ("part", "trained"), [("frozen", set()), ("projector", {"connector"}), ("all", {"connector", "vision_model"})]
)
def test_the_vision_part_is_trained_as_far_as_the_setting_says(tmp_path, part, trained):
    directory = make_vision_model(tmp_path, "Idefics3")
    policy = loaded(directory, vision=part)
    _, gradient, _ = computed(policy, batch_of(Chains(directory).chain("s", [1, 2], A, [3], (5,))), None)
    parts = {name.split(".")[1] for name, each in gradient.items() if each.norm() > 0} - {"weight"}
    assert parts == {"text_model"} | trained
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter)
    policy.save(tmp_path / "version", policy.trained_state())
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "version/model.safetensors")
    changed = {name.split(".")[1] for name in before if not torch.equal(before[name], after[name])} - {"weight"}
    assert changed == parts
    assert (tmp_path / "version/preprocessor_config.json").read_bytes() == (
        directory / "preprocessor_config.json"
    ).read_bytes()


def test_an_adapter_is_not_trained_beside_whole_weights_of_the_vision_part(tmp_path):
    with pytest.raises(SettingsError, match="vision='all' trains whole weights, and kind='lora' an adapter"):
        loaded(make_vision_model(tmp_path, "Idefics3"), vision="all", kind="lora")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_tokens_of_an_image_see_one_another_is_refused_by_name(tmp_path, dtype):
    """Gemma 3's mask lets them, however long the text before the image is."""
    directory = make_vision_model(tmp_path, "Gemma3")
    text = np.random.default_rng(0).integers(1, IMAGE, 400).tolist()
    reason = loaded(directory, dtype=dtype).why_unfit(Chains(directory).chain("s", text, A, [3], (5,)))
    assert reason.startswith("media_model: ")


def test_a_forward_pass_in_bfloat16_is_compared_in_bfloat16(directory, chains):
    policy = loaded(directory, dtype="bfloat16")
    assert policy.why_unfit(chains.chain("s", [1, 2], A, [3], (5,))) is None
