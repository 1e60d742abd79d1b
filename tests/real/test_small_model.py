import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from turnwise.default_models import trail
from turnwise.default_models.small_model import (
    SPEC_FILE,
    SmallModelSpec,
    assistant_mask,
    build_small_model,
    train_tokenizer,
)

TINY = SmallModelSpec(hidden_size=32, intermediate_size=64, num_layers=1, num_warm_up_steps=3)

CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "Kim"}'}}

CONVERSATION = [
    {"role": "system", "content": trail.SYSTEM_PROMPT},
    {"role": "user", "content": "Follow each boss from Kim. Which city?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"city": "Oslo"}'},
    {"role": "assistant", "content": 'The answer is "Oslo".'},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "Both at once:", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(SmallModelSpec())


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_model(tmp_path_factory.mktemp("small") / "model", TINY)


def ids_of(tokenizer: PreTrainedTokenizerFast, messages: list[dict], *, prompt: bool) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=trail.TOOLS, add_generation_prompt=prompt)["input_ids"]


def test_the_template_writes_chatml_with_hermes_tool_calls(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION, tools=trail.TOOLS, tokenize=False, add_generation_prompt=True)
    call = '<tool_call>\n{"name": "lookup", "arguments": {"name": "Kim"}}\n</tool_call>'
    assert text == (
        '<|im_start|>system\nLook people up, then reply: The answer is "CITY".\n<tools>\n'
        '{"name": "lookup", "description": "Look a person up.", "parameters": {"type": "object", '
        '"properties": {"name": {"type": "string"}}, "required": ["name"]}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nFollow each boss from Kim. Which city?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"city": "Oslo"}\n</tool_response><|im_end|>\n'
        '<|im_start|>assistant\nThe answer is "Oslo".<|im_end|>\n'
        "<|im_start|>user\nThanks.<|im_end|>\n"
        f"<|im_start|>assistant\nBoth at once:\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("end", [2, 4, 6])
def test_a_prompt_and_its_reply_are_a_prefix_of_every_later_prompt(tokenizer, end):
    prompt = ids_of(tokenizer, CONVERSATION[:end], prompt=True)
    reply = ids_of(tokenizer, CONVERSATION[: end + 1], prompt=False)
    whole = ids_of(tokenizer, CONVERSATION, prompt=True)
    assert reply[: len(prompt)] == prompt
    assert whole[: len(reply)] == reply


def test_the_warm_up_trains_only_replies_and_their_end_tokens(tokenizer):
    """The masked tokens of a conversation, joined, are the assistant's messages."""
    ids = ids_of(tokenizer, CONVERSATION[:5], prompt=False)
    header = tokenizer.encode("<|im_start|>assistant\n")
    mask = assistant_mask(ids, header, tokenizer.eos_token_id)
    assert tokenizer.decode([token for token, learnt in zip(ids, mask, strict=True) if learnt]) == (
        '<tool_call>\n{"name": "lookup", "arguments": {"name": "Kim"}}\n</tool_call><|im_end|>'
        'The answer is "Oslo".<|im_end|>'
    )


def test_the_same_spec_gives_the_same_weights_and_another_seed_gives_others(model_directory, tmp_path):
    """Bit for bit, in any state of the global random generator."""
    torch.manual_seed(99)
    weights = (model_directory / "model.safetensors").read_bytes()
    again = build_small_model(tmp_path / "again", TINY)
    assert (again / "model.safetensors").read_bytes() == weights
    other_spec = SmallModelSpec(seed=1, hidden_size=32, intermediate_size=64, num_layers=1, num_warm_up_steps=3)
    other = build_small_model(tmp_path / "other", other_spec)
    assert (other / "model.safetensors").read_bytes() != weights


def test_a_model_of_the_same_spec_is_reused_and_one_of_another_spec_is_replaced(tmp_path):
    """No model is trained twice, and a stale model is never used as a new one."""
    directory = tmp_path / "model"
    losses: list[float] = []
    build_small_model(directory, TINY, lambda _done, _total, loss: losses.append(loss))
    assert len(losses) == 3
    build_small_model(directory, TINY, lambda _done, _total, loss: losses.append(loss))
    assert len(losses) == 3
    shorter = SmallModelSpec(hidden_size=32, intermediate_size=64, num_layers=1, num_warm_up_steps=2)
    build_small_model(directory, shorter, lambda _done, _total, loss: losses.append(loss))
    assert len(losses) == 5
    assert json.loads((directory / SPEC_FILE).read_text())["spec"]["num_warm_up_steps"] == 2


def test_a_directory_with_other_files_is_not_changed(tmp_path):
    (tmp_path / "thesis.txt").write_text("42")
    with pytest.raises(FileExistsError, match="name an empty or a new directory"):
        build_small_model(tmp_path, TINY)
    assert (tmp_path / "thesis.txt").read_text() == "42"
