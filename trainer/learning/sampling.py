"""How a turn was sampled, as far as its importance ratio depends on it.

Behaviour logprobs are those of the distribution that was sampled from. The trainer can apply a temperature to its own
logits. It cannot reproduce a mask or a penalty of the sampler, so turns that had one stay in the prompt, carry no
loss, and are counted by reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.experience import Experience
from turnwise.types import TOOL_GRAMMAR, Json

MASKS: dict[str, Callable[[Any], bool]] = {
    "top_p": lambda value: value < 1,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0,
    "min_tokens": lambda value: value > 0,
    "logit_bias": bool,
    "bad_words": bool,
    "allowed_token_ids": bool,
    "structured_outputs": bool,
    "response_format": lambda value: value.get("type", "text") != "text",
    TOOL_GRAMMAR: bool,
    "thinking_token_budget": lambda value: value >= 0,
    "tool_choice": lambda value: value == "required" or isinstance(value, dict),
    "frequency_penalty": lambda value: value != 0,
    "presence_penalty": lambda value: value != 0,
    "repetition_penalty": lambda value: value != 1,
}
"""Parameters that change the distribution otherwise than by scaling it, and when they do."""


def temperatures(experience: Experience) -> npt.NDArray[np.float32]:
    """Return the temperature of each turn, 1 where the call set none. [K]."""
    return np.array([_temperature(sampling) for sampling in _per_turn(experience)], np.float32)


def why_untrainable(experience: Experience) -> list[str | None]:
    """Return for each turn why no importance ratio can be formed for it, None where one can. [K]."""
    reasons = [_reason(sampling) for sampling in _per_turn(experience)]
    broken = experience.loss_mask & ~np.isfinite(experience.logprobs)
    for turn in np.unique(experience.turn_index[broken]):
        reasons[turn] = "broken_logprobs"
    return reasons


def _per_turn(experience: Experience) -> list[Json]:
    return list(experience.info.get("sampling") or [{}] * len(experience.turn_ids))


def _temperature(sampling: Json) -> float:
    value = sampling.get("temperature")
    return 1.0 if value is None else float(value)


def _reason(sampling: Json) -> str | None:
    if _temperature(sampling) <= 0:
        return "greedy"
    for name, masks in MASKS.items():
        value = sampling.get(name)
        if value is not None and masks(value):
            return name
    return None
