"""The fake engine's tokenizer: reversible, and equal to the tokenizer files that it writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turnwise_fake_engine import tokens

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x":"é"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CONVERSATIONS = {
    "plain": ([{"role": "user", "content": "Hi"}], None),
    "system": ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß <b>dich</b>"}], None),
    "tools": (
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        [TOOL],
    ),
    "thinking": (
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "reasoning": "hm"}],
        None,
    ),
}


@given(st.text())
def test_text_is_decoded_from_its_ids_unchanged(text):
    assert tokens.decode(tokens.encode(text)) == text


@given(st.text())
def test_the_pieces_of_a_text_join_to_the_text(text):
    """A character outside ASCII comes with the token that completes it."""
    assert "".join(tokens.piecewise(tokens.encode(text), keep_control=True)) == text


def test_a_special_token_is_one_id_and_a_byte_is_its_value():
    # "<|im_start|>" is the second of the special tokens, which begin at 256; "A" is 65, "é" is C3 A9
    assert tokens.encode("<|im_start|>Aé") == [257, 65, 0xC3, 0xA9]


def test_control_tokens_are_not_part_of_a_replys_text():
    assert tokens.decode(tokens.encode("<think>a<|im_end|>"), keep_control=False) == "<think>a"


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_tokenizer_files_that_it_writes_render_the_same_ids(name, tmp_path):
    """The `root` of `/v1/models`, loaded with transformers, renders what the engine renders."""
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tokens.write_tokenizer(tmp_path))
    messages, tools = CONVERSATIONS[name]
    parsed = [tokens._normalised(message) for message in messages]
    theirs = loaded.apply_chat_template(parsed, tools=tools, tokenize=False, add_generation_prompt=True)
    ours = tokens.render(messages, tools)
    assert theirs == ours
    assert loaded.encode(ours, add_special_tokens=False) == tokens.encode(ours)
    assert loaded.decode(tokens.encode(ours), skip_special_tokens=False) == ours


def test_a_next_turns_prompt_extends_the_tokens_of_the_turn_before():
    asked = [{"role": "user", "content": "Hi"}]
    answered = [*asked, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "More"}]
    prompt = tokens.encode(tokens.render(asked, None))
    sampled = [*tokens.encode("Ho"), tokens.END_OF_TURN]
    assert tokens.encode(tokens.render(answered, None))[: len(prompt) + len(sampled)] == prompt + sampled
