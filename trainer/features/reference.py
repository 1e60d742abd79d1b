"""The reference of a KL: the policy as it started, in memory beside it, or without its adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from trainer.model.adapters import Adapter
from trainer.model.heads import Head
from trainer.model.inputs import RowInputs
from trainer.model.model import Policy, Whole
from turnwise.types import PolicyKind


def references_of(policy: Policy) -> list[Head]:
    settings = policy.settings
    if not settings.algorithm.needs_reference:
        return []
    own = Policy(settings, [type(term) for term in policy.terms]) if settings.kind is PolicyKind.FULL else None
    return [Reference(policy, own)]


class Reference(Head):
    """The logprobs under what the policy started from."""

    column = "reference"

    def __init__(self, policy: Policy, own: Policy | None) -> None:
        """`own` is a second model in memory; None for a policy with an adapter, which is taken away meanwhile."""
        self._policy = policy
        self._own = own

    def shard(self, place: Whole) -> None:
        if self._own is not None:
            self._own.place = place

    def load(self, seed: int) -> None:
        if self._own is not None:
            self._own.load(seed)
            self._own.model.requires_grad_(requires_grad=False)

    def of(self, inputs: RowInputs, output: Tensor) -> Tensor:  # noqa: ARG002  it has a forward pass of its own
        with torch.no_grad(), self._started():
            return (self._own or self._policy).logprobs(inputs)[0]

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        """Let the policy's adapter be the one that it started from in the block, or none."""
        model = cast("Any", self._policy.model)
        if self._own is not None:
            yield
        elif self.start is None:
            with model.disable_adapter():
                yield
        else:
            present = Adapter.in_place(model)
            self.start.put()
            try:
                yield
            finally:
                present.put()
