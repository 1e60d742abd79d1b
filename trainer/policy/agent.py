"""The policy with its loss: one call is one optimizer step over some of a batch's experiences.

Whether the trainer and the engine agree is judged before the first step on a batch, from the forward pass
that the step needs anyway; so a batch from a mismatched engine is refused before it has moved a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trainer.learning.batch import Aggregation, Batch, Packing, Reals, Row, pack
from trainer.learning.gauges import Gauges
from trainer.learning.losses import LossRule, TrainedTokens, loss_of
from trainer.parallel import World
from trainer.policy.model import Policy
from turnwise.errors import BatchRefused
from turnwise.types import PolicyKind


class AgentRule(LossRule):
    """How a policy is trained on a batch: the loss, and how it is computed over the batch."""

    proximal: bool = False
    """Take ratios to the weights at the start of a batch, not to the behaviour policy: one more forward pass a
    batch."""
    aggregation: Aggregation = "token_mean"
    """How tokens are weighed: `token_mean`, `session_mean` or `session_sum`."""
    session_tokens: int = Field(default=1024, ge=1)
    """The constant that `session_sum` divides by."""
    row_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one packed row, which bounds memory. None: 512 on a CPU, where longer rows cost more, else 8192."""
    packing: Packing = "forest"
    """`forest` packs chains and shares their prefixes; `chain` gives each chain a row of its own, which models with
    sliding windows need."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_logprob_gap: float = Field(default=0.1, gt=0)
    """Mean |trainer − engine| over on-policy tokens, in nats, above which a batch is refused."""


class PolicyAgent:
    """A policy and how it learns."""

    def __init__(self, policy: Policy, rule: AgentRule, reference: Policy | None = None) -> None:
        self.policy = policy
        self.rule = rule
        self._reference = reference
        self.world = World()

    @property
    def row_tokens(self) -> int:
        """Tokens of one packed row. On a CPU attention over a long row costs more than another row does."""
        return self.rule.row_tokens or (8192 if self.policy.device.type == "cuda" else 512)

    @property
    def packing(self) -> Packing:
        """Rows hold one chain each where a layer does not attend to every earlier token."""
        return self.rule.packing if self.policy.attends_to_all else "chain"

    def load(self, seed: int) -> None:
        """Load the policy afresh, and the reference if a loss needs one."""
        self.world = World()
        self.policy.load(seed)
        if self._reference is not None:
            self._reference.load(seed)
            self._reference.model.requires_grad_(requires_grad=False)

    def proximal_logprobs(self, batch: Batch) -> Reals | None:
        """Return the logprobs of all trained tokens under the present weights; None where no ratio needs them. [M]."""
        if not self.rule.proximal:
            return None
        return self._without_gradient(self.policy, batch, range(len(batch.experiences)))

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        members: Sequence[int],
        *,
        proximal: Reals | None,
        is_first: bool,
    ) -> tuple[Gauges, float]:
        """Update the weights once; return the gauges and the gradient's norm before clipping.

        A gradient that is not finite changes nothing.

        Raises:
            BatchRefused: On the first step of a batch: engine and trainer disagree on on-policy tokens.
        """
        optimizer.zero_grad(set_to_none=True)
        gauges = self.accumulate_gradient(batch, members, proximal=proximal, is_first=is_first)
        if gauges.logprob_gap is not None and not gauges.logprob_gap <= self.rule.max_logprob_gap:
            optimizer.zero_grad(set_to_none=True)
            raise BatchRefused(
                f"trainer and engine differ by {gauges.logprob_gap:.4g} nats a token on tokens that this very version "
                f"sampled, over max_logprob_gap={self.rule.max_logprob_gap}: check that the engine serves the weights "
                "it says, in the same precision, with --logprobs-mode processed_logprobs"
            )
        norm = _full(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.rule.max_grad_norm)).item()
        if np.isfinite(norm):
            optimizer.step()
        return gauges, norm

    def accumulate_gradient(
        self, batch: Batch, members: Sequence[int], *, proximal: Reals | None = None, is_first: bool = False
    ) -> Gauges:
        """Add the gradient of these experiences' loss to the parameters, row by row; return the gauges.

        Args:
            batch: What was claimed.
            members: The experiences of one optimizer step, as indices into the batch.
            proximal: Of `proximal_logprobs`. [M]
            is_first: Whether the weights are still those that sampled the on-policy tokens.
        """
        rows = pack(batch, members, self.row_tokens, self.packing)
        aggregation = "session_mean" if self.rule.algorithm == "dpo" else self.rule.aggregation
        weights = batch.weights(members, aggregation, self.rule.session_tokens)
        gauges = Gauges()
        for row, counts in self.world.own(rows):
            tokens = self._tokens(batch, row, weights if counts else np.zeros_like(weights), proximal)
            loss = loss_of(tokens, self.rule)
            # FSDP takes the mean of the processes' gradients; the loss is a sum over them.
            (loss * self.world.size).backward()  # type: ignore[no-untyped-call]
            if counts:
                on_policy = torch.from_numpy(batch.table.on_policy[row.token]).to(self.policy.device)
                gauges.observe(tokens, loss, on_policy if is_first else torch.zeros_like(on_policy), self.rule)
        gauges.reduce(self.world)
        return gauges

    def _tokens(self, batch: Batch, row: Row, weights: Reals, proximal: Reals | None) -> TrainedTokens:
        """Run the row forward and gather what the loss needs of it."""
        table, device = batch.table, self.policy.device
        logprobs, entropy = self._forward(self.policy, batch, row)
        members, sequence = np.unique(table.experience[row.token], return_inverse=True)
        _, pair = np.unique(np.array(batch.unit_of)[members], return_inverse=True)

        def column(values: Any) -> Tensor:
            return torch.from_numpy(values[row.token]).to(device)

        return TrainedTokens(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=column(table.behaviour),
            advantages=column(table.advantages),
            weights=column(weights),
            sequence=torch.from_numpy(sequence).to(device),
            proximal=None if proximal is None else column(proximal),
            reference=self._reference_logprobs(batch, row),
            pair=torch.from_numpy(pair).to(device),
            chosen=torch.from_numpy(np.array(batch.chosen)[members]).to(device),
        )

    def _reference_logprobs(self, batch: Batch, row: Row) -> Tensor | None:
        if not self.rule.kl_coef:
            return None
        if self.policy.spec.kind is PolicyKind.LORA:
            with self.policy.as_reference():
                return self._forward(self.policy, batch, row)[0]
        assert self._reference is not None, "a KL term was asked for and no reference was built"
        with torch.no_grad():
            return self._forward(self._reference, batch, row)[0]

    def _without_gradient(self, policy: Policy, batch: Batch, members: Sequence[int]) -> Reals:
        gathered = torch.zeros(len(batch.table), dtype=torch.float32, device=policy.device)
        rows = pack(batch, members, self.row_tokens, self.packing)
        with torch.no_grad():
            for row, counts in self.world.own(rows):
                logprobs, _ = self._forward(policy, batch, row)
                if counts:
                    gathered[torch.from_numpy(row.token).to(policy.device)] = logprobs
        result: Reals = self.world.sum(gathered).cpu().numpy()
        return result

    @staticmethod
    def _forward(policy: Policy, batch: Batch, row: Row) -> tuple[Tensor, Tensor]:
        temperature = torch.from_numpy(batch.table.temperature[row.token])
        return policy.logprobs(row, temperature, torch.from_numpy(batch.table.target[row.token]))


def _full(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
