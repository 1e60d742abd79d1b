"""The support of sampled tokens: what is stored of it is what was sampled from, in the order of its ids."""

import dataclasses
import datetime
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger_samples import make_turn

from turnwise.chains import merge_session, split_session
from turnwise.features.supports import SUPPORT, as_json, pack, unpack
from turnwise.features.verify.records import Verification, check_turns
from turnwise.store.rows import turn_row
from turnwise.types import Turn

IDS = st.sets(st.integers(0, 2**31 - 1), max_size=40)


@given(st.lists(st.none() | IDS, max_size=20))
def test_a_support_is_read_as_it_was_stored(support: list[set[int] | None]) -> None:
    stored = [None if ids is None else list(ids) for ids in support]
    assert as_json(unpack(pack(stored))) == [None if ids is None else sorted(ids) for ids in support]


@pytest.mark.parametrize(
    "damaged", [b"", b"no zlib", pack([[1, 2]])[:-3], zlib.compress(b"\x05\0\0\0"), zlib.compress(b"")]
)
def test_a_damaged_support_is_an_error_that_says_so(damaged):
    with pytest.raises(ValueError, match="cannot"):
        unpack(damaged)


def sampled(number: int, parent: Turn | None = None, *support: list[int] | None) -> Turn:
    return dataclasses.replace(make_turn(f"t{number}", parent), parts={SUPPORT: pack(support)} if support else {})


def test_a_chain_has_the_support_of_the_tokens_that_it_trains():
    """Two prompt tokens and two sampled ones a turn; the second turn was sampled from the whole vocabulary."""
    first = sampled(1, None, [12, 15], None)
    second = sampled(2, first)
    third = sampled(3, second, [3, 32], [33])
    [chain] = merge_session([first, second, third])
    assert as_json(chain.parts[SUPPORT]) == [
        *(None, None, [12, 15], None),
        *(None, None, None, None),
        *(None, None, [3, 32], [33]),
    ]
    *_, single = split_session([first, second, third])
    assert as_json(single.parts[SUPPORT])[:10] == [None] * 10
    assert as_json(single.parts[SUPPORT])[10:] == [[3, 32], [33]]
    [plain] = merge_session([sampled(1)])
    assert not plain.parts


def test_a_support_of_other_tokens_than_the_turns_is_left_out_and_found_by_verify():
    for support in ([[12]], [[11], [13]], [[12], [14, 13, 13]]):
        turn = dataclasses.replace(sampled(1, None, *support), seq=0)
        report = Verification()
        assert not check_turns("s", 1, [turn], report, {})
        assert ["support" in each.place for each in report.mismatches] == [True]
    sound = dataclasses.replace(sampled(1, None, [12, 99], None), seq=0)
    assert check_turns("s", 1, [sound], Verification(), {})


def test_the_digest_of_a_turn_covers_its_support_and_is_as_before_without_one():
    plain = dataclasses.replace(sampled(1), created_at=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    cut = dataclasses.replace(plain, parts={SUPPORT: pack([[12], [13]])})
    assert turn_row(plain, 0)["digest"].hex() == "424ccf96ad19638ebb1b5f1a006225a0"
    assert turn_row(cut, 0)["digest"] != turn_row(plain, 0)["digest"]
