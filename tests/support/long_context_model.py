"""A random model with a long context: its replies are forced, so its weights do not matter, and it costs little.

One layer keeps a prompt of 100,000 tokens affordable on a CPU. The tokenizer is trained on this repository's text.
"""

import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turnwise.default_models.small_model import CHAT_TEMPLATE, CONTROL_TOKENS, END_OF_TURN, MARKUP_TOKENS, PADDING

ROOT = Path(__file__).parents[2]
VOCABULARY_SIZE = 4096
CONTEXT_TOKENS = 131_072


def build_long_context_model(directory: Path) -> Path:
    """Build the model into a directory unless it is there; return the directory."""
    if directory.exists():
        return directory
    staged = directory.with_suffix(".new")
    shutil.rmtree(staged, ignore_errors=True)
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(staged)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=CONTEXT_TOKENS,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                dtype="float32",
            )
        )
    model.save_pretrained(staged)
    return staged.rename(directory)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("proxy/**/*.py"))
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in texts), trainer)
    tokenizer.add_tokens(added)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
