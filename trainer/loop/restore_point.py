"""Copies of what a batch may change, made before its first optimizer step: a custom loss may refuse a later one.

A refused batch leaves the policy as it was. The copies are in host memory. The other losses refuse a batch before its
first step or not at all, so nothing is copied for them.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.learning.optimizer import set_position
from trainer.loop.state import State, copied


class RestorePoint:
    """The weights, the optimizers and the schedule of a state."""

    def __init__(self, state: State) -> None:
        self._weights = copied(state.policy.shards())
        # Not `State.tensors`: it allocates the moments of a new optimizer, which counts as a step.
        self._optimizer = copied(state.optimizer.state_dict())
        critic = state.critic
        self._critic = None if critic is None else copied(critic.module.state_dict())
        self._critic_optimizer = None if critic is None else copied(critic.optimizer.state_dict())

    def restore(self, state: State) -> None:
        """Give a state the values that it had."""
        state.policy.load_shards(self._weights)
        _load(state.optimizer, self._optimizer)
        set_position(state.scheduler, state.progress.num_optimizer_steps)
        if state.critic is not None and self._critic is not None and self._critic_optimizer is not None:
            state.critic.module.load_state_dict(self._critic)
            _load(state.critic.optimizer, self._critic_optimizer)


def _load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state; free the current one and the gradients first, because the device may not have room for both."""
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    optimizer.load_state_dict(saved)
