"""Which layers an adapter changes, and why others are left out; the trained tensors of one of several policies.

By default an adapter changes all linear layers of the language model that engines serve adapters of. What is left out
is named, with its reason and the share of the parameters that is reached, before anything is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from turnwise.errors import SettingsError

_ROUTER = "it routes tokens to experts"
NOT_ADAPTED = {
    "gate": _ROUTER,
    "router": _ROUTER,
    "shared_expert_gate": _ROUTER,
    "kv_b_proj": "vLLM folds it into the attention",
}
"""Linear layers that get an adapter only by name, with the reason."""
HALVES, OF_HALVES = "gate_up_proj", ("glm", "glm4", "glm4v", "glm4v_text")
"""A layer that holds two, and the types of models of which engines refuse an adapter of both in one."""
HALVES_REASON = "vLLM expects an adapter of each of its two halves, gate_proj and up_proj"
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
OF_MAMBA, SKIP = "out_proj", "D"
"""The last layer of Mamba's mixers, and a weight of theirs that no other layer has."""
OF_MAMBA_REASON = "Mamba's kernels read its weights past an adapter"
OF_EXPERTS_REASON = "peft adapts the experts with it, in a form that no engine loads"


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """The layers that an adapter changes."""

    targets: list[str]
    """Last parts of their names, or whole names where other parts of the model have layers of the same name."""
    num_layers: int
    share: float
    """Of the parameters of the language model, those of these layers."""
    left_out: dict[str, str]
    """Linear layers and experts without an adapter, by the last part of their names, with the reason."""

    def __str__(self) -> str:
        names = sorted({target.rpartition(".")[2] for target in self.targets})
        rest = "".join(f"; not {name}: {reason}" for name, reason in sorted(self.left_out.items()))
        share = f"{self.share:.0%} of the language model's parameters"
        return f"{self.num_layers} layers ({', '.join(names)}), {share}{rest}"


def reach_of(model: Any, wanted: Sequence[str] = (), *, name: str = "") -> Reach:
    """Return what an adapter changes: the layers that are wanted, by default all whose adapters engines serve.

    A wanted name reaches other parts than the language model, such as a vision tower, only where it is of no layer of
    the language model. `name` is the model's, for the errors.

    Raises:
        SettingsError: A wanted name is of no layer, or there is no layer for an adapter.
    """
    found, every = _linear_layers(model), [each for each, _ in model.named_modules()]
    unknown = [target for target in wanted if not any(_ends(each, target) for each in every)]
    if unknown:
        raise SettingsError(
            f"lora_targets has {unknown}, which name no layer of the model {name!r}: set it in [trainer] to some of "
            f"its linear layers, {sorted(found)}, or leave it out for all that engines serve"
        )
    if _has_halves(model) and any(_ends(target, HALVES) for target in wanted):
        raise SettingsError(f"lora_targets has {HALVES!r} of {name!r}: {HALVES_REASON}; leave it out of [trainer]")
    left_out = dict.fromkeys(found, "it is not in lora_targets") if wanted else _not_served(model, found)
    ends = wanted or [each for each in found if each not in left_out]
    if not ends:
        raise SettingsError(f"{name!r} has no linear layer for an adapter, only {sorted(left_out)}: set kind='full'")
    inside = {each for layers in found.values() for each in layers}
    targets = [each for end in ends for each in _targets(end, inside, every)]
    modules = [each for path, each in model.named_modules() if any(_ends(path, end) for end in targets)]
    adapted = sum(_size(each) for each in modules if isinstance(each, nn.Linear))
    rest = {each: reason for each, reason in left_out.items() if not any(_ends(end, each) for end in targets)}
    return Reach(targets, len(modules), adapted / sum(map(_size, model.get_decoder().modules())), rest)


def _size(module: nn.Module) -> int:
    """Return the number of a module's own weights; a tensor may hold several of a linear layer's packed."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    return sum(each.numel() for each in module.parameters(recurse=False))


def _has_halves(model: Any) -> bool:
    return model.config.get_text_config().model_type in OF_HALVES


def _not_served(model: Any, found: Mapping[str, list[str]]) -> dict[str, str]:
    parameters = model.get_decoder().named_parameters()
    fused = {name.rpartition(".")[2] for name, each in parameters if each.ndim == 3 and ".experts." in name}
    left_out = dict.fromkeys(fused, "experts that share one tensor")
    for name, layers in found.items():
        if name in NOT_ADAPTED or (fused and name in OF_EXPERTS):
            left_out[name] = NOT_ADAPTED.get(name, OF_EXPERTS_REASON)
        elif name == HALVES and _has_halves(model):
            left_out[name] = HALVES_REASON
        elif name == OF_MAMBA and any(hasattr(model.get_submodule(each.rpartition(".")[0]), SKIP) for each in layers):
            left_out[name] = OF_MAMBA_REASON
    return left_out


def _linear_layers(model: Any) -> dict[str, list[str]]:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and id(module) in inside:
            found.setdefault(name.rpartition(".")[2], []).append(name)
    return found


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _targets(end: str, inside: Collection[str], every: Iterable[str]) -> list[str]:
    """Return the end of a name, or whole names where modules outside of the language model end with it too."""
    reached = [each for each in inside if _ends(each, end)]
    is_elsewhere = any(_ends(each, end) and each not in inside for each in every)
    return sorted(reached) if reached and is_elsewhere else [end]


class Adapter:
    """The trained tensors of a model, as one policy has them: several policies share one base model in memory.

    An adapter is put in place by giving its tensors to the model's modules: no value is copied, and an optimizer that
    is bound to them keeps what it updates. So a policy computes the same numbers, bit for bit, whether it shares its
    base model or not.
    """

    def __init__(self, places: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        self._places = places

    @classmethod
    def in_place(cls, model: nn.Module) -> Adapter:
        modules = model.modules()
        found = [(module, *named) for module in modules for named in module.named_parameters(recurse=False)]
        return cls([place for place in found if place[2].requires_grad])

    def copied(self) -> Adapter:
        return Adapter([(module, name, _copied(parameter)) for module, name, parameter in self._places])

    def put(self) -> None:
        for module, name, parameter in self._places:
            setattr(module, name, parameter)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().clone())
    if parameter.dtype is not torch.float32:
        made.grad_dtype = torch.float32  # rows are added up in it
    return made
