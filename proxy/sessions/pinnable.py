"""Which request fields a session, or a pin of the operator, can set for many calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PINNABLE = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
        *("allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("reasoning_effort", "chat_template_kwargs", "thinking_token_budget", "parallel_tool_calls"),
        *("response_format", "structured_outputs"),
    }
)
"""Request fields that a session or a pin can set for all of its calls."""


def check_pinnable(sampling: Mapping[str, Any]) -> None:
    """Check that parameters can be set for many calls.

    Raises:
        ValueError: some cannot.
    """
    if refused := sorted(sampling.keys() - PINNABLE):
        raise ValueError(
            f"{', '.join(refused)} cannot be set for a whole session, because it changes more than the sampling of "
            f"a reply; set it in each call, or set one of {', '.join(sorted(PINNABLE))}"
        )
