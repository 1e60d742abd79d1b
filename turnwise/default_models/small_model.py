"""Build a model on this machine, without a download: a Qwen3 of 0.7 M parameters.

Except for its size, the model is like a deployed one. The directory has the Hugging Face layout, the tokenizer is a
byte-level BPE with ChatML and Hermes tool calls, and the engine serves it with its standard parsers. The tokenizer is
trained on the task's text: fixed phrases become few tokens and each name becomes one token. A tool call takes six
tokens, which keeps the demo short. A short supervised warm-up teaches the format and copying, but not the task.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turnwise.default_models import trail
from turnwise.types import Json

Progress = Callable[[int, int, float], None]
"""Called with the number of finished steps, the total number of steps, and the latest loss."""

Batch = list[tuple[torch.Tensor, torch.Tensor]]
"""Parts of one batch: the token ids and the mask of the tokens in the loss, both [B, T]."""

SPEC_FILE = "small_model.json"
VERSION = 1
"""Raise it with each change of this package that changes the model: directories of another version are replaced."""

PADDING, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (PADDING, START_OF_TURN, END_OF_TURN)

MARKUP_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Each is one token but not a special token, because the engine's tool parser reads them in the text."""

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if has_system else '') }}
    {%- if tools %}
        {{- '\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n{"name": ' + tool.function.name | tojson }}
            {{- ', "description": ' + (tool.function.description or '') | tojson }}
            {{- ', "parameters": ' + (tool.function.parameters or {}) | tojson + '}' }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user\\n' }}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '' if loop.first and not message.content else '\\n' }}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with Hermes tool calls. The rendering of a message does not depend on the messages after it, so the prompt of
a later turn extends the tokens of the earlier turn."""


@dataclass(frozen=True)
class SmallModelSpec:
    """The parameters of the model. The same spec gives the same bytes on the same machine."""

    warm_up: trail.WarmUp = trail.WARM_UP
    """The conversations that it learns; they determine the agent's format."""

    seed: int = 0

    vocabulary_size: int = 768
    """Maximum size: the 256 bytes, the added tokens and the merges."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    init_std: float = 0.05
    tied: bool = False

    num_warm_up_steps: int = 420
    num_conversations_per_step: int = 32
    learning_rate: float = 3e-3

    num_threads: int = 1
    """Threads of torch during the build. Another number changes the last bits of the weights."""

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([VERSION, self.named()], sort_keys=True).encode()).hexdigest()

    def named(self) -> Json:
        """Return the parameters as JSON."""
        return {**vars(self), "warm_up": self.warm_up.name}


def build_small_model(directory: Path, spec: SmallModelSpec | None = None, on_progress: Progress | None = None) -> Path:
    """Build the model into `directory`, unless the directory contains the same model; return the directory.

    The directory is created completely or not at all. A model of another spec is replaced.
    """
    spec = spec or SmallModelSpec()
    if _built_digest(directory) == spec.digest():
        return directory
    if directory.exists() and _built_digest(directory) is None and any(directory.iterdir()):
        raise FileExistsError(f"{str(directory)!r} contains no small model: name an empty or a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_model(staging, spec, on_progress)
        _replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def ensure_small_model(
    directory: Path, report: Callable[[str, str], None], seed: int = 0, warm_up: trail.WarmUp = trail.WARM_UP
) -> Path:
    """Build the model if it does not exist, and report the build, which takes a minute; return the directory."""
    if not (directory / SPEC_FILE).is_file():
        report("model", f"building the small demo model into {directory}, about a minute, once")
    return build_small_model(directory, SmallModelSpec(warm_up, seed))


def train_tokenizer(spec: SmallModelSpec) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # Names, and the role at the start of a message, are always separate tokens. Otherwise merges could extend from the
    # prompt into the reply, and the tokens of a conversation would depend on where the prompt ends.
    words = "|".join((*trail.NAMES, *trail.CITIES))
    alone = Regex(rf"\A(?:system|user|assistant)\n|\b(?:{words})\b")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(alone, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocabulary_size - len(added),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chat = _with_template(tokenizer)
    tokenizer.train_from_iterator(_between_added_tokens(chat, spec, _conversations(spec, 2000)), trainer)
    tokenizer.add_tokens(added)
    return _with_template(tokenizer)


def assistant_mask(ids: list[int], header: list[int], end: int) -> list[bool]:
    """Mark the assistant's tokens: those after a header, up to and including the end of the message."""
    mask: list[bool] = []
    speaking = False
    for position, token in enumerate(ids, start=1):
        mask.append(speaking)
        speaking = token != end if speaking else ids[position - len(header) : position] == header
    return mask


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _conversations(spec: SmallModelSpec, count: int) -> Iterator[list[trail.Message]]:
    rng = random.Random(f"warm-up/{spec.seed}")  # noqa: S311 - a game, no secret
    for index in range(count):
        yield spec.warm_up.conversation(trail.make_task("warm_up", index, spec.seed), rng)


def _render(tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec, conversation: list[trail.Message]) -> str:
    return str(tokenizer.apply_chat_template(conversation, tools=spec.warm_up.tools, tokenize=False))


def _between_added_tokens(
    tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec, conversations: Iterator[list[trail.Message]]
) -> Iterator[str]:
    boundary = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)))
    for conversation in conversations:
        yield from boundary.split(_render(tokenizer, spec, conversation))


