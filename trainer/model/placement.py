"""Where the weights of a model are held: whole in this process, unless a feature divides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer.model.loading import load_model
from trainer.world import World

if TYPE_CHECKING:
    from trainer.model.model import Policy


class Whole:
    """A model that one process holds."""

    is_whole = True

    def world(self) -> World:
        return World()

    def load(self, policy: Policy, seed: int, *, with_weights: bool) -> nn.Module:  # noqa: ARG002  for subclasses
        """Return the policy's base model on its device, with the weights of a fresh adapter by the seed."""
        return policy.tuned(load_model(policy.settings, policy.attention).to(policy.device))

    def sync_gradients(self, policy: Policy, *, is_wanted: bool) -> None:
        """Say whether the next backward pass adds up the gradients of all processes."""

    def settle(self, model: nn.Module) -> None:
        """Divide what a forward pass without a backward one left whole."""

    def shards(self, model: nn.Module, *, trained_only: bool) -> dict[str, Any]:
        """Return what this process holds of the weights, by name, on its device."""
        left_out = {name for name, value in model.named_parameters() if trained_only and not value.requires_grad}
        return {name: value for name, value in model.state_dict().items() if name not in left_out}

    def load_shards(self, model: nn.Module, shards: dict[str, Any], *, is_whole: bool) -> None:
        model.load_state_dict(shards, strict=is_whole)

    def load_weights(self, policy: Policy, read: Callable[[], nn.Module]) -> None:
        """Load the weights of a model that is read, in one process alone."""
        self.load_shards(policy.model, read().state_dict(), is_whole=True)
