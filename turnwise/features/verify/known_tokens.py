"""How an engine is asked for the logprobs of known tokens, and after which sampling they say what was sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.sampling import TOOL_GRAMMAR
from turnwise.types import Json

POSITIONS_AT_ONCE = 64
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
NOT_REPEATABLE = (
    "logit_bias",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    TOOL_GRAMMAR,
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Sampling parameters whose effect on a token depends on the tokens sampled before it."""


def logprobs_request(model: str, tokens: Sequence[int], positions: Sequence[int], sampling: Mapping[str, Any]) -> Json:
    """Return the body for `/v1/completions` that gives the logprobs of known tokens, each given the tokens before it.

    Each token is sampled again from its own prompt for one step, and the engine is asked for the logprob of the known
    token (`logprob_token_ids`). So temperature, top-p and top-k count as they do in a call; a prompt's prefix is
    computed once, by the engine's prefix cache. `prompt_logprobs` would need only one prompt, but crashes a vLLM with
    LoRA while other calls run. Of `sampling` only `SAMPLING_FIELDS` count.
    """
    return {
        "model": model,
        "prompt": [tokens[:position] for position in positions],
        "max_tokens": 1,
        "temperature": 1.0,
        **{field: sampling[field] for field in SAMPLING_FIELDS if sampling.get(field) is not None},
        "logprobs": 1,
        "logprob_token_ids": sorted({tokens[position] for position in positions}),
        "return_tokens_as_token_ids": True,
    }


def read_logprobs(reply: Json, tokens: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Return the logprob of the token at each position; NaN for a token that the engine did not report."""
    found = {choice["index"]: choice["logprobs"]["top_logprobs"][0] for choice in reply["choices"]}
    return [
        float(found[index].get(f"token_id:{tokens[position]}", math.nan)) for index, position in enumerate(positions)
    ]
