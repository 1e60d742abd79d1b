"""When the trainer takes a batch, and what it waits for: more groups, older versions, or a person.

Slow sessions are often the hard tasks. Dropping them because of their age would train on the quick ones alone. So the
trainer waits instead: it makes no update that would take it more than `max_versions_in_flight` versions ahead of the
oldest version that an open group was sampled by, or of a pinned version, which samples everything.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from trainer.settings import TrainerSettings
from turnwise.store.claims import Claim
from turnwise.types import PolicyVersion

log = logging.getLogger(__name__)

MOST_REFUSED = 3
"""Versions in a row that engines refuse before the training waits for a person."""
MOST_REFILL_SECONDS = 60.0
"""Longest wait, by default, for groups in the place of those with equal rewards."""
SMALLEST_PART = 4
"""A batch that does not become whole in time is trained if one in so many places is filled, with an advantage."""
REPORT_SECONDS = 5.0
"""Shortest time between two log lines about the same wait."""
FIRST_WAIT_SECONDS = 5.0
"""How long the first batch of a run waits for further groups, where `wait_seconds` is longer."""
JUMP_SECONDS = 30.0
"""Difference to this process's own clock from which on the database's clock counts as having jumped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The counts of a run, and which versions its weights came from."""

    seed: int = 0
    num_batches: int = 0
    """Claims acked, the refused ones included."""
    update_id: int = 0
    """Of the last of them in the ledger, where ids are unique over all policies."""
    num_optimizer_steps: int = 0
    """A batch, which the ledger calls an update, takes one or more."""
    policy_version: int = 0
    """The version that the weights are."""
    num_groups: int = 0
    num_sessions: int = 0
    num_tokens: int = 0
    """Sampled tokens that carried loss."""
    num_refused_groups: int = 0
    """Groups that were claimed and not trained on, for whatever reason."""
    recent_versions: tuple[int, ...] = (0,)
    """The versions that the weights came from, oldest first, this version last; the latest ones only."""
    rewound_to: int | None = None
    """The version that the run went back to: the pinned one until no version is pinned, or the one before a failed one
    until the next batch."""

    def staleness_of(self, version: int) -> int:
        return sum(known > version for known in self.recent_versions)

    def oldest_trainable(self, max_staleness: int | None) -> int | None:
        """Return the oldest version whose turns may be trained; None where there is no bound."""
        if max_staleness is None:
            return None
        return self.recent_versions[max(len(self.recent_versions) - 1 - max_staleness, 0)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the ledger holds at one moment."""

    num_ready: int
    """Groups that can be claimed, without single sessions."""
    num_singles: int = 0
    """Single sessions that can be claimed."""
    num_open: int = 0
    """Sessions that have a reward and are not over, read while a batch lacks groups."""
    pinned: int | None = None
    """The pinned version."""
    oldest_in_flight: int | None = None
    """The oldest version that sampled a turn of an open group."""
    failed: frozenset[int] = frozenset()
    """The failed ones among the versions that the weights came from."""
    undone: range = range(0)
    """The versions that a person undid by a choice of the version before them, without a pin."""
    refused: Sequence[PolicyVersion] = ()
    """The newest `MOST_REFUSED` versions, if engines refused each of them."""
    alarm: str | None = None
    """The sentinel that is beyond its bound, with its numbers."""
    quota: str | None = None
    """The quota of the policy's tenant that is used up, with its numbers."""

    def num_filled(self, rule: TrainerSettings) -> int:
        return self.num_ready + self.num_singles // rule.singles_per_group


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The request to go on from another version's weights."""

    version: int
    reason: str


def why_held(look: Look, at: RunProgress, rule: TrainerSettings) -> str | Rewind | None:
    """Return why no batch may be claimed now, None where one may, or the version to go back to."""
    if look.refused:
        return (
            f"engines refused the last {len(look.refused)} versions, so training waits: {look.refused[0].error}. Mend "
            f"the cause, then load one again: turnwise policies activate {look.refused[0].version}"
        )
    if look.alarm is not None or look.quota is not None:
        return look.alarm or look.quota
    if any(version in look.undone for version in at.recent_versions):
        chosen = look.undone.start - 1
        undid = f"version {chosen} was activated in place of version {look.undone.stop - 1}"
        if at.rewound_to != chosen:
            return Rewind(version=chosen, reason=undid)
        return f"{undid}, and it cannot be trained from: training waits until another version is activated"
    good = _last_good(look, at)
    if good is not None and good != at.rewound_to and rule.when_failed == "go_back":
        return Rewind(version=good, reason=f"version {min(look.failed)} failed")
    bound, version = _bound(rule), at.recent_versions[-1]
    if bound is None:
        return None
    if look.pinned is not None and at.staleness_of(look.pinned) >= bound:
        if rule.when_pinned == "train_pinned" and at.rewound_to != look.pinned:
            return Rewind(version=look.pinned, reason=f"version {look.pinned} is pinned")
        return (
            f"version {look.pinned} is pinned and the trainer is at version {version}: training waits until "
            "the pin is released or a newer version is activated (setting when_pinned)"
        )
    oldest = look.oldest_in_flight
    if oldest is not None and at.staleness_of(oldest) >= bound:
        return (
            f"open groups were sampled by version {oldest} and the trainer is at version {version}: training "
            f"waits for them (max_versions_in_flight={rule.max_versions_in_flight})"
        )
    return None


def _last_good(look: Look, at: RunProgress) -> int | None:
    before = [version for version in at.recent_versions if version < min(look.failed, default=0)]
    return max(before, default=None)


