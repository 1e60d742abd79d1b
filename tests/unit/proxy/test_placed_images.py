"""Where images stand in a prompt: put there by the engine's plug-in, and checked in the echo by the proxy."""

import base64
import functools
import json
import types
from typing import Any

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError

from proxy.features.consent.redaction import redacted_document
from proxy.features.images import PLACED, is_expanded
from turnwise.engine_plugin.features.images import (
    GivenIds,
    check_not_typed,
    pixels_digest,
    placed,
    places_text,
    refuse_typed_placeholders,
    refuse_unfit_images,
)

FIRST, SECOND = [7, 9, 9, 8], [7, 9, 8]
"""What the processor puts for two images; 9 stands for features, and is what a template has for an image."""


def update(full: list[int]) -> Any:
    content = types.SimpleNamespace(full=full, is_embed=lambda ids: torch.tensor(ids) == 9)
    return types.SimpleNamespace(content=content, target=[9])


def given(ids: list[int], *ranges: list[int], first: int) -> GivenIds:
    found = GivenIds(ids)
    found.ranges, found.first = ranges, first
    return found


def test_a_stored_image_stays_a_new_one_is_expanded_and_a_sampled_placeholder_is_text():
    stored = [1, *FIRST, 2, 9, 3]  # the 9 between 2 and 3 was sampled
    ids, found = placed(given([*stored, 4, 9, 5], [1, 4], first=len(stored)), [update(FIRST), update(SECOND)])
    assert ids == [*stored, 4, *SECOND, 5]
    assert [(each["start_idx"], each["tokens"], each["is_embed"].tolist()) for each in found] == [
        (1, FIRST, [False, True, True, False]),
        (9, SECOND, [False, True, False]),
    ]


@pytest.mark.parametrize(
    ("ids", "updates"),
    [
        ([1, *SECOND, 8, 2, 4, 9, 5], [FIRST, SECOND]),  # another stored image
        ([1, *FIRST, 2, 4, 5], [FIRST, SECOND]),  # no placeholder for the new one
        ([1, *FIRST, 2, 9, 4, 9, 5], [FIRST, SECOND]),  # one that a person typed
        ([1, *FIRST, 2, 9, 5], [FIRST]),  # an image less than placeholders
    ],
)
def test_other_placeholders_than_the_processors_are_refused(ids, updates):
    with pytest.raises(Exception, match="media_rerendered: "):
        placed(given(ids, [1, 4], first=6), list(map(update, updates)))


@pytest.mark.parametrize(
    ("sent", "found", "places", "expected"),
    [
        ([1, 9, 2], [1, 7, 9, 9, 8, 2], [(1, 4)], True),
        ([1, 9, 2, 9], [1, *FIRST, 2, *SECOND], [(1, 4), (6, 3)], True),
        ([9, 2], [1, *FIRST, 2], [(1, 4)], False),  # an id before it
        ([1, 9, 2], [1, *FIRST, 3], [(1, 4)], False),  # another id after it
        ([1, 9, 2, 9], [1, *FIRST, 2, *SECOND], [(1, 4), (5, 3)], False),
        ([1, 9, 2, 3], [1, *FIRST, 2, *SECOND], [(1, 4), (6, 3)], False),
        ([1, 9, 9, 2], [1, *FIRST, *SECOND, 2], [(5, 3), (1, 4)], False),  # out of order
    ],
)
def test_an_echo_is_what_was_sent_but_for_placeholders(sent, found, places, expected):
    assert is_expanded(np.array(sent, np.int32), np.array(found, np.int32), places) is expected


def test_places_are_read_from_a_reply_and_taken_out_of_it():
    """vLLM returns no pixels of an image that its cache has sent before, so their digest is kept."""
    pixels = types.SimpleNamespace(data=torch.ones(2, 2))
    place = types.SimpleNamespace(offset=5, length=4, is_embed=torch.tensor([False, True, False, True]))
    whole = types.SimpleNamespace(offset=9, length=2, is_embed=None)
    kept: dict[str, str] = {}

    def prompt(*items: Any) -> dict[str, Any]:
        held = {"mm_hashes": ["a", "b"], "mm_kwargs": items, "mm_placeholders": [place, whole]}
        return {name: {"image": value} for name, value in held.items()}

    first = places_text(prompt({"pixel_values": pixels}, None), "settings", kept)
    tensors = types.SimpleNamespace(data=[torch.ones(2, 2)])
    again = places_text(prompt(None, {"pixel_values": tensors}), "settings", kept)
    assert again == first
    digest = pixels_digest(torch.ones(2, 2))
    assert digest.startswith("float32:")
    assert digest != pixels_digest(torch.ones(2, 2).double())
    text = json.dumps({"a": '"turnwise_prompt":"x"', "turnwise_prompt": first, "b": 1}).encode()
    assert PLACED.sub(b"", text) == json.dumps({"a": '"turnwise_prompt":"x"', "b": 1}).encode()
    assert json.loads(base64.b64decode(PLACED.search(text)[1])) == [
        {"offset": 5, "length": 4, "runs": [[6, 1], [8, 1]], "processor": "settings", "pixels": digest},
        {"offset": 9, "length": 2, "runs": [[9, 2]], "processor": "settings", "pixels": ""},
    ]


