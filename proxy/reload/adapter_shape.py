"""Which adapters PEFT and an engine read differently, by their configuration and their tensors' names and shapes.

Engines skip a tensor that is of no layer, scale by the `r` of the configuration whatever the tensors have, and cast
what is no float: the calls would sample with something else than what was trained, without an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

MOST_RANK = 4096
MOST_ALPHA = 1e6
"""Beyond it, 16-bit weights overflow."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_FACTOR = re.compile(r"(.*)\.lora_([AB])\.weight")
_PLAIN_KEY = re.compile(r"[\w.]+")
_EXPERTS = ("experts", "experts.base_layer")
"""Ends of modules whose factors hold all experts, one after another."""


class Shaped(Protocol):
    """A tensor's type and sizes."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def why_misread(config: Mapping[str, Any], tensors: Mapping[str, Shaped]) -> str | None:
    """Return what PEFT and an engine would read differently in an adapter, or not at all; None if nothing."""
    return _wrong_number(config) or _wrong_type(tensors) or _wrong_factors(config, tensors)


def _wrong_number(config: Mapping[str, Any]) -> str | None:
    rank, alpha = config.get("r"), config.get("lora_alpha", 1)
    if not _is_rank(rank):
        return f"has r={rank!r}, which must be a whole number from 1 to {MOST_RANK}"
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= MOST_ALPHA:
        return f"has lora_alpha={alpha!r:.40}, which must be a number above 0 and at most {MOST_ALPHA:g}"
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict) or not all(_is_rank(each) for each in pattern.values()):
        return f"has rank_pattern={pattern!r:.80}, which must be an object of ranks from 1 to {MOST_RANK}"
    return None


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANK


def _wrong_type(tensors: Mapping[str, Shaped]) -> str | None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            return f"has {name!r} as {tensor.dtype}: an adapter's tensors are floats; write it again without quantising"
        if not math.prod(tensor.shape):
            return f"has {name!r} as {list(tensor.shape)}, which holds nothing"
    return None


def _wrong_factors(config: Mapping[str, Any], tensors: Mapping[str, Shaped]) -> str | None:
    modules: dict[str, dict[str, Shaped]] = {}
    for name, tensor in tensors.items():
        if (factor := _FACTOR.fullmatch(name)) is not None:
            modules.setdefault(factor[1], {})[factor[2]] = tensor
    targets = config.get("target_modules")
    for module, factors in modules.items():
        if missing := {"A", "B"} - factors.keys():
            return f"lacks '{module}.lora_{missing.pop()}.weight', without which the other factor does nothing"
        if isinstance(targets, list) and not any(_is_named(module, str(target)) for target in targets):
            return f"has tensors of {module!r}, which is in none of its target_modules: PEFT leaves them out"
        if not module.endswith(_EXPERTS) and (reason := _wrong_rank(config, module, factors["A"], factors["B"])):
            return reason
    return None


def _wrong_rank(config: Mapping[str, Any], module: str, a: Shaped, b: Shaped) -> str | None:
    found = (a.shape[0], b.shape[1] if len(b.shape) > 1 else None)
    wanted = _ranks(config, module)
    if found[0] == found[1] and found[0] in wanted:
        return None
    stated = " or ".join(map(str, sorted(wanted)))
    return f"has factors of rank {found[0]} and {found[1]} for {module!r}, and its configuration says {stated}"


def _ranks(config: Mapping[str, Any], module: str) -> set[int]:
    """Return the ranks that a module may have: the one of its first key, or each where a key is an expression."""
    pattern = config.get("rank_pattern") or {}
    if not all(_PLAIN_KEY.fullmatch(key) for key in pattern):
        return {config["r"], *pattern.values()}
    return {next((rank for key, rank in pattern.items() if _is_named(module, key)), config["r"])}


def _is_named(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
