"""The claim of finished, rewarded groups: what the store holds at a moment, what stops a batch, and the lease."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from trainer.checks import sentinels
from trainer.claims.ledger import ClaimedBatch, Ledger, StopFlag, UpdateIds, outlast
from trainer.claims.pacing import (
    MOST_REFUSED,
    Look,
    Rewind,
    RunProgress,
    SteadyClock,
    Wait,
    describe_claim,
    describe_refill,
    smallest_batch,
    why_held,
)
from trainer.settings import TrainerSettings
from turnwise.chains import Experience
from turnwise.errors import StoreUnavailable
from turnwise.store import claims, groups, policies, serving, versions
from turnwise.store.database import Connection, Database, clock
from turnwise.store.rows import from_micros
from turnwise.store.serving import ServingState
from turnwise.types import Policy
from turnwise.version_directory import num_bytes_on_disk

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""How long a claim lasts without renewal. The trainer renews it while it works."""
POLL_SECONDS = 0.5
"""Longest pause between two queries for ready groups."""
IN_FLIGHT_SECONDS = 120.0
"""Open sessions without activity for this long no longer hold the trainer back."""
SENTINEL_SECONDS = 30.0
"""How often the sentinels are read while the trainer waits for a batch."""


class Claims(Ledger):
    """The batches of one policy: each is claimed, held, and acknowledged."""

    def __init__(
        self,
        db: Database,
        rule: TrainerSettings,
        *,
        with_imported: bool = False,
        is_paced: bool = True,
        policy: Policy | None = None,
        update_ids: UpdateIds | None = None,
        stopped: StopFlag | None = None,
    ) -> None:
        """Claim for one policy.

        Args:
            db: The store.
            rule: When a batch is claimed.
            with_imported: Claim groups of imported sessions too: the loss must read no behaviour logprobs.
            is_paced: Wait for older versions, and drop stale groups; a replay buffer trains on old turns anyway.
            policy: A named policy; None for the default one.
            update_ids: As in `Ledger`.
            stopped: As in `Ledger`.
        """
        super().__init__(db, rule, policy=policy, update_ids=update_ids, stopped=stopped)
        self._with_imported = with_imported
        self._is_paced = is_paced
        self._wait: Wait | None = None
        """The wait for a batch, over as many calls of `next` as it takes."""
        self._clock = SteadyClock()
        self._checked_at = -math.inf
        """When the sentinels were read last, on the monotonic clock."""

    def next(self, at: RunProgress, seconds: float | None = None) -> ClaimedBatch | Rewind | None:
        """Wait until a batch is ready and claim it; None after `stop`, or after so many seconds.

        Args:
            at: Where the run is.
            seconds: None waits without an end, 0 looks once. The next call goes on with the same wait.

        Raises:
            StoreUnavailable: The database fails in a way that repetitions cannot help.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        pause = min(0.02, POLL_SECONDS)
        while not self.stopped.is_set():
            is_first = at.num_batches == 0
            wait = self._wait = self._wait or Wait(self.rule, self.report_status, is_first=is_first)
            look = self._look(at)
            held = why_held(look, at, self.rule)
            if isinstance(held, Rewind):
                self._wait = None
                return held
            self._is_blocked = bool(look.refused) or look.alarm is not None
            claim = None
            if wait.is_over(look, held):
                claim = outlast(self._claiming(self.rule.groups_per_batch, at), self.stopped)
            if claim is not None:
                self._wait = None
                return self._held(claim, wait)
            if time.monotonic() >= until:
                break
            self.stopped.wait(pause)
            pause = min(pause * 1.5, POLL_SECONDS)
        return None

    def refill(self, batch: ClaimedBatch, num_groups: int, at: RunProgress, until: float) -> ClaimedBatch | None:
        """Return the batch with up to so many further groups; None if none became ready until then."""
        started = time.monotonic()
        if until > started:
            self._report(describe_refill(batch.claim, num_groups, self.rule))
        while self._look(at).num_filled(self.rule) < num_groups:
            if time.monotonic() >= until or self.stopped.is_set():
                break
            self.stopped.wait(min(0.05, POLL_SECONDS))
        more = None if self.stopped.is_set() else outlast(self._claiming(num_groups, at), self.stopped)
        if more is None:
            self._report_training(batch.claim)
            return None
        held = batch.claim
        claim = claims.Claim(groups=held.groups + more.groups, num_stale=held.num_stale + more.num_stale)
        self.end_lease(held)
        self.hold(claim, LEASE_SECONDS)
        self._report_training(claim)
        return dataclasses.replace(
            batch,
            claim=claim,
            experiences=[*batch.experiences, *self._experiences(more)],
            waited_seconds=batch.waited_seconds + time.monotonic() - started,
            num_refills=batch.num_refills + more.size(self.rule.singles_per_group),
        )

    def _claiming(self, max_groups: int, at: RunProgress) -> Callable[[], claims.Claim | None]:
        return functools.partial(
            claims.claim,
            self.db,
            self.rule.trainer_id,
            max_groups=max_groups,
            singles_per_group=self.rule.singles_per_group,
            lease_seconds=LEASE_SECONDS,
            min_policy_version=at.oldest_trainable(self.rule.max_staleness) if self._is_paced else None,
            with_imported=self._with_imported,
            policy_id=self.policy_id,
            held=self.held_groups,
        )

    def _held(self, claim: claims.Claim, wait: Wait) -> ClaimedBatch:
        self._report_training(claim)
        self.hold(claim, LEASE_SECONDS)
        return ClaimedBatch(
            claim=claim,
            experiences=self._experiences(claim),
            waited_seconds=time.monotonic() - wait.started_at,
            held_seconds=wait.held_seconds,
            pinned=self.pinned_version(),
        )

    def _report_training(self, claim: claims.Claim) -> None:
        self._report(f"training on {describe_claim(claim)}")

    def _report(self, text: str) -> None:
        log.info("%s", text)
        self.report_status(text)

    def _experiences(self, claim: claims.Claim) -> list[Experience]:
        return self.experiences_of(claim.group_pks, with_imported=self._with_imported)

    def _look(self, at: RunProgress) -> Look:
        """Return what the store holds now; nothing is ready while it is unavailable.

        Raises:
            StoreUnavailable: The database fails in a way that repetitions cannot help.
        """
        try:
            with self.db.read() as conn:
                now = from_micros(clock(conn))  # the database's clock: this machine's may differ by hours
                state = serving.serving_state(conn, self.policy_id)
                due = [change for change in self._changes(conn, state, now) if change.is_due(conn)]
                look = self._read_look(conn, state, at, now)
            if due:
                with self.db.write() as conn:
                    for change in due:
                        change.make(conn)
                    look = self._read_look(conn, state, at, now)
            return self._watch(look) if look.num_filled(self.rule) >= smallest_batch(self.rule) else look
        except StoreUnavailable as error:
            if error.is_permanent:
                raise
            log.warning("the database is not available, trying again: %s", error)
            return Look(num_ready=0)

    def _read_look(self, conn: Connection, state: ServingState, at: RunProgress, now: datetime) -> Look:
        """Return what the store holds; alarm and quota are read once there is a batch that they could stop."""
        of = self.policy_id
        num_ready, num_singles = claims.num_claimable(
            conn, with_imported=self._with_imported, policy_id=of, held=self.held_groups
        )
        since = now - timedelta(seconds=IN_FLIGHT_SECONDS)
        look = Look(
            num_ready=num_ready,
            num_singles=num_singles,
            pinned=state.pinned_version if self._is_paced else None,
            oldest_in_flight=claims.oldest_version_in_flight(conn, since, of) if self._is_paced else None,
            failed=versions.failed_versions(conn, at.recent_versions),
            undone=state.undone,
            refused=versions.refused_in_a_row(conn, MOST_REFUSED, of),
        )
        if look.num_filled(self.rule) < smallest_batch(self.rule):
            return dataclasses.replace(look, num_open=claims.num_open_with_reward(conn, of))
        alarm = None if state.active is None else state.active.alarm
        return dataclasses.replace(look, alarm=alarm, quota=self._read_quota(conn, now))

    def _changes(self, conn: Connection, state: ServingState, now: datetime) -> list[groups.Change]:
        """Return the changes of groups by time, and the drop of what versions sampled that a person undid.

        After an alarm any older version that is served undoes the others, since their rewards may be wrong.
        """
        rule, changes = self.rule, []
        # After a jump of the clock a running session looks stalled until its next call.
        if rule.stalled_seconds is not None and self._clock.seconds_since_jump(now) >= rule.stalled_seconds:
            changes.append(groups.stalled(now - timedelta(seconds=rule.stalled_seconds), rule.stalled_policy, now))
        if rule.unrewarded_seconds is not None:
            changes.append(groups.unrewarded(now - timedelta(seconds=rule.unrewarded_seconds), now))
        undone = {state.undone, versions.alarmed_versions(conn, state.active)}
        held = self.held_groups
        return changes + [claims.undone(conn, each, self.policy_id, held=held) for each in undone if each]

    def _watch(self, look: Look) -> Look:
        """Return the look with the alarm of the sentinels, which are read and stored now and then."""
        if time.monotonic() - self._checked_at < SENTINEL_SECONDS:
            return look
        with self.db.read() as conn:
            active = serving.serving_state(conn, self.policy_id).active
            if active is None:
                return look
            alarm = sentinels.check(conn, self.rule.sentinels, self.policy_id)
        self._checked_at = time.monotonic()
        if alarm != active.alarm:
            with self.db.write() as conn:
                versions.change_version(conn, active.version, alarm=alarm)
        return dataclasses.replace(look, alarm=alarm)

    def _read_quota(self, conn: Connection, now: datetime) -> str | None:
        rule, policy = self.rule, self.policy
        if policy is None:
            return None
        whose = f"the policies of tenant {policy.tenant!r}"
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        if (most_tokens := rule.tenant_trained_tokens_per_day) is not None:
            num_tokens = policies.trained_tokens_since(conn, policy.tenant, today)
            if num_tokens >= most_tokens:
                return (
                    f"{whose} have trained {num_tokens} tokens today, of {most_tokens} a day "
                    "(tenant_trained_tokens_per_day): training waits until 00:00 UTC"
                )
        if (most_bytes := rule.tenant_policy_bytes) is not None:
            own = [one.policy_id for one in policies.list_policies(conn) if one.tenant == policy.tenant]
            num_bytes = num_bytes_on_disk(each for number in own for each in versions.measured_versions(conn, number))
            if num_bytes is not None and num_bytes >= most_bytes:
                return (
                    f"{whose} take {num_bytes} bytes on disk, of {most_bytes} (tenant_policy_bytes): training waits "
                    "until the quota is raised, or directories of versions that are not needed are deleted"
                )
        return None
