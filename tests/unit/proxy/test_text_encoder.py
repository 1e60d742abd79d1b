"""Text is tokenised as Hugging Face's `encode` does."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from unit.proxy.test_templates_of_many_families import small_tokenizer

from proxy.continuation.template import text_encoder

PARTS = st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool_call>", " ", "\n\n", "user", "誰?", "🙂", "a1", "\r"])
TOKENIZER = copy.deepcopy(small_tokenizer())
ENCODE = text_encoder(TOKENIZER)


@given(st.lists(PARTS | st.text(max_size=8), max_size=30).map("".join))
def test_any_text_gets_the_ids_of_encode(text: str) -> None:
    assert ENCODE(text) == TOKENIZER.encode(text, add_special_tokens=False)


def test_a_tokenizer_with_an_encode_of_its_own_is_called() -> None:
    class Doubling(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **given: Any) -> Any:
            return super()._encode_plus(text + text, *args, **given)

    tokenizer = Doubling(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert text_encoder(tokenizer)("user") == ENCODE("useruser")


def test_truncation_padding_and_post_processors_of_the_tokenizers_file_are_ignored() -> None:
    """Truncation to two tokens, padding to eight, and a first token that a post-processor adds."""
    tokenizer = copy.deepcopy(TOKENIZER)
    backend = tokenizer.backend_tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.post_processor = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", end)])
    text = "What is the capital of Norway?"
    assert text_encoder(tokenizer)(text) == ENCODE(text)