def test_a_redactor_leaves_the_names_of_images_and_media_alone_and_no_text_that_begins_like_them():
    media = [{"url": "image:" + "5" * 64}, {"url": "data:audio/wav;base64,555="}]
    texts = ["call 555", "data: call 555", "data:text/plain,555", "data:a/b;base64,aa== call 555"]
    found = redacted_document([*media, *texts], lambda text: text.replace("5", "x"))
    assert found == [*media, *(text.replace("5", "x") for text in texts)]


LETTERS = types.SimpleNamespace(decode=lambda ids: "".join(chr(96 + each) for each in ids))
"""A tokenizer of the letters from `a` on; a token beyond 26 is the text `bc`."""


@pytest.mark.parametrize(
    ("ids", "is_refused"),
    [
        ([1, 2, 3, 4, 2, 3, 5], False),  # one for each image
        ([2, 3, 1, 2, 3, 4, 2, 3], True),  # and one that somebody typed before them
        ([1, 2, 3, 4, 2, 3, 5, 2, 3], True),  # or behind them
        ([1, 2, 3, 4], False),  # too few are vLLM's to refuse
    ],
)
def test_a_prompt_with_more_placeholders_than_images_is_refused_by_what_somebody_typed(ids, is_refused):
    images = [[types.SimpleNamespace(target=[2, 3])]] * 2
    if is_refused:
        with pytest.raises(Exception, match="media_placeholder: a text of the messages has 'bc'"):
            check_not_typed(LETTERS, ids, images)
    else:
        check_not_typed(LETTERS, ids, images)


def test_a_placeholder_that_is_text_of_other_tokens_is_refused_and_one_at_a_place_is_not_searched():
    """vLLM searches the text where it finds no tokens; a model with a fixed place of its images has no target."""
    merged = types.SimpleNamespace(decode=lambda ids: "".join({7: "bc"}.get(each, chr(96 + each)) for each in ids))
    with pytest.raises(Exception, match="media_placeholder"):
        check_not_typed(merged, [7, 1, 2, 3], [[types.SimpleNamespace(target=[2, 3])]])
    check_not_typed(merged, [7, 1, 2, 3], [[types.SimpleNamespace(target=object())]])
    named = [[types.SimpleNamespace(target=[each])] for each in (1, 2)]  # each image has a name of its own
    check_not_typed(merged, [1, 2, 3], named)


@pytest.mark.parametrize("join", ["_get_full_multimodal_text_prompt", "get_full_multimodal_text_prompt"])
@pytest.mark.parametrize(
    ("texts", "interleave", "is_refused"),
    [
        (["look at"], False, False),
        (["<##IMAGE##>", "look at"], True, False),
        (["a page with <image> in it"], False, True),
        (["<##IMAGE##>", "a page with <image>"], True, True),
        (["<##IMAGE##>", "<##IMAGE##>"], True, True),
    ],
)
def test_vllm_refuses_a_message_whose_text_it_would_take_for_the_place_of_its_image(
    join, texts, interleave, is_refused
):
    chat = types.SimpleNamespace(**{join: lambda *given, **_: given})
    refuse_typed_placeholders(chat)
    call = functools.partial(getattr(chat, join), {"<##IMAGE##>": ["<image>"]}, texts, interleave)
    if is_refused:
        with pytest.raises(Exception, match="media_placeholder: a text of the messages has '<"):
            call()
    else:
        assert call()[1] == texts


def test_an_image_that_the_processor_refuses_is_refused_in_its_words_and_other_errors_stay():
    class Context:
        def call_hf_processor(self, processor: Any, data: Any) -> None:
            try:
                processor()
            except Exception as error:
                raise ValueError(f"Failed to apply {processor} on data={data}") from error

    def fails(error: Exception) -> Any:
        def process() -> None:
            raise error

        return process

    refuse_unfit_images(Context)
    ratio = ValueError("absolute aspect ratio must be smaller than 200, got 300.0")
    refusal = (
        "^the model's image processor refuses an image: absolute aspect ratio must be smaller than 200, got 300.0 "
    )
    with pytest.raises(VLLMValidationError, match=refusal):
        Context().call_hf_processor(fails(ratio), {"images": ["pixels"]})
    for error, data in ((ratio, {"text": "no image"}), (MemoryError(), {"images": ["pixels"]})):
        with pytest.raises(ValueError, match="Failed to apply"):
            Context().call_hf_processor(fails(error), data)
