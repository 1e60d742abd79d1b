"""The publishing gate: what a version does to held-out sessions, before engines get it.

The set holds sessions of split `eval` and sessions that a person or a judge labelled. Their tokens and behaviour
logprobs are in the ledger, so the check is one forward pass and needs no engine. A version fails if it makes the
replies of good sessions less likely than they were when they were sampled, or raises those of bad sessions above those
of good ones. Legend: S sessions of the set.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from pydantic import Field

from trainer.batch.batch import Batch, Reals, build
from trainer.batch.chain import Chain
from trainer.batch.selection import Unfit
from trainer.claims.holds import Beside
from turnwise.features import gate
from turnwise.features.statistics import intervals
from turnwise.features.statistics.confidence import Looks
from turnwise.settings import Settings
from turnwise.types import Json, SessionKey

log = logging.getLogger(__name__)

CONFIDENCE = Looks()
"""A version is compared once."""
NUM_NAMED = 5
GOOD_LABELS = ("golden",)
BAD_LABELS = ("failure",)


class GateSettings(Settings):
    """What a version must hold on before engines get it."""

    gate_sessions: int = Field(default=0, ge=0)
    """Publish a version only if it holds on this many held-out sessions (split `eval`), the newest ones with a reward,
    and on as many with the label `golden` or `failure`. 0 publishes every version."""
    gate_drop: float = Field(default=0.02, gt=0)
    """Nats a token by which the replies of good held-out sessions may become less likely than when they were sampled,
    or by which those of bad ones may gain on them."""
    gate_good_reward: float = 1.0
    """Held-out sessions with at least this reward are good."""
    gate_bad_reward: float = 0.0
    """Held-out sessions with at most this reward are bad."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """How a version changed the replies of one session."""

    name: str
    """The session's task, or its id where it has no task."""
    is_good: bool | None
    """Whether it is good or bad; None if it is neither."""
    nats: float
    """Mean of log π − log μ over the session's tokens; μ is the policy that sampled them."""


def shifts_of(
    batch: Batch, logprobs: Reals, labels: Mapping[SessionKey, Collection[str]], settings: GateSettings
) -> list[Shift]:
    """Return the mean change of each session's sampled tokens."""
    gained = np.asarray(logprobs, np.float64) - batch.table.behaviour
    by_session: dict[SessionKey, list[int]] = defaultdict(list)
    for index, experience in enumerate(batch.experiences):
        by_session[experience.session_key].append(index)
    shifts = []
    for members in by_session.values():
        places = np.concatenate([batch.tokens_of[member] for member in members])
        if len(places):
            first = batch.experiences[members[0]]
            is_good = _is_good(first, labels.get(first.session_key, ()), settings)
            shifts.append(Shift(name=_name(first), is_good=is_good, nats=float(gained[places].mean())))
    return shifts


class Gate(Beside[GateSettings]):
    """Compares the updated weights with held-out sessions; every process calls it in step."""

    @classmethod
    def is_on(cls, settings: GateSettings) -> bool:
        return settings.gate_sessions > 0

    def why_unpublished(self, policy_version: int) -> tuple[Json, str | None]:
        """Return gauges, and why weights that come from this version must not be published; None where they may.

        Raises:
            Unfit: A chain cannot be computed in one of several processes.
        """
        settings, world = self._settings, self._learner.world
        labels = [*GOOD_LABELS, *BAD_LABELS]
        known, labels_of = world.from_first(lambda: self._regression_set(labels))
        found = self._comparable(known)
        credit = [np.zeros(len(experience.turn_ids)) for experience in found]
        batch = build(found, credit, policy_version=policy_version)
        try:
            logprobs = self._learner.logprobs_of(batch, range(len(found)))
        except Unfit as error:
            if world.size > 1:
                raise
            log.warning("the publishing gate was not applied: %s; set a smaller max_chain_tokens", error)
            return {}, None
        gauges, reason = judge(shifts_of(batch, logprobs, labels_of, settings), settings)
        if reason is not None:
            log.error("the version is kept and not served: %s", reason)
        return gauges, reason

    def _regression_set(self, labels: Collection[str]) -> tuple[list[Chain], gate.SessionLabels]:
        """Return the chains of the newest held-out and the newest labelled sessions, and their labels."""
        roles, of, most = self._ledger.settings.train_roles, self._ledger.policy_id, self._settings.gate_sessions
        found, labels_of = self._ledger.read(
            lambda conn: gate.regression_set(conn, most, labels, roles=roles, policy_id=of)
        )
        return self._ledger.chains(found), labels_of

    def _comparable(self, found: Sequence[Chain]) -> list[Chain]:
        kept = [experience for experience in found if self._learner.policy.why_unfit(experience) is None]
        if len(kept) < len(found):
            log.warning(
                "the publishing gate leaves out %d of %d chains, which this model cannot compute",
                len(found) - len(kept),
                len(found),
            )
        return kept


def _is_good(experience: Chain, labels: Collection[str], settings: GateSettings) -> bool | None:
    if any(label in labels for label in BAD_LABELS):
        return False
    if any(label in labels for label in GOOD_LABELS) or experience.reward >= settings.gate_good_reward:
        return True
    return False if experience.reward <= settings.gate_bad_reward else None


def judge(shifts: Sequence[Shift], settings: GateSettings) -> tuple[Json, str | None]:
    """Return gauges, and why a version with these shifts must not be published; None where it may.

    A set of fewer than two good sessions refuses nothing. A mean counts as fallen when its whole interval is below the
    limit. A version that gives a session no finite logprob is refused in any case: a mean with a NaN in it compares as
    neither above nor below a limit.
    """
    broken = [shift for shift in shifts if not math.isfinite(shift.nats)]
    if broken:
        reason = (
            f"the logprobs of {len(broken)} of {len(shifts)} sessions are not finite under these weights: "
            f"{_named(broken[:NUM_NAMED])}"
        )
        return {"gate_num_not_finite": len(broken)}, reason
    good = [shift for shift in shifts if shift.is_good]
    bad = [shift for shift in shifts if shift.is_good is False]
    kept = intervals.mean([shift.nats for shift in good], CONFIDENCE)
    gained = intervals.difference([shift.nats for shift in bad], [shift.nats for shift in good], CONFIDENCE)
    gauges: Json = {"gate_num_good": len(good), "gate_num_bad": len(bad)}
    if good:
        gauges["gate_good_shift"] = kept.mean
    if bad:
        gauges["gate_bad_shift"] = float(np.mean([shift.nats for shift in bad]))
    if len(good) > 1 and kept.is_below(-settings.gate_drop):
        worst = sorted(good, key=lambda shift: shift.nats)[:NUM_NAMED]
        reason = (
            f"good replies of {len(good)} sessions are {-kept.mean:.3g} nats a token less likely than when they "
            f"were sampled; the limit is {settings.gate_drop:g} (gate_drop). What fell most: {_named(worst)}"
        )
        return gauges, reason
    if min(len(good), len(bad)) > 1 and gained.is_above(settings.gate_drop):
        worst = sorted(bad, key=lambda shift: -shift.nats)[:NUM_NAMED]
        reason = (
            f"replies of {len(bad)} bad sessions gained {gained.mean:.3g} nats a token on those of "
            f"{len(good)} good ones; the limit is {settings.gate_drop:g} (gate_drop). What rose most: {_named(worst)}"
        )
        return gauges, reason
    return gauges, None


def _named(shifts: Sequence[Shift]) -> str:
    return ", ".join(f"{shift.name} {shift.nats:+.2f}" for shift in shifts)


def _name(experience: Chain) -> str:
    return experience.task_id or experience.session_id
