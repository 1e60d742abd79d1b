"""Builds the demos' models on this machine, with no download: a Qwen3 of 0.7 M parameters in an agent's format.

Everything but the size is what a deployment has. The directory is in the Hugging Face layout,
the tokenizer is a byte-level BPE with ChatML and Hermes tool calls, the engine serves it with its stock parsers. The
tokenizer is trained on the task's own text, so that what never changes merges into few tokens and each name is one:
a tool call costs six tokens, which is what makes the demo quick. A short supervised warm-up teaches the format and
copying, and nothing of the task.
"""

from __future__ import annotations

import dataclasses
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

from turnwise.demo import shell_trail, trail

Progress = Callable[[int, int, float], None]
"""Called with the steps done, the steps in all and the latest loss."""

Batch = list[tuple[torch.Tensor, torch.Tensor]]
"""Parts of one batch, each the token ids and the mask of what is learnt, both [B, T]."""

WORLDS = {"trail": trail, "shell_trail": shell_trail}
"""The modules that write the warm-up's conversations."""

SPEC_FILE = "small_model.json"
"""Written last into the directory: the spec, and the digest of all that the model was made from."""

PADDING, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (PADDING, START_OF_TURN, END_OF_TURN)
"""Never shown to a client."""

MARKUP_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each, but text: the engine's tool parser has to see them."""

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
"""ChatML with Hermes tool calls. No message is rendered otherwise because of what follows it, so that the prompt of a
later turn extends the tokens of the earlier one."""


@dataclass(frozen=True)
class SmallModelSpec:
    """What the model is made from; the same spec gives the same bytes on the same machine."""

    world: str = "trail"
    """Whose conversations the warm-up has, a key of `WORLDS`: the format that the agent speaks."""

    seed: int = 0
    """Of the initial weights and of the warm-up's conversations."""

    vocabulary_size: int = 768
    """At most: the 256 bytes, the added tokens and the merges."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    init_std: float = 0.05

    num_warm_up_steps: int = 420
    num_conversations_per_step: int = 32
    learning_rate: float = 3e-3
    """Its peak: reached after a tenth of the steps, then falling to zero."""

    num_threads: int = 1
    """Of torch, while it builds. More change the last bits of the weights."""

    def digest(self) -> str:
        """Return the SHA-256 of the spec and of the code of the world and of this module."""
        made_from = [json.dumps(dataclasses.asdict(self), sort_keys=True).encode()]
        made_from += [Path(source).read_bytes() for source in self._sources()]
        return hashlib.sha256(b"\0".join(made_from)).hexdigest()

    def _sources(self) -> list[str]:
        """Return the files of the code that makes the model."""
        return [__file__, *dict.fromkeys(str(module.__file__) for module in (trail, WORLDS[self.world]))]


def build_small_model(directory: Path, spec: SmallModelSpec | None = None, on_progress: Progress | None = None) -> Path:
    """Build the model into `directory` unless the same one already stands there; return the directory.

    The directory appears whole or not at all, and replaces a model of another spec.

    Raises:
        FileExistsError: `directory` holds something that this function did not build.
    """
    spec = spec or SmallModelSpec()
    if _built_digest(directory) == spec.digest():
        return directory
    if directory.exists() and _built_digest(directory) is None and any(directory.iterdir()):
        raise FileExistsError(f"{str(directory)!r} holds no small model: name an empty or a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_model(staging, spec, on_progress)
        _replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def ensure_small_model(
    directory: Path, report: Callable[[str, str], None], seed: int = 0, *, world: str = "trail"
) -> Path:
    """Build the model unless it is there already, and report it, because it takes a minute; return the directory."""
    if not (directory / SPEC_FILE).is_file():
        report("model", f"building the small demo model into {directory}, about a minute, once")
    return build_small_model(directory, SmallModelSpec(seed=seed, world=world))


def train_tokenizer(spec: SmallModelSpec) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on the task's conversations, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    # A name is a token of its own wherever it stands, and so is the role that opens a message: otherwise merges would
    # run from the prompt into the reply, and the tokens of a conversation would depend on where it was cut.
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
    """Mark what the assistant says: all after a header, up to and with the end of the message."""
    mask: list[bool] = []
    speaking = False
    for position, token in enumerate(ids, start=1):
        mask.append(speaking)
        speaking = token != end if speaking else ids[position - len(header) : position] == header
    return mask


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap a tokenizer for transformers and the engine."""
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
    """Yield warm-up conversations over tasks that are in no split of the demo."""
    rng = random.Random(f"warm-up/{spec.seed}")  # noqa: S311 - a game, no secret
    for index in range(count):
        yield WORLDS[spec.world].warm_up_conversation(trail.make_task("warm_up", index, spec.seed), rng)


def _render(tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec, conversation: list[trail.Message]) -> str:
    return str(tokenizer.apply_chat_template(conversation, tools=WORLDS[spec.world].TOOLS, tokenize=False))


def _between_added_tokens(
    tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec, conversations: Iterator[list[trail.Message]]
) -> Iterator[str]:
    """Yield the stretches of text that the merges are learnt from: what lies between two added tokens."""
    boundary = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)))
    for conversation in conversations:
        yield from boundary.split(_render(tokenizer, spec, conversation))


def _initial_model(tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights, in 32-bit floats."""
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
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def _warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, spec: SmallModelSpec, on_progress: Progress | None
) -> float:
    """Train on the assistant's tokens of the warm-up's conversations; return the last loss."""
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
    """Add the gradient of the mean loss over the assistant's tokens of the batch; return that loss."""
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
    """Yield one batch a step, cut by length into two parts, which saves most of the padding and biases nothing."""
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
    """Return token ids and the mask of the assistant's tokens, both [B, T], padded on the right."""
    width = max(map(len, rows))
    masks = [assistant_mask(row, header, end) for row in rows]
    ids_BT = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    return ids_BT, torch.tensor([mask + [False] * (width - len(mask)) for mask in masks])


def _write_model(directory: Path, spec: SmallModelSpec, on_progress: Progress | None) -> None:
    """Write tokenizer, weights, generation defaults and, last, the spec."""
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
    built = {"digest": spec.digest(), "spec": dataclasses.asdict(spec), "warm_up_loss": loss}
    (directory / SPEC_FILE).write_text(json.dumps(built, indent=2) + "\n")


def _built_digest(directory: Path) -> str | None:
    """Return the digest of the model that stands in the directory, None where there is none."""
    try:
        return str(json.loads((directory / SPEC_FILE).read_text())["digest"])
    except FileNotFoundError:
        return None


def _replace(staging: Path, directory: Path) -> None:
    """Move the staged directory to its place; what stood there goes first."""
    staging.chmod(0o755)
    if directory.exists():
        shutil.rmtree(directory)
    staging.rename(directory)
