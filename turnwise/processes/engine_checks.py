"""What exact capture needs of an engine, and the test calls that find it out, sampling defaults too.

The proxy's probe and `turnwise doctor` send the same calls and judge the answers by the same rules. A check is a
generator that yields the bodies of chat calls and receives the decoded answers; the callers send them. Nothing is
derived from version numbers.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from turnwise.engine_plugin.upstream import RANGE
from turnwise.types import Json

CONTINUATION = "continuation"
SERVER_INFO_ROUTE = "/server_info"
"""vLLM's development route that states the environment it runs with."""
FORCED_LOGPROB = -0.01
"""A token with a bias of 100 has a processed logprob above this for any model; its raw logprob is far below."""
BIAS = 100.0
NUM_PROMPT_TOKENS = 3
NEUTRAL: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters that vLLM takes from a model's generation_config.json, with the values that change nothing."""
GENERATION_CONFIG = "generation_config.json"
NUM_BIASED = 256
"""Tokens that a bias makes the only candidates: more than a usual top-k, so that any mask shows."""
BIAS_SLOPE = 0.02
"""Nats between two neighbours, so that the unlikelier ones have a share that any top-k, top-p or min-p cuts off."""
NUM_COMPARED = 5
SAME_NATS = 0.02
"""Logprobs of the same logits differ by less than this, also in bf16; any default that matters changes them by more."""


@dataclass(frozen=True)
class Requirement:
    """The result of one check."""

    name: str
    is_met: bool
    text: str


Check = Generator[Json, Json, list[Requirement]]
"""Yields bodies for `CHAT_ROUTE`, receives the decoded answers, returns the results."""


def check_capture(model: str) -> Check:
    """Check token ids, prompts given as ids, and processed logprobs with three calls of one token."""
    rendered = yield forced_call(model, None, token=0)
    prompt, choice = rendered.get("prompt_token_ids"), rendered["choices"][0]
    if not prompt or not choice.get("token_ids"):
        text = f"`return_token_ids` returns no token ids; use vLLM {RANGE}"
        return [Requirement("token ids", is_met=False, text=text)]
    found = [Requirement("token ids", is_met=True, text="returned for prompt and reply")]
    sent = [prompt[0]] * NUM_PROMPT_TOKENS
    continued = yield forced_call(model, sent, token=1)
    found.append(_continuation(continued.get("prompt_token_ids") == sent))
    found.append(_logprobs([choice, continued["choices"][0]]))
    return found


def weights_dtype(server_info: Json) -> str | None:
    """Return the number format of an engine's weights, such as `float32`; None if it does not say."""
    try:
        named = server_info["vllm_config"]["model_config"]["dtype"]
    except (KeyError, TypeError):
        return None
    return str(named).removeprefix("torch.")


SamplingCheck = Generator[Json, Json, tuple[Json | None, Requirement]]
"""As `Check`; returns the defaults too, None if they are unknown."""


def check_sampling_defaults(model: str, configured: Json) -> SamplingCheck:
    """Find the sampling parameters that the engine uses where a request sets none.

    A call without parameters is compared with one that sets neutral values, and then with one that sets `configured`:
    what `generation_config.json` sets, empty if it is not known.
    """
    neutral = _alternatives((yield _sampling_call(model, NEUTRAL)))
    unset = _alternatives((yield _sampling_call(model, {})))
    name = "sampling defaults"
    if _are_same(neutral, unset):
        return {}, Requirement(name, is_met=True, text="neutral: a request without parameters samples at temperature 1")
    if configured and _are_same(_alternatives((yield _sampling_call(model, NEUTRAL | configured))), unset):
        text = f"those of {GENERATION_CONFIG}, which are stored with each turn: {configured}"
        return configured, Requirement(name, is_met=True, text=text)
    text = (
        f"requests without sampling parameters get defaults that are not neutral and not known here "
        f"({GENERATION_CONFIG} says {configured or 'nothing, or cannot be read'}); "
        "start the engine with --generation-config vllm"
    )
    return None, Requirement(name, is_met=False, text=text)


def read_sampling_defaults(directory: Path) -> Json:
    """Return the parameters that are not neutral in a model's `generation_config.json`; empty if it is not readable."""
    try:
        config = json.loads((directory / GENERATION_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    return {
        name: config[name] for name, value in NEUTRAL.items() if config.get(name) is not None and config[name] != value
    }


def _sampling_call(model: str, parameters: Json) -> Json:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": NUM_COMPARED + 1,  # vLLM puts the sampled token in place of the last one
        "logit_bias": {str(token): BIAS - BIAS_SLOPE * token for token in range(NUM_BIASED)},
        # A repetition penalty changes these tokens and leaves the other biased ones.
        "kv_transfer_params": {"prompt_token_ids": list(range(NUM_BIASED // 4))},
        **parameters,
    }


def _alternatives(reply: Json) -> list[float]:
    entry = reply["choices"][0]["logprobs"]["content"][0]
    return sorted(float(each["logprob"]) for each in entry["top_logprobs"])[-NUM_COMPARED:]


def _are_same(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) < SAME_NATS for a, b in zip(one, other, strict=True))


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
        return Requirement(CONTINUATION, is_met=True, text="prompt token ids are used as sent")
    text = f"kv_transfer_params.prompt_token_ids is ignored, so every turn would be tokenised again; use vLLM {RANGE}"
    return Requirement(CONTINUATION, is_met=False, text=text)


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
