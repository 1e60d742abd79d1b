"""The tokens of a prompt that the chat template added are distinguished from those of the messages."""

from __future__ import annotations

import itertools

import pytest
from turnwise_fake_engine import tokens

from proxy.routes.turns import scaffold_flags

SPECIAL = frozenset(tokens.SPECIAL_IDS)


def shown(prompt: str, messages: list[dict]) -> list[str]:
    """Return the parts of a prompt that are told to be texts of messages; one token is one byte."""
    ids = tokens.encode(prompt)
    pieces = {each: tokens.decode([each]) for each in ids}
    flags = scaffold_flags(ids, messages, pieces, SPECIAL, tokens.decode)
    assert len(flags) == len(ids)
    grouped = itertools.groupby(zip(ids, flags, strict=True), key=lambda pair: pair[1])
    return [tokens.decode([each for each, _ in pairs]) for flag, pairs in grouped if not flag]


@pytest.mark.parametrize(
    ("prompt", "messages", "expected"),
    [
        (
            "<|im_start|>user\nWho is Žofie — 誰?<|im_end|>\n<|im_start|>assistant\n",
            [{"role": "user", "content": "Who is Žofie — 誰?"}],
            ["Who is Žofie — 誰?"],
        ),
        (
            "<|im_end|>\n<|im_start|>tool\nKim<|im_end|>\n<|im_start|>user\nAnd\n\nthen?<|im_end|>\n",
            [
                {"role": "tool", "content": " Kim\n"},
                {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
            ],
            ["Kim", "And\n\nthen?"],
        ),
        (
            "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n",
            [{"role": "assistant", "content": "Yes.", "reasoning": "Hm."}],
            ["Hm.", "Yes."],
        ),
        # The template has changed the text: only special tokens are told apart.
        (
            "<|im_start|>user\nCHANGED<|im_end|>\n",
            [{"role": "user", "content": "changed"}],
            ["user\nCHANGED", "\n"],
        ),
        ("<|im_start|>assistant\n", [{"role": "assistant", "content": None}], []),
        ("<|im_start|>user\n誰", [{"role": "user", "content": "誰"}], ["誰"]),
    ],
)
def test_the_texts_of_messages_are_distinguished_from_the_scaffold(
    prompt: str, messages: list[dict], expected: list[str]
) -> None:
    assert shown(prompt, messages) == expected
