"""From a claimed batch to its optimizer steps: what of it is trained, which groups drop out, and what replaces them.

A group is refused alone, with a reason, and the others of its batch are trained. It may have equal rewards, be too
large, not finite, or wrongly sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np

from trainer.algorithms.algorithm import select
from trainer.batch.advantages import UNIFORM
from trainer.batch.batch import Batch, Reals, build, minibatches, turn_advantages
from trainer.batch.ratios import Gauges, finite
from trainer.batch.selection import LARGEST_VALUE, Selection, Unfit, left_out
from trainer.claims.claims import SMALLEST_PART, Claims, refill_limit
from trainer.claims.holds import Beside, Comparison, own
from trainer.claims.ledger import ClaimedBatch
from trainer.model.agent import PolicyAgent
from trainer.settings import TrainerSettings
from trainer.versions.state import State
from turnwise.types import GroupKey, Json

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Record = Callable[[Json, int], None]

MAX_REFILL_FACTOR = 4
MOST_REASONS = 5
"""Reasons of one batch that are logged."""


class Updates:
    """Selects what is trained of a batch, and takes its optimizer steps; every process calls it in step."""

    def __init__(self, claims: Claims, learner: PolicyAgent, beside: Sequence[Beside[Any]] = ()) -> None:
        self._claims = claims
        self._learner = learner
        self._selected = own(beside, Beside.selected)
        self._comparisons = own(beside, Beside.comparison)

    def refilled(self, claimed: ClaimedBatch, state: State, patience: float | None) -> tuple[ClaimedBatch, Selection]:
        """Return the batch with further groups in the place of those of equal rewards, if there are any; and what fits.

        With `refill_seconds` all are replaced: Yu et al. 2025 (DAPO, arXiv:2503.14476), dynamic sampling. Without it, a
        quarter of the batch is to have an advantage. Nothing is waited for while other policies could train, which is
        where `patience` is 0. Sessions that were marked as not to be trained meanwhile are left out.
        """
        settings, singles = self._learner.settings, self._learner.settings.singles_per_group
        until = time.monotonic() + (0.0 if patience == 0 else refill_limit(settings))
        most = MAX_REFILL_FACTOR * len(claimed.claim.groups)
        size = claimed.claim.size(singles)
        needed = -(-size // SMALLEST_PART) if settings.refill_seconds is None else size
        selection = self.select(claimed, state)
        if not claimed.may_grow:
            return claimed, selection
        while len(claimed.claim.groups) < most:
            uniform = {key for key, why in selection.refused.items() if why == UNIFORM}
            missing = needed - (claimed.claim.size(singles) - claimed.claim.size(singles, uniform))
            if missing <= 0:
                break
            refill = functools.partial(self._claims.refill, claimed, missing, state.progress, until)
            more = self._learner.world.from_first(refill)
            if more is None:
                break
            claimed = more
            selection = self.select(claimed, state)
        denied = self._learner.world.from_first(lambda: self._claims.denied(claimed.experiences))
        if not denied:
            return claimed, selection
        left = [experience for experience in claimed.experiences if experience.session_key not in denied]
        claimed = dataclasses.replace(claimed, experiences=left)
        return claimed, self.select(claimed, state)

    def select(self, claimed: ClaimedBatch, state: State) -> Selection:
        keys, settings = sorted(claimed.keys), self._learner.settings
        return select(claimed.experiences, keys, self._learner.algorithm, settings, state.singles)

    def batch_of(self, claimed: ClaimedBatch, selection: Selection, state: State) -> tuple[Batch | None, Json]:
        """Return what was selected of a claim, and gauges; None without any."""
        for reason, count in Counter(selection.refused.values()).most_common(MOST_REASONS):
            log.info("not trained: %d of %d groups, %s", count, len(claimed.group_keys), reason)
        found: Json = {}
        for selected in self._selected:
            found |= selected(selection, state.progress)
        gauges = claim_gauges(claimed, selection, state) | found
        if not selection.experiences:
            return None, gauges
        batch = build(
            selection.experiences,
            selection.advantages,
            policy_version=state.progress.policy_version,
            pairs=selection.pairs,
            mixed=selection.mixed,
            needs_behaviour=self._learner.algorithm.needs_behaviour,
        )
        return batch, gauges

    def with_token_credit(self, batch: Batch, selection: Selection) -> tuple[Batch, Json]:
        """Return the batch with the advantages that need a model, and gauges; refuse the groups that cannot be trained.

        Raises:
            BatchRefused: The algorithm can credit nothing of the batch.
            Unfit: A row cannot be computed in one of several processes.
        """
        self._refuse_unfit(batch, selection)
        algorithm = self._learner.algorithm
        if not algorithm.credits_tokens:
            return batch, {}
        members = range(batch.num_sampled)
        found = self._fitting(batch, members, selection, lambda fit: algorithm.credit(batch, fit, self._learner))
        if found is None:
            return batch, {}
        batch, gauges = found
        selection.advantages = turn_advantages(batch)
        self._refuse_unfit(batch, selection)
        return batch, gauges

    def take(
        self, state: State, claimed: ClaimedBatch, batch: Batch, selection: Selection, record: Record
    ) -> tuple[int, Json]:
        """Take the optimizer steps of a batch: `num_minibatches` of them in each of `reuse_epochs` passes.

        Return the count of all steps, and gauges. Groups that drop out are refused.

        Raises:
            EngineDisagrees: Nearly all groups have other logprobs than the trainer computes.
            Unfit: A row cannot be computed in one of several processes.
        """
        compared = [comparison(batch) for comparison in self._comparisons]
        count = num_minibatches(claimed, batch, self._learner.settings)
        num_steps, gauges = self._steps(state, batch, count, selection, compared, record)
        dropped = {each.group_key for each in batch.experiences} & selection.refused.keys()
        for key, reason in selection.refused.items():
            if key in dropped:
                log.error("group %s is not trained: %s", key[1], reason)
        if dropped:
            num_too_large = sum(selection.refused[key].startswith("out_of_memory") for key in dropped)
            gauges |= {"num_refused_groups": len(selection.refused), "num_groups_out_of_memory": num_too_large}
        for each in compared:
            gauges |= each.gauges(dropped)
        return num_steps, gauges

    def _steps(
        self,
        state: State,
        batch: Batch,
        num_minibatches: int,
        selection: Selection,
        compared: Sequence[Comparison],
        record: Record,
    ) -> tuple[int, Json]:
        rng = state.rng()
        sampled = range(batch.num_sampled)
        proximal: Reals | None = None
        if self._learner.algorithm.needs_proximal:
            proximal = self._fitting(batch, sampled, selection, lambda fit: self._learner.logprobs_of(batch, fit))
        gradient = functools.partial(self._learner.gradient, state.optimizer, batch, proximal=proximal)
        total, norms = Gauges(), list[float]()
        num_planned = self._learner.settings.reuse_epochs * num_minibatches
        for epoch in range(self._learner.settings.reuse_epochs):
            for place, members in enumerate(minibatches(batch, num_minibatches, rng), epoch * num_minibatches):
                taken = self._fitting(batch, members, selection, gradient)
                if taken is not None and epoch == 0 and _differs(compared, batch, members, taken[1], selection, norms):
                    taken = self._fitting(batch, members, selection, gradient)
                if taken is None:
                    continue
                counts = state.progress
                state.schedule.set(counts.num_optimizer_steps + len(norms), counts.num_batches + place / num_planned)
                norms.append(self._learner.step(state.optimizer))
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
            "rows_shared": int(self._learner.policy.shares_rows),
            "learning_rate": state.optimizer.param_groups[0]["lr"],
        }

    def _fitting(
        self,
        batch: Batch,
        members: Sequence[int],
        selection: Selection,
        compute: Callable[[list[int]], Result],
    ) -> Result | None:
        """Compute over the members of the groups that are not refused; None where there are none.

        A group that the only process cannot compute is refused.
        """
        while fit := _members_without(batch, members, selection.refused):
            try:
                return compute(fit)
            except Unfit as error:
                if self._learner.world.size > 1:
                    raise
                for member in error.members:
                    selection.refuse(batch.experiences[member].group_key, error.why)
        return None

    def _refuse_unfit(self, batch: Batch, selection: Selection) -> None:
        reasons = [(one.group_key, self._learner.policy.why_unfit(one)) for one in batch.experiences]
        for key, reason in [*not_finite(batch).items(), *reversed(reasons)]:
            if reason is not None:
                selection.refuse(key, reason)


def _differs(
    compared: Sequence[Comparison],
    batch: Batch,
    members: Sequence[int],
    logprobs: Reals,
    selection: Selection,
    norms: Sequence[float],
) -> bool:
    """Refuse the groups of a step that differ from what they are held against; return whether there is one."""
    fit, num_refused = _members_without(batch, members, selection.refused), len(selection.refused)
    for each in compared:
        for key, reason in each.why_refused(fit, logprobs, has_moved=bool(norms)).items():
            selection.refuse(key, reason)
    return len(selection.refused) > num_refused


def not_finite(batch: Batch) -> dict[GroupKey, str]:
    table = batch.table
    refused: dict[GroupKey, str] = {}
    for name, values in {"advantage": table.advantages, "return": table.returns}.items():
        if values is None:
            continue
        for token in np.flatnonzero(~(np.abs(values) <= LARGEST_VALUE)):
            key = batch.experiences[table.experience[token]].group_key
            is_over = f"not_finite: a token has the {name} {float(values[token])!r}"
            refused.setdefault(key, f"{is_over}; up to {LARGEST_VALUE:g} is trained, scale the rewards")
    return refused


def _members_without(batch: Batch, members: Sequence[int], refused: Collection[GroupKey]) -> list[int]:
    return [member for member in members if batch.experiences[member].group_key not in refused]


def num_minibatches(claimed: ClaimedBatch, batch: Batch, settings: TrainerSettings) -> int:
    """Return the optimizer steps of a pass: fewer for a batch of fewer groups, and never more than groups are trained.

    So an update sees as many groups in a small batch as in a whole one, if it has them. What is mixed in does not
    count: a step with it alone would be taken at the whole learning rate, whatever its share is.
    """
    singles = {experience.group_key for experience in claimed.experiences if experience.is_single}
    num_read = len({experience.group_key for experience in claimed.experiences} - singles)
    num_read += -(-len(singles) // settings.singles_per_group)
    share = -(-num_read * settings.num_minibatches // settings.groups_per_batch)
    num_trained = len({experience.group_key for experience in batch.experiences[: batch.num_sampled]})
    return max(1, min(settings.num_minibatches, share, num_trained))


def claim_gauges(claimed: ClaimedBatch, selection: Selection, state: State) -> Json:
    """Return what is known of a batch before it is trained on."""
    sessions = {experience.session_key: experience.reward for experience in claimed.experiences}
    rewards = np.array(list(sessions.values()) or [0.0])
    staleness = [
        state.progress.staleness_of(one.policy_version_first)
        for one in claimed.experiences
        if one.policy_version_first >= 0
    ] or [0]
    uniform = sum(reason == UNIFORM for reason in selection.refused.values())
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": int(max(staleness)),
        "num_groups": claimed.num_groups,
        "num_single_sessions": len({one.session_key for one in claimed.experiences if one.is_single}),
        "num_stale_groups": claimed.claim.num_stale,
        "num_uniform_groups": uniform,
        "num_refill_groups": claimed.num_refills,
        "num_refused_groups": len(selection.refused),
        "num_sessions": len({experience.session_key for experience in selection.experiences}),
        "waited_seconds": claimed.waited_seconds,
        "held_seconds": claimed.held_seconds,
    }


def left_out_gauges(
    claimed: ClaimedBatch, selection: Selection, trained: Collection[str], settings: TrainerSettings
) -> Json:
    """Return how many turns of the trained groups, and how many tokens of all, carry no loss, and why.

    `trained` has the ids of the turns that do.
    """
    needs = settings.algorithm.needs_behaviour
    turns, tokens = left_out(claimed.experiences, selection.refused, trained, settings, needs_behaviour=needs)
    num_sampled = sum(int(experience.loss_mask.sum()) for experience in claimed.experiences)
    return {
        "num_turns_left_out": sum(turns.values()),
        **{f"num_turns_left_out_{reason}": count for reason, count in sorted(turns.items())},
        "num_tokens_sampled": num_sampled,
        "trained_share": 1 - sum(tokens.values()) / max(num_sampled, 1),
        **{f"num_tokens_left_out_{reason}": count for reason, count in sorted(tokens.items())},
    }
