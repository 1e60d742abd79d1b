"""The critic: the value of each state, from the hidden states of the trained model.

Its values come from the same packed rows as the policy's logprobs. It has its own optimizer, and engines never
see it. Legend: m trained tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.batch.ratios import TrainedTokens
from trainer.model.heads import Head
from trainer.model.inputs import RowInputs
from trainer.model.model import Policy, Whole
from turnwise.errors import SettingsError

NO_SHARDED_CRITIC = (
    "algorithm={!r} trains its critic in one process: set multi_devices=false, or an algorithm without a critic"
)

_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)
_PARTIAL = StateDictOptions(strict=False)


def critics_of(policy: Policy) -> list[Head]:
    return [Critic(policy)] if policy.settings.algorithm.needs_values else []


class Critic(Head):
    """A value head on the policy."""

    column = "values"
    optimizer: torch.optim.Optimizer

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._algorithm = policy.settings.algorithm
        self.module: nn.Module

    def shard(self, place: Whole) -> None:  # noqa: ARG002  it is refused whatever the place
        raise SettingsError(NO_SHARDED_CRITIC.format(str(self._algorithm)))

    def load(self, seed: int) -> None:  # noqa: ARG002  its first weights are zeros
        """Build the critic after the policy was loaded; a new one values each state 0."""
        policy = self._policy
        if policy.head is None:
            raise SettingsError(
                f"a critic needs hidden states, and {policy.settings.model!r} is sharded or changes its logits after "
                "the output layer: train in one process, use another model, or an algorithm without a critic"
            )
        self._head = nn.Linear(policy.config.hidden_size, 1, device=policy.device, dtype=torch.float32)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self.module = nn.ModuleDict({"head": self._head})

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def bind(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], learning_rate: float) -> None:
        self.optimizer = make(self.parameters())
        for group in self.optimizer.param_groups:
            group["lr"] = self._algorithm.critic_rate or 10 * learning_rate

    def of(self, inputs: RowInputs, output: Tensor) -> Tensor:
        values: Tensor = self._head(output[inputs.which].float())[:, 0]
        return values

    def with_loss(self, loss: Tensor, tokens: TrainedTokens) -> Tensor:
        return loss + (tokens.weights * self._algorithm.critic_loss(tokens)).sum()

    def tensors(self) -> dict[str, Any]:
        return {
            "critic": get_model_state_dict(self.module, options=_TRAINED_ONLY),
            "critic_optimizer": get_optimizer_state_dict(self.module, self.optimizer),
        }

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Load what `tensors` returned; the learning rate stays as it is now."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        set_model_state_dict(self.module, tensors["critic"], options=_PARTIAL)
        set_optimizer_state_dict(self.module, self.optimizer, tensors["critic_optimizer"])
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
