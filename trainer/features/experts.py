"""Replay of routing: a mixture of experts is trained with the experts that the engine chose for each token.

Small differences between two kernels change which experts a token is routed to, and with them its logprobs by far more
than the differences themselves. So the trainer takes the experts that the engine chose, where a turn has them; the
weights of the chosen experts are the trainer's own, and gradients reach the router through them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.batch.batch import Batch, Row
from trainer.batch.chain import Chain
from trainer.batch.forest import Indices
from trainer.model.inputs import RowInputs, flat_places, on_device
from trainer.model.model import Policy
from trainer.model.terms import Around, Term
from trainer.settings import TrainerSettings
from turnwise.features.experts import experts_of
from turnwise.settings import Settings

log = logging.getLogger(__name__)

Scores = Callable[[Tensor], Tensor]
SCORES: tuple[Scores, ...] = (
    functools.partial(torch.softmax, dim=-1, dtype=torch.float),
    lambda logits: logits.float().sigmoid(),
)
"""How routers make weights of experts from their logits. Which one is a router's, and whether any, is measured."""
NUM_PROBED = 8
Route = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class ExpertSettings(Settings):
    """Whether the engine's experts are used."""

    router_replay: bool = True
    """Of a mixture of experts, use the experts that the engine chose for each token, where turns have them: from an
    engine with `--enable-return-routed-experts`, for calls that do not stream."""


class Experts(Term):
    """The experts that the engine chose for the tokens of chains."""

    name = "experts"

    def __init__(self, settings: TrainerSettings) -> None:
        assert isinstance(settings, ExpertSettings)
        self._is_wanted = settings.router_replay

    def of_row(self, batch: Batch, row: Row) -> Indices | None:
        """Return the experts of each row token by layer, -1 where they are not known. [N, layers, experts a token]."""
        routed = [(experts_of(batch.experiences[member]), own) for member, own in row.paths]
        known = [(each, own) for each, own in routed if each is not None]
        if not known:
            return None
        routing = np.full((len(row.layout.tokens), *known[0][0].shape[1:]), -1, np.int64)
        for each, own in known:
            if each.shape[1:] == routing.shape[1:]:
                has = (each[: len(own)] >= 0).all((1, 2))
                routing[own[has]] = each[: len(own)][has]
        return routing

    def around(self, policy: Policy) -> RouterReplay | None:
        return RouterReplay.of(policy.model, policy.device) if self._is_wanted else None


class RouterReplay(Around):
    """The routers of a model, which follow the routing of the present row."""

    def __init__(self, routers: dict[int, tuple[nn.Module, Scores]], device: torch.device) -> None:
        self._device = device
        self._routing: Tensor | None = None
        """Experts of each token of the row by layer, -1 where they are not known. [N, layers, k]"""
        self._routers = {layer: router for layer, (router, _) in routers.items()}
        for layer, (router, scores) in routers.items():
            router.forward = functools.partial(self._route, router, scores, layer, router.forward)

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> RouterReplay | None:
        """Return the replay for a model; None for one without a router whose weights can be computed."""
        found: dict[int, tuple[nn.Module, Scores]] = {}
        unknown: set[str] = set()
        for name, module in model.named_modules():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            if layer is None or not type(module).__name__.endswith("Router"):
                continue
            if (scores := _scores_of(module)) is None:
                unknown.add(type(module).__name__)
            else:
                found[int(layer[1])] = module, scores
        if unknown:
            log.warning("the engine's choice of experts is not followed by %s", ", ".join(sorted(unknown)))
        return cls(found, device) if found else None

    def why_unfit(self, chain: Chain) -> str | None:
        """Return why the routing of a chain's turns cannot be followed; None where it can, or where there is none."""
        experts = experts_of(chain)
        if experts is None:
            return None
        num_layers, count = experts.shape[1:]
        last = max(self._routers)
        wanted: Any = self._routers[last]
        if last < num_layers and count == wanted.top_k:
            return None
        return (
            f"turns were routed to {count} experts in each of {num_layers} layers, and this model routes to "
            f"{wanted.top_k} in layer {last}: train the model that was served, or set router_replay=false"
        )

    def of_inputs(self, row: Row, inputs: RowInputs) -> RowInputs:
        routing = row.parts.get(Experts.name)
        if routing is None:
            return inputs
        placed = np.full((inputs.tokens.numel(), *routing.shape[1:]), -1, np.int64)
        placed[flat_places(row.layout, inputs.tokens.shape)] = routing
        return dataclasses.replace(
            inputs, parts={**inputs.parts, Experts.name: on_device(torch.from_numpy(placed), self._device)}
        )

    def forward(self, inputs: RowInputs | None) -> contextlib.AbstractContextManager[None]:
        self.use(None if inputs is None else inputs.parts.get(Experts.name))
        return contextlib.nullcontext()

    def use(self, routing: Tensor | None) -> None:
        """Follow this routing until the next forward pass: recomputed layers route again in the backward pass."""
        self._routing = routing

    def _route(
        self, router: Any, scores: Scores, layer: int, route: Route, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = route(hidden)
        if self._routing is None:
            return logits, weights, experts
        forced = self._routing[:, layer]
        experts = torch.where((forced >= 0).all(-1, keepdim=True), forced, experts)
        return logits, _weights(router, scores(logits), experts).to(weights.dtype), experts


def _weights(router: Any, scores: Tensor, experts: Tensor) -> Tensor:
    chosen = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    scale = getattr(router, "routed_scaling_factor", None)
    return chosen if scale is None else chosen * scale


def _scores_of(router: Any) -> Scores | None:
    """Return how a router makes weights of its logits, found by a forward pass; None if in another way.

    The pass has random weights, because a model's own may not be loaded yet.
    """
    random, probe = torch.Generator().manual_seed(0), copy.copy(router)
    own, held = router.named_parameters(recurse=False), router.named_buffers(recurse=False)
    parameters = {name: nn.Parameter(torch.randn(each.shape, generator=random)) for name, each in own}
    buffers = {name: torch.zeros(each.shape) for name, each in held}
    # A parameter that the router does without stays as it is.
    without = {name: each for name, each in vars(router)["_parameters"].items() if each is None}
    probe.__dict__ = {**router.__dict__, "_parameters": parameters | without, "_buffers": buffers}
    hidden = torch.randn((NUM_PROBED, router.weight.shape[-1]), generator=random)
    try:
        logits, weights, experts = type(router).forward(probe, hidden)
        return next((each for each in SCORES if _weights(router, each(logits), experts).allclose(weights)), None)
    except (RuntimeError, TypeError, ValueError):
        return None
