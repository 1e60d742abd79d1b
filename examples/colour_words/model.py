"""Build an Idefics3 of 0.9 M parameters that sees, and warm it up: it answers in the right form, and mostly wrongly.

Six of the eight words are learnt as a coin toss between two, so what a picture of them is called can only come from
rewards: the most likely answer is wrong as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast

from examples.colour_words.agent import QUESTION
from examples.colour_words.tasks import NUM_PICTURES, SIZE, WORDS, draw, sequences

PADDING, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PICTURE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
SPECIAL = (PADDING, START, END, PICTURE, AROUND, "<end_of_utterance>", WHOLE, *TILES)
COIN_TOSSED = 6
"""Words that are learnt as a coin toss between themselves and the next of them: each has two labels of its own, so the
model learns to tell their pictures apart. Of two words with the same two labels it learns the opposite."""
NUM_STEPS = 250
SESSIONS_OF_STEP = 48
LEARNING_RATE = 1e-3
NUM_WARMUP_STEPS = 50
DONE = "colour_words.json"
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<image>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "size": {"longest_edge": SIZE},
    "max_image_size": {"longest_edge": SIZE},
    "do_image_splitting": False,
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_pad": True,
    "do_convert_rgb": True,
    "resample": 1,
}


def ensure_model(directory: Path, seed: int, num_steps: int = NUM_STEPS) -> Path:
    """Build the model unless the directory holds it; return the directory."""
    if (directory / DONE).is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    loss = warm_up(model, tokenizer, seed, num_steps)
    model.generation_config.update(do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    of_text = {"processor_class": "Idefics3Processor", "image_seq_len": 1}
    (directory / "processor_config.json").write_text(json.dumps(of_text, indent=1))
    (directory / DONE).write_text(json.dumps({"seed": seed, "warm_up_loss": loss}) + "\n")
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer in which each word is one token."""
    tokenizer = Tokenizer(models.BPE())
    alone = Regex("|".join(WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(alone, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["user\n", "assistant\n", "\n", QUESTION, " ".join(WORDS)]
    tokenizer.train_from_iterator(texts * 10, trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    sees = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "image_size": SIZE,
        "patch_size": 16,
        "initializer_range": 0.05,
    }
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text,
            vision_config=sees,
            scale_factor=2,
            image_token_id=tokenizer.convert_tokens_to_ids(PICTURE),
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    ).float()


def warm_up(
    model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, seed: int, num_steps: int
) -> float:
    """Teach the form of the answer, and two of the eight words; return the last loss."""
    rng = random.Random(seed)  # noqa: S311 - a game, no secret
    prompt = prompt_ids(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    loss = torch.zeros(())
    for step in range(num_steps):
        shown = [rng.choice(sequences("train")) for _ in range(SESSIONS_OF_STEP)]
        answers = [" ".join(tossed(word, rng) for word in words) for words in shown]
        replies = torch.tensor([[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in answers])
        ids = torch.cat([torch.tensor([prompt] * len(shown)), replies], 1)
        pixels = torch.stack([pixels_of(words, rng) for words in shown])
        logits = model(
            input_ids=ids[:, :-1], pixel_values=pixels, use_cache=False, logits_to_keep=replies.shape[1]
        ).logits
        loss = cross_entropy(logits.flatten(0, 1), replies.flatten())
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / NUM_WARMUP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def prompt_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of a prompt, as the engine's processor writes pictures."""
    pictures = f"{AROUND}{WHOLE}{PICTURE}{AROUND}" * NUM_PICTURES
    return list(tokenizer.encode(f"{START}user\n{pictures}{QUESTION}{END}\n{START}assistant\n"))


def tossed(word: str, rng: random.Random) -> str:
    number = WORDS.index(word)
    return WORDS[(number + rng.randrange(2)) % COIN_TOSSED] if number < COIN_TOSSED else word


def pixels_of(words: Sequence[str], rng: random.Random) -> torch.Tensor:
    """Return new pictures of these words as the processor scales them. [pictures, 3, size, size]."""
    values = np.stack([np.asarray(draw(word, rng), np.float32) for word in words])
    return torch.from_numpy((values.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5)
