"""Tables of the sampling parameters that the trainer cannot apply again, so that a turn with one carries no loss.

The trainer selects turns by these tables. The proxy, the page and `turnwise doctor` say by the same tables, before a
batch, what will not be trained. Only the trainer knows whether it can replay a schema. What an engine says of its
grammars and alternatives is read here too.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

from turnwise.types import Json

GREEDY = "greedy"
SUPPORT = "support"
"""The part of a turn that has the ids which these leave."""
TRUNCATING: Mapping[str, Callable[[Any], bool]] = {
    "top_p": lambda value: value < 1,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0,
}
"""Sampling parameters that leave a part of the vocabulary, which depends on the engine's own logits, and when."""
TOOL_GRAMMAR = "tool_grammar"
"""Sampling parameter that is stored where the engine sampled under a grammar of tools that the call does not name."""
GRAMMAR_BACKEND, GRAMMAR_IS_COMPACT = "grammar_backend", "grammar_is_compact"
"""Sampling parameters that are stored where an engine was told which library masks by grammars, and that JSON has no
white space."""
REPLAYED_BACKENDS = ("auto", "xgrammar")
GRAMMARS: Mapping[str, Callable[[Any], bool]] = {
    TOOL_GRAMMAR: lambda value: isinstance(value, dict),
    "structured_outputs": bool,
    "response_format": lambda value: value.get("type", "text") != "text",
}
NOT_REPLAYED: Mapping[str, Callable[[Any], bool]] = {
    TOOL_GRAMMAR: lambda value: not isinstance(value, dict),
    "thinking_token_budget": lambda value: value >= 0,
}
"""Parameters whose effect the trainer does not compute, and when they have one; a support makes up for it."""
FORCED: Mapping[str, Callable[[Any], bool]] = {
    "tool_choice": lambda value: value == "required" or isinstance(value, dict)
}
"""Such a one where the grammar of the tools is not stored."""
NUMBERS: Mapping[str, type[int | float]] = {
    **dict.fromkeys(("top_k", "min_tokens", "thinking_token_budget"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), float),
}
"""Parameters that are numbers; vLLM takes the text of one too."""
Sampled: TypeAlias = tuple[Json, Container[str]]
"""The sampling parameters of a turn, and the names of its parts."""
ENFORCE_STRICT_TOOLS = "VLLM_ENFORCE_STRICT_TOOL_CALLING"
"""Variable of vLLM, on by default: it samples calls of strict tools, and single calls, under a grammar."""
STRICT_TOOLS_ADVICE = (
    "replies to requests with strict tools, or with parallel_tool_calls=false, are sampled under a grammar and so "
    f"stored but not trained; start the engine with {ENFORCE_STRICT_TOOLS}=0 to train them"
)
ADVICE = (
    "Only `sft`, `dpo` and `correction` train such turns. For other algorithms let the proxy sample live traffic with "
    "`sampling_pins`, or a share of the calls at temperature 0 with `explore`; sessions that you create may have a "
    "`sampling`."
)


def unreadable(sampling: Json) -> str | None:
    """Return the first parameter that is not the number that it should be."""
    return next((name for name in NUMBERS if not isinstance(sampling.get(name), int | float | None)), None)


def temperature_of(sampling: Json) -> float:
    """Return the temperature, 1 where none is set or it is `unreadable`."""
    value = sampling.get("temperature")
    return float(value) if isinstance(value, int | float) else 1.0


def first_of(rules: Mapping[str, Callable[[Any], bool]], sampling: Json) -> str | None:
    """Return the first parameter that has an effect; one of another type than its rule expects counts as such."""
    return next((name for name, acts in rules.items() if _has_effect(acts, sampling.get(name))), None)


def _has_effect(acts: Callable[[Any], bool], value: Any) -> bool:
    try:
        return value is not None and acts(value)
    except (TypeError, AttributeError):
        return True


def not_replayed(sampling: Json) -> str | None:
    """Return the first parameter that has an effect which the trainer does not compute."""
    if name := first_of(NOT_REPLAYED, sampling):
        return name
    if first_of(GRAMMARS, sampling) and (sampling.get(GRAMMAR_BACKEND) or "auto") not in REPLAYED_BACKENDS:
        return GRAMMAR_BACKEND
    return None if TOOL_GRAMMAR in sampling else first_of(FORCED, sampling)


def left_out_by(sampling: Json, parts: Container[str]) -> str | None:
    """Return why no ratio can be computed for a turn: `greedy`, or the name of a parameter; None if it can."""
    if temperature_of(sampling) <= 0:
        return GREEDY
    if name := unreadable(sampling):
        return name
    return None if SUPPORT in parts else first_of(TRUNCATING, sampling) or not_replayed(sampling)


def why_not_trained(sampling: Json, parts: Container[str]) -> str | None:
    """Return the same in words, such as `temperature 0` or `top_p 0.9`."""
    name = left_out_by(sampling, parts)
    if name is None or name == GREEDY:
        return name and "temperature 0"
    if name == TOOL_GRAMMAR:
        return "strict tools"
    value = sampling[name]
    return f"{name} {value}" if isinstance(value, str | int | float) else name


def count_not_trained(turns: Sequence[Sampled]) -> str | None:
    """Return how many of these turns are not trained and why, as a sentence; None if none is left out."""
    found = (why_not_trained(sampling, parts) for sampling, parts in turns)
    reasons = Counter(reason for reason in found if reason is not None)
    if not reasons:
        return None
    named = [f"{reason} ({count})" if len(reasons) > 1 else reason for reason, count in reasons.most_common()]
    return f"{sum(reasons.values())} of {len(turns)} turns are not trained: {', '.join(named)}."


def with_numbers(fields: Json) -> Json:
    """Return the fields of a request with numbers in the place of their texts; other values stay."""
    found = {name: _number(value, NUMBERS[name]) for name, value in fields.items() if name in NUMBERS}
    return fields | found if any(isinstance(fields[name], str) for name in found) else fields


def _number(value: Any, kind: type[int | float]) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    return int(number) if kind is int and number.is_integer() else number


def enforces_strict_tools(server_info: Json) -> bool:
    """Return whether an engine enforces strict tools, by its answer on `/server_info`; True if it does not say."""
    environment = server_info.get("vllm_env") if isinstance(server_info, dict) else None
    return not isinstance(environment, dict) or environment.get(ENFORCE_STRICT_TOOLS) is not False


def most_alternatives(server_info: Json) -> int:
    """Return how many alternatives a call may ask for at each token; 0 if the engine does not say."""
    try:
        most = int(server_info["vllm_config"]["model_config"]["max_logprobs"])
    except (KeyError, TypeError, ValueError):
        return 0
    return sys.maxsize if most < 0 else most


def grammar_settings(server_info: Json) -> Json:
    """Return what an engine was told about grammars, as sampling parameters; nothing where it decides or is silent."""
    try:
        told = server_info["vllm_config"]["structured_outputs_config"]
        backend, is_compact = str(told["backend"]), bool(told["disable_any_whitespace"])
    except (KeyError, TypeError):
        return {}
    found: Json = {GRAMMAR_BACKEND: backend} if backend != "auto" else {}
    return found | ({GRAMMAR_IS_COMPACT: True} if is_compact else {})
