"""What a client's masks may cost the trainer: a turn that would cost more carries no loss, and the reason is named."""

import itertools
import logging
import os

import numpy as np
import pytest
import tokenizers
import transformers
from support.tiny_models import config_of

from trainer.features.supports import grammars
from trainer.features.supports.grammars import ends_in_time
from trainer.features.supports.turns import Vocabulary, processors

LETTERS = ["<end>", *"abcdefgh"]
END, A, B = 0, 1, 2
REPLY = np.array([A, B, END])


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Vocabulary:
    directory = tmp_path_factory.mktemp("letters")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({text: index for index, text in enumerate(LETTERS)}, []))
    backend.add_special_tokens(LETTERS[:1])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template="{{ messages }}"
    )
    fast.save_pretrained(directory)
    config_of("Qwen3", vocab_size=len(LETTERS)).save_pretrained(directory)
    return Vocabulary(str(directory))


WORDS = ["".join(each) for each in itertools.islice(itertools.product("abcdefgh", repeat=7), 50_000)]
"""50,000 choices, whose grammar takes 20 s of CPU time even with nine tokens."""


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"structured_outputs": {"choice": WORDS}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"enum": WORDS}}, "grammar_backend": "xgrammar"}, "structured_outputs"),
        ({"structured_outputs": {"json": '{"items":' * 100_000}, "grammar_backend": "xgrammar"}, "structured_outputs"),
        ({"bad_words": ["a"] * 100_000}, "bad_words"),
        ({"bad_words": ["a" * 2**19]}, "bad_words"),
    ],
    ids=["choices", "enum", "a deep schema", "bad words", "a long bad word"],
)
def test_masks_that_cost_much_are_the_reason_of_their_turn(letters, caplog, asked, name):
    with caplog.at_level(logging.INFO):
        assert processors(asked, REPLY[:0], REPLY, None, letters) == name
        assert processors(asked, REPLY[:0], REPLY, None, letters) == name
    assert f"{name} cannot be applied again" in caplog.text


@pytest.mark.parametrize(
    "asked",
    [{"bad_words": ["b"] * 10}, {"min_tokens": 4_000, "stop_token_ids": [*range(1, 1001)]}],
    ids=["words", "ends"],
)
def test_many_places_of_many_words_or_ends_are_the_reason_too(letters, asked):
    """4,000 tokens by 1,001 ends, or by ten words."""
    sampled = np.array([A] * 500_000 if "bad_words" in asked else [A] * 4_000)
    assert processors(asked, REPLY[:0], sampled, None, letters) == next(iter(asked))
    assert processors(asked, REPLY[:0], REPLY, None, letters) is not None


def test_a_grammar_that_compiles_in_time_is_walked(letters):
    found = processors({"structured_outputs": {"choice": WORDS[:100]}}, REPLY[:0], np.array([A, A]), None, letters)
    assert found.grammar is not None


def test_a_walk_that_takes_long_or_has_many_masks_is_given_up(letters, monkeypatch):
    asked = {"structured_outputs": {"regex": "[ab]+"}}
    assert processors(asked, REPLY[:0], REPLY, None, letters).grammar is not None
    for limit in ("WALK_CPU_SECONDS", "MASK_BYTES"):
        with monkeypatch.context() as narrow:
            narrow.setattr(grammars, limit, -1)
            assert processors(asked, REPLY[:0], REPLY, None, letters) == "structured_outputs"


def test_a_compilation_is_ended_after_its_cpu_time_its_memory_and_a_silence(monkeypatch):
    monkeypatch.setattr(grammars, "COMPILE_CPU_SECONDS", 1)
    assert ends_in_time(lambda: None)
    assert ends_in_time(lambda: int("what does not compile"))
    assert not ends_in_time(lambda: [None for _ in itertools.count()])
    assert not ends_in_time(lambda: bytearray(2**40))
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.2)
    assert not ends_in_time(lambda: os.read(os.pipe()[0], 1))
