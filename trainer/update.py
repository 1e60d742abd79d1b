"""The optimizer steps of a batch, and the groups that drop out on the way: too large, not finite, or wrongly sampled.

A group is refused alone, with a reason, and the others of its batch are trained.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from trainer.batch.batch import Batch, Reals, minibatches, turn_advantages
from trainer.batch.ratios import Gauges, finite
from trainer.batch.selection import LARGEST_VALUE, Selection, without_groups
from trainer.gap_check import BatchGap, GapCheck
from trainer.model.engine import TrainingEngine
from trainer.model.memory import FILE, OUT_OF_MEMORY, OutOfMemory
from trainer.settings import TrainerSettings
from trainer.state import State
from turnwise.chains import Experience
from turnwise.errors import SettingsError
from turnwise.types import GroupKey, Json

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Refused = dict[GroupKey, str]
"""Groups that are not trained, each with the reason."""
Record = Callable[[Json, int], None]


NUM_VERDICTS = 10
"""Groups that are looked at before nearly all of them may be found too large, which stops the training."""
NEARLY_ALL = 0.9


class FittingGroups:
    """Stops a training that leaves out nearly all of its groups because they do not fit into memory."""

    def __init__(self) -> None:
        self._verdicts: deque[bool] = deque(maxlen=NUM_VERDICTS)
        """Of the latest groups: True where one does not fit."""

    def observe(self, num_trained: int, reasons: Iterable[str], left_out: tuple[str, ...]) -> None:
        """Take a batch: its trained groups, why others are not trained, and how reasons of memory begin.

        Raises:
            SettingsError: Nearly all of the latest groups do not fit.
        """
        num_large = sum(reason.startswith(left_out) for reason in reasons)
        self._verdicts.extend([*[False] * num_trained, *[True] * num_large])
        num_bad, num = sum(self._verdicts), len(self._verdicts)
        if num_large and num >= NUM_VERDICTS and num_bad >= NEARLY_ALL * num:
            raise SettingsError(
                f"{num_bad} of the last {num} groups do not fit into the device's memory, although activations are "
                "recomputed and a row holds one chain: use larger devices or more of them (context_parallel), "
                "weights_dtype='bfloat16', optimizer_state='host', or a lower engine_gpu_memory, and delete "
                f"{FILE!r} in policies_dir; to train short chains only, set max_chain_tokens"
            )


@dataclasses.dataclass(slots=True)
class Credited:
    """A batch with the advantages of its tokens."""

    batch: Batch
    chosen: Selection
    refused: Refused
    gauges: Json

    def trainable(self) -> list[Experience]:
        """Return the selected experiences that the model can compute."""
        return [one for one in self.chosen.experiences if one.group_key not in self.refused]


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """What was trained of a batch."""

    num_steps: int
    chosen: Selection
    """Without the groups that dropped out, which are in `refused`."""
    gauges: Json


class Updates:
    """Takes the optimizer steps of a batch; every process calls it in step."""

    def __init__(self, agent: TrainingEngine, gap_check: GapCheck, config: TrainerSettings) -> None:
        self._agent = agent
        self._gap_check = gap_check
        self._config = config

    def with_token_credit(self, batch: Batch, chosen: Selection) -> Credited:
        """Return batch and selection with the advantages that need a model; without the groups that cannot be trained.

        Raises:
            BatchRefused: The algorithm can credit nothing of the batch.
            OutOfMemory: A row does not fit into the memory of one of several processes.
        """
        refused = self._cannot_train(batch) | not_finite(batch)
        algorithm = self._agent.algorithm
        if not algorithm.credits_tokens:
            return Credited(batch, chosen, refused, {})
        members = range(batch.num_sampled)
        found = self._fitting(batch, members, refused, lambda fit: algorithm.credit(batch, fit, self._agent))
        if found is None:
            return Credited(batch, chosen, refused, {})
        batch, gauges = found
        chosen = dataclasses.replace(chosen, advantages=turn_advantages(batch))
        return Credited(batch, chosen, refused | self._cannot_train(batch) | not_finite(batch), gauges)

    def take(self, state: State, credited: Credited, num_minibatches: int, record: Record) -> Done:
        """Take so many optimizer steps in each of `reuse_epochs` passes.

        Raises:
            EngineDisagrees: Nearly all groups have other logprobs than the trainer computes.
            OutOfMemory: A row does not fit into the memory of one of several processes.
        """
        gaps = BatchGap(credited.batch)
        num_steps, gauges = self._steps(state, credited.batch, num_minibatches, credited.refused, gaps, record)
        refused, chosen = credited.refused, credited.chosen
        for key, reason in refused.items():
            log.error("group %s is not trained: %s", key[1], reason)
        if refused:
            chosen = without_groups(chosen, refused)
            num_too_large = sum(reason.startswith(OUT_OF_MEMORY) for reason in refused.values())
            gauges |= {"num_refused_groups": len(chosen.refused), "num_groups_out_of_memory": num_too_large}
        return Done(num_steps, chosen, gauges | credited.gauges | gaps.read(refused))

    def _steps(
        self, state: State, batch: Batch, num_minibatches: int, refused: Refused, gaps: BatchGap, record: Record
    ) -> tuple[int, Json]:
        """Take the steps; return how many, and the gauges. Groups that drop out are added to `refused`."""
        rng = state.rng()
        sampled = range(batch.num_sampled)
        proximal = self._fitting(batch, sampled, refused, lambda fit: self._agent.proximal_logprobs(batch, fit))
        gradient = functools.partial(self._agent.gradient, state.optimizer, batch, proximal=proximal)
        total, norms = Gauges(), list[float]()
        for epoch in range(self._config.reuse_epochs):
            for members in minibatches(batch, num_minibatches, rng):
                taken = self._fitting(batch, members, refused, gradient)
                if taken is not None and epoch == 0 and self._differs(gaps, members, taken[1], refused, norms):
                    taken = self._fitting(batch, members, refused, gradient)
                if taken is None:
                    continue
                norms.append(self._agent.step(state.optimizer))
                state.scheduler.step()
                total.add(taken[0])
                number = state.progress.num_optimizer_steps + len(norms)
                if not np.isfinite(norms[-1]):
                    log.warning("optimizer step %d is skipped: a gradient is not finite", number)
                gauges = taken[0].read() | {"grad_norm": finite(norms[-1])}
                record({"update": number, **gauges}, state.progress.num_batches + 1)
        finite_norms = [norm for norm in norms if np.isfinite(norm)]
        return len(norms), total.read() | {
            "grad_norm": float(np.mean(finite_norms)) if finite_norms else None,
            "num_skipped_updates": len(norms) - len(finite_norms),
            "learning_rate": state.optimizer.param_groups[0]["lr"],
        }

    def _differs(
        self, gaps: BatchGap, members: Sequence[int], logprobs: Reals, refused: Refused, norms: Sequence[float]
    ) -> bool:
        """Refuse the groups of a step whose logprobs are not the engine's; return whether there are any."""
        fit = _members_without(gaps.batch, members, refused)
        differing = self._gap_check.observe(gaps, fit, logprobs, has_moved=bool(norms))
        refused |= differing
        return bool(differing)

    def _fitting(
        self,
        batch: Batch,
        members: Sequence[int],
        refused: Refused,
        compute: Callable[[list[int]], Result],
    ) -> Result | None:
        """Compute over the members of the groups that are not refused; None where there are none.

        A group that does not fit into the memory of the only process is refused.
        """
        while fit := _members_without(batch, members, refused):
            try:
                return compute(fit)
            except OutOfMemory as error:
                if self._agent.world.size > 1:
                    raise
                for member in error.units.values():
                    key = batch.experiences[member].group_key
                    refused[key] = f"{OUT_OF_MEMORY}: {error}; set max_chain_tokens below that"
        return None

    def _cannot_train(self, batch: Batch) -> Refused:
        reasons = [(one.group_key, self._agent.why_untrainable(one)) for one in batch.experiences]
        return {key: reason for key, reason in reasons if reason is not None}


def not_finite(batch: Batch) -> Refused:
    """Return the groups with an advantage or a return that float32 cannot train on."""
    table = batch.table
    refused: Refused = {}
    for name, values in {"advantage": table.advantages, "return": table.returns}.items():
        if values is None:
            continue
        for token in np.flatnonzero(~(np.abs(values) <= LARGEST_VALUE)):
            key = batch.experiences[table.experience[token]].group_key
            is_over = f"not_finite: a token has the {name} {float(values[token])!r}"
            refused.setdefault(key, f"{is_over}; up to {LARGEST_VALUE:g} is trained, scale the rewards")
    return refused


def _members_without(batch: Batch, members: Sequence[int], refused: Refused) -> list[int]:
    return [member for member in members if batch.experiences[member].group_key not in refused]
