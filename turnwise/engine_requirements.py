"""What an engine must be able to do for exact capture, and how that is tested.

The proxy's probe and `turnwise doctor` send the same calls and judge the answers by the same rules. A check is a
generator that yields the bodies of chat calls and receives the decoded answers; the callers send them. Nothing is
derived from version numbers.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from turnwise.types import Json

MINIMUM_VLLM = "0.32"
"""The oldest vLLM release that meets all requirements."""
CHAT_ROUTE = "/v1/chat/completions"
FORCED_LOGPROB = -0.01
"""A token with a bias of 100 has a processed logprob above this for any model; its raw logprob is far below."""
BIAS = 100.0
NUM_PROMPT_TOKENS = 3


@dataclass(frozen=True)
class Requirement:
    """The result of one check."""

    name: str
    is_met: bool
    text: str
    """What was found, and what to change where it is not met."""


Check = Generator[Json, Json, list[Requirement]]
"""Yields bodies for `CHAT_ROUTE`, receives the decoded answers, returns the results."""


def check_capture(model: str) -> Check:
    """Check token ids, prompts given as ids, and processed logprobs with three calls of one token."""
    rendered = yield forced_call(model, None, token=0)
    prompt, choice = rendered.get("prompt_token_ids"), rendered["choices"][0]
    if not prompt or not choice.get("token_ids"):
        text = f"`return_token_ids` returns no token ids; use vLLM {MINIMUM_VLLM} or newer"
        return [Requirement("token ids", is_met=False, text=text)]
    found = [Requirement("token ids", is_met=True, text="returned for prompt and reply")]
    sent = [prompt[0]] * NUM_PROMPT_TOKENS
    continued = yield forced_call(model, sent, token=1)
    found.append(_continuation(continued.get("prompt_token_ids") == sent))
    found.append(_logprobs([choice, continued["choices"][0]]))
    return found


def forced_call(model: str, prompt: list[int] | None, *, token: int) -> Json:
    """Return the body of a call that samples one token whose choice is forced by a bias."""
    body: Json = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": True,
        "return_token_ids": True,
        "logit_bias": {str(token): BIAS},
    }
    if prompt is not None:
        body["kv_transfer_params"] = {"prompt_token_ids": prompt}
    return body


def _continuation(is_echoed: bool) -> Requirement:
    if is_echoed:
        return Requirement("continuation", is_met=True, text="prompt token ids are used as sent")
    text = (
        "kv_transfer_params.prompt_token_ids is ignored, so every turn would be tokenised again; "
        f"use vLLM {MINIMUM_VLLM} or newer"
    )
    return Requirement("continuation", is_met=False, text=text)


def _logprobs(choices: list[Json]) -> Requirement:
    """Judge the logprobs of forced tokens: processed ones include the bias and are close to 0."""
    logprobs = [entry["logprob"] for one in choices for entry in (one.get("logprobs") or {}).get("content") or []]
    if logprobs and min(logprobs) >= FORCED_LOGPROB:
        return Requirement("logprobs", is_met=True, text="processed: they include temperature and masks")
    text = (
        "raw logprobs, which are wrong at any temperature but 1; "
        "start the engine with --logprobs-mode processed_logprobs"
    )
    return Requirement("logprobs", is_met=False, text=text)
