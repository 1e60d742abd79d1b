"""A state's optimizer is restored without a second copy of its moments."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler

from trainer.learning.master_weights import MasterAdamW
from trainer.state import RestorePoint, State


class Weights:
    """A policy of one weight, or a critic's module."""

    def __init__(self) -> None:
        self.weight = Parameter(torch.ones(4))

    def shards(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def load_shards(self, saved: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.weight.copy_(saved["weight"])

    state_dict, load_state_dict = shards, load_shards


def step(optimizer: torch.optim.Optimizer, weight: Parameter, gradient: float) -> None:
    weight.grad = torch.full((4,), gradient)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, MasterAdamW])
def test_the_present_moments_and_gradients_are_freed_before_the_saved_ones_are_loaded(kind: Any) -> None:
    policy, critic = Weights(), Weights()
    optimizers = [
        kind([each.weight], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0) for each in (policy, critic)
    ]
    state = SimpleNamespace(
        policy=policy,
        optimizer=optimizers[0],
        scheduler=lr_scheduler.LambdaLR(optimizers[0], lambda _: 1.0),
        progress=SimpleNamespace(num_optimizer_steps=1),
        critic=SimpleNamespace(module=critic, optimizer=optimizers[1]),
    )
    for optimizer, owner in zip(optimizers, (policy, critic), strict=True):
        step(optimizer, owner.weight, 1.0)
    weights = [policy.weight.tolist(), critic.weight.tolist()]
    moments = [
        each.state[owner.weight]["exp_avg"].tolist() for each, owner in zip(optimizers, (policy, critic), strict=True)
    ]
    before = RestorePoint(cast("State", state))
    present = []
    for optimizer, owner in zip(optimizers, (policy, critic), strict=True):
        step(optimizer, owner.weight, -2.0)
        present += [weakref.ref(optimizer.state[owner.weight]["exp_avg"]), weakref.ref(owner.weight.grad)]
    num_kept = []
    optimizers[0].register_load_state_dict_pre_hook(
        lambda *_: num_kept.append(sum(one() is not None for one in present[:2]))
    )
    optimizers[1].register_load_state_dict_pre_hook(
        lambda *_: num_kept.append(sum(one() is not None for one in present[2:]))
    )
    before.restore(cast("State", state))
    assert num_kept == [0, 0]
    assert [policy.weight.tolist(), critic.weight.tolist()] == weights
    assert [
        each.state[owner.weight]["exp_avg"].tolist() for each, owner in zip(optimizers, (policy, critic), strict=True)
    ] == moments