def _bound(rule: TrainerSettings) -> int | None:
    if rule.max_versions_in_flight is None:
        return None
    if rule.max_staleness is None:
        return rule.max_versions_in_flight
    return min(rule.max_versions_in_flight, rule.max_staleness + 1)


def describe_claim(claim: Claim) -> str:
    num_singles = sum(group.is_single for group in claim.groups)
    num_groups = len(claim.groups) - num_singles
    counted = [f"{num_groups} groups"] if num_groups or not num_singles else []
    return " and ".join(counted + ([f"{num_singles} single sessions"] if num_singles else []))


def refill_limit(rule: TrainerSettings) -> float:
    """Return how long a batch waits at most for groups in the place of those with equal rewards, seconds."""
    if rule.refill_seconds is not None:
        return rule.refill_seconds
    return MOST_REFILL_SECONDS if rule.wait_seconds is None else min(rule.wait_seconds, MOST_REFILL_SECONDS)


def smallest_batch(rule: TrainerSettings) -> int:
    """Return the places of a batch that must be filled before it is trained."""
    return -(-rule.groups_per_batch // SMALLEST_PART)


class Wait:
    """A wait for a batch: when it is over, what it waits for, and for how long it was held back."""

    def __init__(
        self, rule: TrainerSettings, report: Callable[[str, float | None], None], *, is_first: bool = False
    ) -> None:
        """Begin to wait."""
        self._rule = rule
        self._report = report
        self._patience = rule.wait_seconds
        if is_first and self._patience is not None:
            self._patience = min(self._patience, FIRST_WAIT_SECONDS)
        self.started_at = time.monotonic()
        self.held_seconds = 0.0
        self._seen_at: float | None = None
        """When a group or a single session was ready first."""
        self._held_since: float | None = None
        self._reported: str | None = None
        self._reported_at = 0.0
        self._logged: tuple[int, int, bool, str | None] | None = None

    def is_over(self, look: Look, held: str | None) -> bool:
        """Take what the ledger holds now, and why nothing may be claimed; return whether a batch is claimed now."""
        now, num_filled = time.monotonic(), look.num_filled(self._rule)
        if self._seen_at is None and (look.num_ready or look.num_singles):
            self._seen_at = now
        left = None
        if self._patience is not None and self._seen_at is not None and num_filled >= smallest_batch(self._rule):
            left = self._seen_at + self._patience - now
        if self._held_since is not None:
            self.held_seconds += now - self._held_since
        self._held_since = None if held is None else now
        is_full = num_filled >= self._rule.groups_per_batch and held is None
        if not is_full:
            self._log(look, left, held, now)
        return is_full or (held is None and left is not None and left <= 0)

    def _log(self, look: Look, left: float | None, held: str | None, now: float) -> None:
        """Report and log what is waited for when it changed, at most every few seconds.

        The number of open sessions changes with each reward of live traffic: it is reported, and logged with the rest.
        """
        report = describe_wait(look, self._rule, None, held)
        if report == self._reported or (self._reported is not None and now - self._reported_at < REPORT_SECONDS):
            return
        self._reported, self._reported_at = report, now
        self._report(report, left if held is None else None)
        logged = (look.num_ready, look.num_singles, look.num_open > 0, held)
        if logged != self._logged:
            self._logged = logged
            log.info("%s", describe_wait(look, self._rule, left, held))


def describe_wait(look: Look, rule: TrainerSettings, seconds_left: float | None, held: str | None) -> str:
    each_counts = rule.singles_per_group == 1
    num_ready = look.num_filled(rule) if each_counts else look.num_ready
    counted = f"{num_ready} of {rule.groups_per_batch} groups are ready"
    if look.num_singles and not each_counts:
        counted += f", and {look.num_singles} single sessions, of which {rule.singles_per_group} count as a group"
    if held is not None:
        return f"{counted}; {held}"
    if look.num_filled(rule) < smallest_batch(rule):
        lacking = f"waiting: {counted}; a batch needs at least {smallest_batch(rule)}"
        return lacking + (f"; {_describe_open(look, rule)}" if look.num_open else "")
    return f"waiting: {counted}" + ("" if seconds_left is None else f", starts in {max(seconds_left, 0):.0f} s")


def describe_refill(claim: Claim, num_groups: int, rule: TrainerSettings) -> str:
    singles = "" if rule.singles_per_group == 1 else f" ({rule.singles_per_group} single sessions count as one)"
    return (
        f"waiting: too many of {describe_claim(claim)} have equal rewards, which teach nothing; "
        f"{num_groups} more groups{singles} are taken if they are ready within {refill_limit(rule):.0f} s"
    )


def _describe_open(look: Look, rule: TrainerSettings) -> str:
    counted = f"{look.num_open} open sessions have a reward" if look.num_open > 1 else "1 open session has a reward"
    is_said = rule.singles_per_group == 1 or look.num_singles > 0
    singles = "" if is_said else f", and {rule.singles_per_group} single ones count as a group"
    return (
        f"{counted}: a session counts once it is over (POST /v1/sessions/{{session_id}}/end; one that no call names is "
        f"over after ten minutes without a call){singles}"
    )


class SteadyClock:
    """Compares the database's clock with this process's monotonic clock.

    After a jump forward, as when a virtual machine resumes, all sessions look as if they had been idle for its length.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._jumped_at = -math.inf

    def seconds_since_jump(self, now: datetime) -> float:
        """Return for how long the database's clock has run evenly; infinite if no jump was seen."""
        monotonic = time.monotonic()
        offset = now.timestamp() - monotonic
        if self._offset is not None and abs(offset - self._offset) > JUMP_SECONDS:
            log.warning("the database's clock jumped by %.0f s", offset - self._offset)
            self._jumped_at = monotonic
        self._offset = offset
        return monotonic - self._jumped_at
