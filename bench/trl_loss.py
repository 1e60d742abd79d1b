"""TRL's GRPO loss on experiences of a ledger: `GRPOTrainer._compute_loss`, as TRL's own training step calls it.

It is configured to compute the trainer's default loss: PPO-clip with 0.2 and 0.28, ratios to the behaviour logprobs,
the same weight for each token of the batch (TRL's `dapo`), no KL. Rows are sorted by length before padding, which TRL
does not do, so that padding is minimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from trainer.batch.batch import Batch

ROWS_AT_ONCE = 8
"""TRL's default `per_device_train_batch_size`."""
PADDING = 0


class TrlLoss:
    """TRL's trainer around its own copy of the model."""

    def __init__(self, model: Path, scratch: Path, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        config = GRPOConfig(
            output_dir=str(scratch),
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=False,
            per_device_train_batch_size=ROWS_AT_ONCE,
            gradient_accumulation_steps=1,
            num_generations=ROWS_AT_ONCE,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            report_to="none",
        )
        self._device = device
        self._trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["1"] * ROWS_AT_ONCE}),
            processing_class=_tokenizer(),
        )
        self._trainer.current_gradient_accumulation_steps = 1  # TRL's training loop, which does not run here, sets it
        self._trainer.model.train()

    def micro_batches(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Return the inputs of `_compute_loss`, one row per experience."""
        order = sorted(range(len(batch.experiences)), key=lambda index: len(batch.experiences[index].tokens))
        parts = [order[start : start + ROWS_AT_ONCE] for start in range(0, len(order), ROWS_AT_ONCE)]
        return [self._padded(batch, part) for part in parts]

    def gradient(self, micro_batches: Sequence[dict[str, Tensor]]) -> float:
        """Compute loss and gradient; return the loss."""
        self._trainer.model.zero_grad(set_to_none=True)
        total = 0.0
        for inputs in micro_batches:
            loss = self._trainer._compute_loss(self._trainer.model, inputs)  # noqa: SLF001  the measured function
            loss.backward()
            total += loss.item()
        return total

    def _padded(self, batch: Batch, members: Sequence[int]) -> dict[str, Tensor]:
        """Return prompts padded on the left and completions padded on the right, with a mask of sampled tokens."""
        found = [batch.experiences[member] for member in members]
        prompts = [e.tokens[: e.prompt_length] for e in found]
        follow = [slice(e.prompt_length, None) for e in found]
        completions = [e.tokens[rest] for e, rest in zip(found, follow, strict=True)]
        columns = {
            "prompt_ids": _pad(prompts, left=True),
            "prompt_mask": _pad([np.ones_like(prompt) for prompt in prompts], left=True),
            "completion_ids": _pad(completions),
            "completion_mask": _pad([np.ones_like(completion) for completion in completions]),
            "tool_mask": _pad([e.loss_mask[rest].astype(np.int64) for e, rest in zip(found, follow, strict=True)]),
            "old_per_token_logps": _pad([e.logprobs[rest] for e, rest in zip(found, follow, strict=True)]),
            "advantages": torch.tensor([batch.table.advantages[batch.tokens_of[member][0]] for member in members]),
            "num_items_in_batch": torch.tensor(float(len(batch.table))),
        }
        return {name: column.to(self._device) for name, column in columns.items()}


def num_tokens(micro_batches: Sequence[dict[str, Tensor]]) -> int:
    """Return the number of tokens that go through the model, including padding."""
    return sum(inputs["prompt_ids"].numel() + inputs["completion_ids"].numel() for inputs in micro_batches)


def _pad(rows: Sequence[np.ndarray], *, left: bool = False) -> Tensor:
    width = max(map(len, rows))
    padded = [np.pad(row, (width - len(row), 0) if left else (0, width - len(row))) for row in rows]
    stacked = torch.from_numpy(np.stack(padded))
    return stacked if stacked.is_floating_point() else stacked.long()


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer that the constructor requires; no text is tokenised."""
    words = Tokenizer(models.WordLevel({"<pad>": PADDING, "1": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
