"""A sampler's distribution, written for one token at a time in plain Python, to compare the trainer's with."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


def processed_logits(
    logits: Tensor,
    prompt: Sequence[int],
    before: Sequence[int],
    sampling: dict[str, Any],
    *,
    support: Collection[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    ends: Sequence[int] = (),
) -> Tensor:
    """Return the logits of the next token after all processors and the temperature; -inf where it cannot be sampled.

    Args:
        logits: The model's own.
        prompt: Ids of the prompt.
        before: Ids that were sampled since.
        sampling: The request's parameters.
        support: The ids that top-k, top-p and min-p left; None for all.
        bad_words: Sequences of ids whose last one may not follow the others.
        ends: Ids that `min_tokens` rules out.
    """
    found = list(logits)
    size = len(found)
    out = set()
    if sampling.get("allowed_token_ids"):
        out |= set(range(size)) - set(sampling["allowed_token_ids"])
    for *start, last in bad_words:
        if list(before[len(before) - len(start) :]) == start:
            out.add(last)
    if len(before) < sampling.get("min_tokens", 0):
        out |= set(ends)
    for token, bias in sampling.get("logit_bias", {}).items():
        found[int(token)] = found[int(token)] + bias
    for token in range(size):
        repetition = sampling.get("repetition_penalty", 1.0)
        if token in prompt or token in before:
            found[token] = found[token] / repetition if found[token] > 0 else found[token] * repetition
        count = list(before).count(token)
        found[token] = found[token] - sampling.get("frequency_penalty", 0.0) * count
        found[token] = found[token] - sampling.get("presence_penalty", 0.0) * (count > 0)
    if support is not None:
        out |= set(range(size)) - set(support)
    scaled = torch.stack(found) / sampling.get("temperature", 1.0)
    return scaled.masked_fill(torch.tensor([token in out for token in range(size)]), -torch.inf)


def logprobs_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprobs of some logits, and their entropy, of which ids without probability are no part."""
    log_p = logits.log_softmax(-1)
    possible = log_p[torch.isfinite(log_p)]
    return log_p, -(possible.exp() * possible).sum()
