"""Replay of the engine's routing in a mixture of experts.

Small differences between two kernels change which experts a token is routed to, and with them its logprobs by far more
than the differences themselves. So the trainer takes the experts that the engine chose, where a turn has them; the
weights of the chosen experts are the trainer's own, and gradients reach the router through them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.batch.batch import Batch
from turnwise.chains import Experience
from turnwise.errors import BatchRefused

ROUTERS = ("Qwen3MoeTopKRouter",)
"""Classes of transformers whose forward pass returns logits, weights and numbers of the chosen experts."""
Route = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class RouterReplay:
    """The routers of a model, which follow the routing of the present row."""

    def __init__(self, routers: dict[int, nn.Module]) -> None:
        self._routing: Tensor | None = None
        """Experts of each token of the row by layer, -1 where they are not known. [N, layers, k]"""
        self._routers = routers
        for layer, router in routers.items():
            router.forward = functools.partial(self._route, router, layer, router.forward)

    @classmethod
    def of(cls, model: nn.Module, *, is_wanted: bool) -> RouterReplay | None:
        """Return the replay for a model; None for one without a router that is known."""
        found: dict[int, nn.Module] = {}
        for name, module in model.named_modules():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            if is_wanted and type(module).__name__ in ROUTERS and layer is not None:
                found[int(layer[1])] = module
        return cls(found) if found else None

    def check(self, batch: Batch, members: Iterable[int]) -> None:
        """Check that all turns of the members were routed in a model of this shape; before any process computes a row.

        All processes hold the same batch, so all of them refuse it, and none waits for another one in a collective.

        Raises:
            BatchRefused: A turn was routed in another model.
        """
        reasons = {self.refusal(batch.experiences[member]) for member in members} - {None}
        if reasons:
            raise BatchRefused(f"{reasons.pop()}: train the model that was served, or set router_replay=false")

    def refusal(self, experience: Experience) -> str | None:
        """Return why the routing of a chain's turns cannot be followed; None where it can, or where there is none."""
        if experience.routed_experts is None:
            return None
        num_layers, count = experience.routed_experts.shape[1:]
        last = max(self._routers)
        wanted: Any = self._routers[last]
        if last < num_layers and count == wanted.top_k:
            return None
        return (
            f"turns were routed to {count} experts in each of {num_layers} layers, and this model routes to "
            f"{wanted.top_k} in layer {last}"
        )

    def use(self, routing: Tensor | None) -> None:
        self._routing = routing

    def _route(self, router: Any, layer: int, route: Route, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = route(hidden)
        if self._routing is None:
            return logits, weights, experts
        forced = self._routing[:, layer]
        experts = torch.where((forced >= 0).all(-1, keepdim=True), forced, experts)
        chosen = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, experts)
        if router.norm_topk_prob:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(logits.dtype), experts
