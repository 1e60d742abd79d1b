"""A version as bytes, and the difference of two versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.engine_plugin.delta import apply, decode, difference
from turnwise.engine_plugin.layout import Layout, checksum_of


def buffer_of(words: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, np.uint16).view(np.uint8).copy())


def test_tensors_of_several_types_are_restored_from_their_buffer_and_its_description():
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.tensor(1.5), "c": torch.arange(7), "d": torch.zeros(0, 4)}
    layout = Layout.of(tensors)
    assert [slot.offset for slot in layout.slots] == [0, 32, 48, 112]  # 30, 4 and 56 bytes, each at a multiple of 16
    again = Layout.from_json(layout.as_json())
    assert again.slots == layout.slots
    assert again.num_bytes == 112
    found = dict(again.views(layout.pack(tensors)))
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_the_checksum_is_the_sum_of_the_words_times_their_odd_numbers():
    """1·5 + 3·7 + 5·11 = 81; exchanged words change it, and so does a block beyond the first."""
    words = torch.tensor([5, 7, 11])
    assert int(checksum_of(words.view(torch.uint8)), 16) == 81
    assert int(checksum_of(words[[1, 0, 2]].contiguous().view(torch.uint8)), 16) == 77
    long = torch.zeros((1 << 20) + 2, dtype=torch.int64)
    long[-1] = 1
    assert int(checksum_of(long.view(torch.uint8)), 16) == 2 * ((1 << 20) + 1) + 1


def test_a_delta_names_the_distance_to_each_changed_word():
    """Words 1 and 4 change; the first distance counts from the place before the buffer."""
    delta = difference(buffer_of([9, 9, 9, 9, 9, 9]), buffer_of([9, 8, 9, 9, 7, 9]))
    assert delta.distances.tolist() == [2, 3]
    assert delta.values.tolist() == [8, 7]
    assert delta.num_bytes == 2 * (1 + 2)


def test_a_distance_over_255_is_encoded_with_unchanged_words_in_between():
    new = [0] * 600
    new[599] = 5
    delta = difference(buffer_of([0] * 600), buffer_of(new))
    # One byte: 255 + 255 + 90 = 600, at 3 bytes a word. Two bytes: 600, at 4 bytes, which is less.
    assert delta.distances.tolist() == [600]
    many = [1] * 40 + new
    delta = difference(buffer_of([0] * 640), buffer_of(many))
    assert delta.distances.tolist() == [1] * 40 + [255, 255, 90]
    assert delta.values.tolist() == [1] * 40 + [0, 0, 5]


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 1.0])
def test_an_applied_delta_gives_the_new_buffer_bit_for_bit(share):
    generator = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(300, 301, generator=generator).bfloat16(), "n": torch.randn(64, generator=generator)}
    changed = torch.rand(300, 301, generator=generator) < share
    new = {"w": torch.where(changed, old["w"] * 1.01, old["w"]), "n": old["n"] + share}
    layout = Layout.of(old)
    before, after = layout.pack(old), layout.pack(new)
    delta = difference(before, after)
    apply(decode(delta.encode(), len(delta.values)), before)
    assert torch.equal(before, after)
    assert checksum_of(before) == checksum_of(after)


def test_a_delta_that_does_not_fit_is_refused():
    delta = difference(buffer_of([0] * 8), buffer_of([0] * 7 + [1]))
    with pytest.raises(ValueError, match="writes word 7 of a buffer of 4 words"):
        apply(delta, buffer_of([0] * 4))
    with pytest.raises(ValueError, match="cannot have 9 bytes"):
        decode(torch.zeros(9, dtype=torch.uint8), 2)