def _initial_model(tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            initializer_range=spec.init_std,
            max_position_embeddings=2048,
            tie_word_embeddings=spec.tied,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def _warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec, on_progress: Progress | None
) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        spec.learning_rate,
        total_steps=spec.num_warm_up_steps,
        pct_start=0.1,
        anneal_strategy="linear",
        cycle_momentum=False,
    )
    model.train()
    loss = 0.0
    for done, batch in enumerate(_batches(tokenizer, spec), start=1):
        loss = _accumulate_gradient(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if on_progress is not None:
            on_progress(done, spec.num_warm_up_steps, loss)
    return loss


def _accumulate_gradient(model: Qwen3ForCausalLM, batch: Batch) -> float:
    num_learnt = sum(int(mask_BT.sum()) for _, mask_BT in batch)
    total = 0.0
    for ids_BT, mask_BT in batch:
        hidden_BTH = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
        learnt_BT = mask_BT[:, 1:]
        logits_NV = model.lm_head(hidden_BTH[learnt_BT])
        loss = torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][learnt_BT], reduction="sum") / num_learnt
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _batches(tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec) -> Iterator[Batch]:
    """Yield one batch per step, split by length into two parts to reduce padding; the loss does not change."""
    size = spec.num_conversations_per_step
    conversations = _conversations(spec, spec.num_warm_up_steps * size)
    rows = tokenizer([_render(tokenizer, spec, conversation) for conversation in conversations])["input_ids"]
    header = tokenizer.encode(f"{START_OF_TURN}assistant\n")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for start in range(0, len(rows), size):
        batch = sorted(rows[start : start + size], key=len)
        parts = [part for part in (batch[: size // 2], batch[size // 2 :]) if part]
        yield [_padded(part, header, end, pad) for part in parts]


def _padded(rows: list[list[int]], header: list[int], end: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    masks = [assistant_mask(row, header, end) for row in rows]
    ids_BT = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    return ids_BT, torch.tensor([mask + [False] * (width - len(mask)) for mask in masks])


def _write_model(directory: Path, spec: SmallModelSpec, on_progress: Progress | None) -> None:
    """Write tokenizer, weights and generation defaults; the spec comes last."""
    threads = torch.get_num_threads()
    torch.set_num_threads(spec.num_threads)
    try:
        tokenizer = train_tokenizer(spec)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            model = _initial_model(tokenizer, spec)
            loss = _warm_up(model, tokenizer, spec, on_progress)
    finally:
        torch.set_num_threads(threads)
    tokenizer.save_pretrained(directory)
    model.generation_config.update(do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # written private; the engine may run as another user
    built = {"digest": spec.digest(), "spec": spec.named(), "warm_up_loss": loss}
    (directory / SPEC_FILE).write_text(json.dumps(built, indent=2) + "\n")


def warm_up_loss(directory: Path) -> float:
    """Return the loss of a built model in the last step of its warm-up."""
    return float(json.loads((directory / SPEC_FILE).read_text())["warm_up_loss"])


def _built_digest(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / SPEC_FILE).read_text())["digest"])
    except FileNotFoundError:
        return None


def _replace(staging: Path, directory: Path) -> None:
    staging.chmod(0o755)
    if directory.exists():
        shutil.rmtree(directory)
    staging.rename(directory)
