"""What training changed besides its task: loss and KL divergence on conversations that have nothing to do with it.

The replies were sampled by version 0, so the divergence is that on text of its own. Both models run here, without the
engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.types import PolicyKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgetting:
    """How far a version is from version 0 on unrelated conversations."""

    num_conversations: int
    num_tokens: int
    """Tokens of the replies, which alone are compared."""
    loss_before: float
    """Mean of −log p under version 0, nats a token."""
    loss_after: float
    kl: float
    """Mean of KL(version 0 ‖ version) over the whole vocabulary, nats a token."""


def measure_forgetting(base: Path, version: Path, kind: PolicyKind, conversations: Path) -> Forgetting:
    """Compare a version with version 0.

    Args:
        base: Directory of version 0.
        version: Directory of the version: an adapter, or a whole model.
        kind: Which of them it is.
        conversations: JSON Lines with `messages`: a question and a reply of version 0.
    """
    import torch
    from torch.nn.functional import kl_div
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # more would wait for one another on a busy machine
    tokenizer = AutoTokenizer.from_pretrained(base)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(base if kind is PolicyKind.LORA else version, dtype=torch.float32)
    if kind is PolicyKind.LORA:
        from peft import PeftModel

        after = PeftModel.from_pretrained(after, version)
    losses = torch.zeros(3, dtype=torch.float64)
    lines = conversations.read_text(encoding="utf-8").splitlines()
    num_tokens = 0
    for line in lines:
        ids, start = _tokens(tokenizer, json.loads(line)["messages"])
        reply = torch.tensor(ids[start:])
        with torch.no_grad():
            p, q = (model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1) for model in (before, after))
        losses[0] -= p.gather(1, reply[:, None]).sum()
        losses[1] -= q.gather(1, reply[:, None]).sum()
        losses[2] += kl_div(q, p, log_target=True, reduction="sum")
        num_tokens += len(reply)
    loss_before, loss_after, kl = (losses / num_tokens).tolist()
    return Forgetting(
        num_conversations=len(lines), num_tokens=num_tokens, loss_before=loss_before, loss_after=loss_after, kl=kl
    )


def _tokens(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], int]:
    """Return the tokens of a conversation, and where its reply begins."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = prompt + messages[-1]["content"]
    num_prompt = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return tokenizer(whole, add_special_tokens=False)["input_ids"], num_prompt
