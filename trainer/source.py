"""The ledger as the trainer's environment: it hands out finished, rewarded groups and takes acks.

A claimed batch is a lease, which a thread renews while the trainer works on it. A trainer that hangs or dies loses its
groups without further action, and one that restarts under the same name takes them over at once. An outage of the
database does not end the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

import numpy as np

from trainer import sentinels
from trainer.pacing import (
    MOST_REFUSED,
    Lease,
    Look,
    Position,
    Rewind,
    SignsOfLife,
    SourceRule,
    SteadyClock,
    StopFlag,
    WaitingLog,
    describe_claim,
    describe_refill,
    outlast,
    why_held,
)
from turnwise.errors import Conflict, LeaseLost, NotFound, StoreUnavailable
from turnwise.experience import Experience
from turnwise.store import (
    claims,
    evaluations,
    experiences,
    groups,
    policies,
    policy_summaries,
    serving,
    trained,
    trainer_status,
    versions,
)
from turnwise.store.database import Connection, Database, clock
from turnwise.store.evaluations import SessionLabels
from turnwise.store.rows import from_micros
from turnwise.store.serving import ServingState
from turnwise.store.trained import Advantages
from turnwise.store.trainer_status import TrainerState, TrainerStatus, report_status
from turnwise.types import DEFAULT_POLICY, GroupKey, Policy, PolicyVersion, SessionKey, UpdateRecord
from turnwise.version_directory import num_bytes_on_disk

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""How long a claim lasts without renewal. The trainer renews it while it works."""
POLL_SECONDS = 0.5
"""Longest pause between two queries for ready groups."""
FIRST_WAIT_SECONDS = 5.0
"""How long the first batch of a run waits for further groups, where `wait_seconds` is longer."""
MOST_ERROR_CHARACTERS = 1000
"""Of the error that ended the trainer, in its report."""
IN_FLIGHT_SECONDS = 120.0
"""Open sessions without activity for this long no longer hold the trainer back."""
SENTINEL_SECONDS = 30.0
"""How often the sentinels are read while the trainer waits for a batch."""

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """Groups that this trainer holds until they are acked."""

    claim: claims.Claim
    experiences: Sequence[Experience]
    waited_seconds: float
    """From the call of `next_batch` to the claim."""
    held_seconds: float = 0.0
    """The part of it in which the trainer waited for sessions of older versions, or for the pinned version."""
    pinned: int | None = None
    """The version that was pinned at the claim."""
    num_refills: int = 0
    """Groups that were claimed in addition, because others had equal rewards."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """A batch that was worked on, with all that its acknowledgement records."""

    batch: ClaimedBatch
    update: UpdateRecord
    policy: PolicyVersion | None = None
    """The version that it made."""
    refused: Mapping[GroupKey, str] = dataclasses.field(default_factory=dict)
    """Groups that were not trained, with the reason; they are dropped."""
    trained: Mapping[SessionKey, Advantages] = dataclasses.field(default_factory=dict)
    """The sessions that were trained, with the advantages of their turns."""


@dataclasses.dataclass(slots=True)
class Wait:
    """A wait for a batch, over as many calls of `next_batch` as it takes."""

    log: WaitingLog
    started_at: float = dataclasses.field(default_factory=time.monotonic)
    seen_at: float | None = None
    """When a group or a single session was ready first."""


class UpdateIds:
    """The ids of updates, one after the other for all policies of a process: batches are acknowledged later."""

    def __init__(self) -> None:
        self._last = 0

    def after(self, stored: int) -> int:
        """Return the id after those that the ledger has and those that were returned before."""
        self._last = max(self._last, stored) + 1
        return self._last


class LedgerSource:
    """Claims groups from the store."""

    def __init__(
        self,
        db: Database,
        rule: SourceRule,
        *,
        with_imported: bool = False,
        policy: Policy | None = None,
        update_ids: UpdateIds | None = None,
    ) -> None:
        """Claim for one policy.

        Args:
            db: The store.
            rule: When a batch is claimed.
            with_imported: Claim groups of imported sessions too: the loss must read no behaviour logprobs.
            policy: A named policy; None for the default one.
            update_ids: Of all policies of this process, which share the store; None where there is no other.
        """
        self._db = db
        self._rule = rule
        self._policy = policy
        self.policy_id = DEFAULT_POLICY if policy is None else policy.policy_id
        self._owns_db = update_ids is None
        self._update_ids = update_ids or UpdateIds()
        self._wait: Wait | None = None
        self._with_imported = with_imported
        self._versions: set[int] = set()
        """The version that the weights came from at the start, and those that were published or recorded since."""
        self._unacknowledged: set[int] = set()
        """Published versions whose groups are not acknowledged yet."""
        self._closed = StopFlag()
        self._leases: dict[claims.Claim, Lease] = {}
        self._clock = SteadyClock()
        self._signs: SignsOfLife | None = None
        self._has_failed = False
        self._is_blocked = False
        """Whether engines refused the last versions, or a sentinel is beyond its bound: a person has to act."""
        self._checked_at = -math.inf
        """When the sentinels were read last, on the monotonic clock."""

    def next_batch(self, at: Position, seconds: float | None = None) -> ClaimedBatch | Rewind | None:
        """Wait until a batch is ready and claim it; None after `close`, or after so many seconds.

        Args:
            at: The trainer's version, and the oldest version that it still trains.
            seconds: None waits without an end, 0 looks once. The next call goes on with the same wait.

        Raises:
            StoreUnavailable: The database fails in a way that repetitions cannot help.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        pause = min(0.02, POLL_SECONDS)
        while not self._closed.is_set():
            wait = self._wait = self._wait or Wait(WaitingLog(self._rule, self._report_status))
            ready = self._is_ready(at, wait)
            claim = self._claim(self._rule.groups_per_batch, at) if ready is True else None
            if isinstance(ready, Rewind):
                self._wait = None
                return ready
            if claim is not None:
                self._wait = None
                return self._claimed(claim, wait)
            if time.monotonic() >= until:
                break
            self._closed.wait(pause)
            pause = min(pause * 1.5, POLL_SECONDS)
        return None

    def _claimed(self, claim: claims.Claim, wait: Wait) -> ClaimedBatch:
        self._report_training(claim)
        self._leases[claim] = Lease(self._db, claim, LEASE_SECONDS)
        return ClaimedBatch(
            claim=claim,
            experiences=self._read(claim),
            waited_seconds=time.monotonic() - wait.started_at,
            held_seconds=wait.log.held_seconds,
            pinned=self._found(self._read_pin),
        )

    def refill(self, batch: ClaimedBatch, num_groups: int, at: Position, until: float) -> ClaimedBatch | None:
        """Return the batch with up to so many further groups; None if none became ready until then."""
        started = time.monotonic()
        if until > started:
            self._report(describe_refill(batch.claim, num_groups, self._rule))
        refilled = self._refill(batch, num_groups, at, until, started)
        self._report_training((refilled or batch).claim)
        return refilled

    def _refill(
        self, batch: ClaimedBatch, num_groups: int, at: Position, until: float, started: float
    ) -> ClaimedBatch | None:
        while self._look(at).num_filled(self._rule) < num_groups:
            if time.monotonic() >= until or self._closed.is_set():
                break
            self._closed.wait(min(0.05, POLL_SECONDS))
        more = None if self._closed.is_set() else self._claim(num_groups, at)
        if more is None:
            return None
        held = batch.claim
        claim = dataclasses.replace(
            held,
            groups=held.groups + more.groups,
            leased_until=min(held.leased_until, more.leased_until),
            num_stale=held.num_stale + more.num_stale,
        )
        self._end_lease(held)
        self._leases[claim] = Lease(self._db, claim, LEASE_SECONDS)
        return dataclasses.replace(
            batch,
            claim=claim,
            experiences=[*batch.experiences, *self._read(more)],
            waited_seconds=batch.waited_seconds + time.monotonic() - started,
            num_refills=batch.num_refills + more.size(self._rule.singles_per_group),
        )

    def _claim(self, max_groups: int, at: Position) -> claims.Claim | None:
        def claim() -> claims.Claim | None:
            return claims.claim(
                self._db,
                self._rule.trainer_id,
                max_groups=max_groups,
                singles_per_group=self._rule.singles_per_group,
                lease_seconds=LEASE_SECONDS,
                min_policy_version=at.min_policy_version,
                with_imported=self._with_imported,
                policy_id=self.policy_id,
            )

        return outlast(claim, self._closed)

    def _read(self, claim: claims.Claim) -> list[Experience]:
        return self._found(
            lambda conn: list(
                experiences.experiences_of_groups(
                    conn,
                    claim.group_pks,
                    roles=self._rule.train_roles,
                    with_imported=self._with_imported,
                )
            )
        )

    def _read_pin(self, conn: Connection) -> int | None:
        """Return the pinned version; None for one that is served until the next version."""
        state = serving.serving_state(conn, self.policy_id)
        return None if state.undone else state.pinned_version

    def _found(self, query: Callable[[Connection], Found]) -> Found:
        """Return what a query finds, also after an outage of the database."""

        def read() -> Found:
            with self._db.read() as conn:
                return query(conn)

        return outlast(read, self._closed)

    def publish(self, policy: PolicyVersion, came_from: Sequence[int] = ()) -> None:
        """Announce a version, or that its files are written; its groups stay claimed until `ack`.

        It is stored as failed if a person undid one of the versions that its weights came from while it was trained.

        Raises:
            Conflict: Another trainer trains the same policy.
        """

        def write() -> None:
            with self._db.write() as conn:
                trained.check_lineage(conn, self._versions, self.policy_id)
                undone = serving.serving_state(conn, self.policy_id).undone
                error = versions.UNDONE if any(version in undone for version in came_from) else None
                versions.publish_version(conn, dataclasses.replace(policy, error=policy.error or error))

        with self._failing_versions():
            outlast(write, self._closed)
        self._versions.add(policy.version)
        self._unacknowledged.add(policy.version)

    def ack(self, finished: Sequence[FinishedBatch]) -> None:
        """Record batches, their groups and their versions in one transaction; a batch recorded before is left out.

        Raises:
            LeaseLost: The lease of a batch ran out and another trainer has a group; nothing was recorded.
            Conflict: Another trainer trains the same policy; nothing was recorded.
        """
        recorded = {one.update.policy_version for one in finished}

        def write() -> None:
            with self._db.write() as conn:
                if any(one.policy is not None for one in finished):
                    trained.check_lineage(conn, self._versions | recorded, self.policy_id)
                for one in finished:
                    claims.ack(conn, one.batch.claim, one.update, one.policy, one.refused, one.trained)

        for one in finished:
            self._end_lease(one.batch.claim)
        try:
            with self._failing_versions():
                outlast(write, self._closed)
        except (Conflict, LeaseLost):
            for one in finished:
                self._release(one.batch.claim, "another trainer trains their policy")
            raise
        self._versions |= recorded
        self._unacknowledged -= recorded

    @contextlib.contextmanager
    def _failing_versions(self) -> Iterator[None]:
        """Fail the versions without an acknowledgement if another trainer has their groups, or trains their policy.

        Engines go back to a version whose groups are recorded. What these versions sampled keeps its logprobs.
        """
        try:
            yield
        except (Conflict, LeaseLost) as error:
            outlast(functools.partial(self._fail_unacknowledged, f"{versions.OVERTAKEN}: {error}"), self._closed)
            raise

    def _fail_unacknowledged(self, reason: str) -> None:
        with self._db.write() as conn:
            for version in sorted(self._unacknowledged):
                with contextlib.suppress(NotFound):  # deleted with its policy
                    serving.fail_version(conn, version, reason)
                    log.warning("version %d fails: %s", version, reason)

    def open(self, base: PolicyVersion, version: int) -> None:
        """Take over what an earlier process held; in an empty ledger publish version 0.

        So proxy and trainer agree on what version 0 is, and no one waits for the lease of a dead process. Versions that
        it held in memory and did not write fail: engines go back to one that is on disk.

        Args:
            base: Version 0.
            version: The version that the weights are.

        Raises:
            SettingsError: The ledger belongs to another model.
        """
        self._versions = {version}
        self._report_status("starting", None)
        self._signs = SignsOfLife(self._db, self._rule.trainer_id)
        freed = claims.take_back(self._db, self._rule.trainer_id, self.policy_id)
        if freed:
            log.info("took over %d groups that an earlier process of trainer %r held", freed, self._rule.trainer_id)
        with self._db.write() as conn:
            versions.adopt_base(conn, base)
            last = trained.last_update(conn, policy_id=self.policy_id)
            lost = versions.fail_unwritten(conn, last.policy_version if last else 0, self.policy_id)
        for version in lost:
            log.warning("version %d was not written before the trainer ended: it fails, and is not used again", version)

    def first_version(self) -> PolicyVersion | None:
        """Return the adapter that the policy's training starts from; None for the base model."""
        version = None if self._policy is None else self._policy.base_version
        return None if version is None else self._found(lambda conn: versions.get_version(conn, version))

    def last_update(self) -> UpdateRecord | None:
        """Return the policy's update that was committed last."""
        return self._found(lambda conn: trained.last_update(conn, policy_id=self.policy_id))

    def updates_after(self, update_id: int) -> list[UpdateRecord]:
        """Return the policy's updates that were committed after this one, oldest first."""
        return self._found(lambda conn: trained.updates_after(conn, update_id, self.policy_id))

    def next_update_id(self) -> int:
        """Return the id after those of the ledger and those that this process has given to any policy."""
        return self._update_ids.after(self._found(trained.last_update_id))

    def newest_version(self) -> int:
        """Return the highest version that was ever published, of any policy, failed ones included."""
        newest, _ = self._found(lambda conn: versions.list_versions(conn, limit=1))
        return newest[0].version if newest else 0

    def versions_in_use(self) -> set[int]:
        """Return the active version, the one on trial, the hold-out, the pinned and the newest good one.

        And those that named policies started from: they serve them until they have versions of their own.
        """

        def read(conn: Connection) -> set[int | None]:
            state = serving.serving_state(conn, self.policy_id)
            wanted = {one.version for one in (state.pinned, state.newest) if one is not None}
            return state.in_use | wanted | {policy.base_version for policy in policies.list_policies(conn)}

        return {version for version in self._found(read) if version is not None}

    def best_versions(self, count: int) -> set[int]:
        """Return so many versions with the best evaluations, by mean reward; of equal ones the newer."""
        if not count:
            return set()
        measured = self._found(lambda conn: evaluations.evaluated_versions(conn, self.policy_id))
        return set(sorted(measured, key=lambda version: (measured[version], version))[-count:])

    def regression_set(self, num_sessions: int, labels: Collection[str]) -> tuple[list[Experience], SessionLabels]:
        """Return the chains of the newest held-out and the newest labelled sessions, and their labels."""
        return self._found(
            lambda conn: evaluations.regression_set(
                conn, num_sessions, labels, roles=self._rule.train_roles, policy_id=self.policy_id
            )
        )

    def imported(self, num_groups: int, rng: np.random.Generator) -> list[Experience]:
        """Return the chains of so many imported groups, drawn at random; of all where there are fewer."""
        stored = self._found(lambda conn: groups.imported_groups(conn, self.policy_id))
        drawn = [stored[index] for index in sorted(rng.permutation(len(stored))[:num_groups])]
        roles = self._rule.train_roles
        return self._found(
            lambda conn: list(experiences.experiences_of_groups(conn, drawn, roles=roles, with_imported=True))
        )

    def announce_weights(self, url: str | None) -> None:
        """Store where the weights in memory are handed out; None removes the address.

        Engines read directories while the address is not known, so training does not depend on it.
        """
        try:
            with self._db.write() as conn:
                trainer_status.announce_weights(conn, self._rule.trainer_id, url, from_micros(clock(conn)))
        except StoreUnavailable as error:
            log.warning("the address of the weights was not stored, engines read directories: %s", error)

    def note_failure(self, error: BaseException) -> None:
        """Report that this error ends the trainer."""
        self._has_failed = True
        self._report_status(f"{type(error).__name__}: {error}"[:MOST_ERROR_CHARACTERS], None, TrainerState.DIED)

    def stop(self) -> None:
        """Let `next_batch` return None; a batch in progress can still be acked."""
        self._closed.set()

    def close(self) -> None:
        """Stop waiting and release what is held, for the next process to take over."""
        self._closed.set()
        for held in list(self._leases):
            self._end_lease(held)
            self._release(held, "the trainer stopped")
        if self._signs is not None:
            self._signs.stop()
            if not self._has_failed:
                self._report_status("stopped", None, TrainerState.STOPPED)
        if self._owns_db:
            self._db.close()

    def _release(self, held: claims.Claim, reason: str) -> None:
        """Let others claim the groups of a batch that is not recorded."""
        try:
            claims.release(self._db, held, reason)
        except LeaseLost:
            log.info("the groups of an unfinished batch were taken by another trainer already")
        except StoreUnavailable as error:
            log.warning("the groups of an unfinished batch are free when their lease ends: %s", error)

    def _end_lease(self, held: claims.Claim) -> None:
        lease = self._leases.pop(held, None)
        if lease is not None:
            lease.stop()

    def _is_ready(self, at: Position, wait: Wait) -> bool | Rewind:
        """Return whether a claim can succeed now, or the rewind that a pin asks for."""
        patience = self._rule.wait_seconds
        if at.is_first_batch and patience is not None:
            patience = min(patience, FIRST_WAIT_SECONDS)
        look = self._look(at)
        held = why_held(look, at, self._rule)
        if isinstance(held, Rewind):
            return held
        num_filled, now = look.num_filled(self._rule), time.monotonic()
        if wait.seen_at is None and (look.num_ready or look.num_singles):
            wait.seen_at = now
        is_enough = num_filled >= self._rule.smallest_batch
        left = None if patience is None or wait.seen_at is None or not is_enough else wait.seen_at + patience - now
        self._is_blocked = bool(look.refused) or look.alarm is not None
        wait.log.observe(look, left, held)
        is_late = left is not None and left <= 0
        if held is not None or not (is_late or num_filled >= self._rule.groups_per_batch):
            return False
        wait.log.end()
        return True

    def _report_training(self, claim: claims.Claim) -> None:
        self._report(f"training on {describe_claim(claim)}")

    def _report(self, text: str) -> None:
        """Log and store what the trainer is doing."""
        log.info("%s", text)
        self._report_status(text, None)

    def _report_status(self, text: str, seconds_left: float | None, state: TrainerState = TrainerState.RUNNING) -> None:
        """Store what the trainer is doing, for the page; training does not depend on it."""
        if state is TrainerState.RUNNING and self._is_blocked:
            state = TrainerState.BLOCKED
        if self._policy is not None:
            text = f"policy {self._policy.name!r}: {text}"
        try:
            with self._db.write() as conn:
                now = from_micros(clock(conn))
                starts_at = None if seconds_left is None else now + timedelta(seconds=max(seconds_left, 0.0))
                status = TrainerStatus(
                    trainer_id=self._rule.trainer_id, text=text, state=state, starts_at=starts_at, reported_at=now
                )
                report_status(conn, status)
        except StoreUnavailable as error:
            log.warning("the trainer's status was not stored: %s", error)

    def _look(self, at: Position) -> Look:
        """Return what the store holds now; nothing is ready while it is unavailable.

        Raises:
            StoreUnavailable: The database fails in a way that repetitions cannot help.
        """
        try:
            with self._db.read() as conn:
                now = from_micros(clock(conn))  # the database's clock: this machine's may differ by hours
                state = serving.serving_state(conn, self.policy_id)
                due = [change for change in self._changes(conn, state, now) if change.is_due(conn)]
                look = self._read_look(conn, state, at, now)
            if due:
                with self._db.write() as conn:
                    for change in due:
                        change.make(conn)
                    look = self._read_look(conn, state, at, now)
            return self._watch(look) if look.num_filled(self._rule) >= self._rule.smallest_batch else look
        except StoreUnavailable as error:
            if error.is_permanent:
                raise
            log.warning("the database is not available, trying again: %s", error)
            return Look(num_ready=0)

    def _read_look(self, conn: Connection, state: ServingState, at: Position, now: datetime) -> Look:
        """Return what the store holds; alarm and quota are read once there is a batch that they could stop."""
        of = self.policy_id
        num_ready, num_singles = claims.num_claimable(conn, with_imported=self._with_imported, policy_id=of)
        since = now - timedelta(seconds=IN_FLIGHT_SECONDS)
        look = Look(
            num_ready=num_ready,
            num_singles=num_singles,
            pinned=state.pinned_version if at.is_paced else None,
            oldest_in_flight=claims.oldest_version_in_flight(conn, since, of) if at.is_paced else None,
            failed=versions.failed_versions(conn, at.recent_versions),
            undone=state.undone,
            refused=versions.refused_in_a_row(conn, MOST_REFUSED, of),
        )
        if look.num_filled(self._rule) < self._rule.smallest_batch:
            return dataclasses.replace(look, num_open=claims.num_open_with_reward(conn, of))
        alarm = None if state.active is None else state.active.alarm
        return dataclasses.replace(look, alarm=alarm, quota=self._read_quota(conn, now))

    def _changes(self, conn: Connection, state: ServingState, now: datetime) -> list[groups.Change]:
        """Return the changes of groups by time, and the drop of what versions sampled that a person undid.

        After an alarm any older version that is served undoes the others, since their rewards may be wrong.
        """
        rule, changes = self._rule, []
        # After a jump of the clock a running session looks stalled until its next call.
        if rule.stalled_seconds is not None and self._clock.seconds_since_jump(now) >= rule.stalled_seconds:
            changes.append(groups.stalled(now - timedelta(seconds=rule.stalled_seconds), rule.stalled_policy, now))
        if rule.unrewarded_seconds is not None:
            changes.append(groups.unrewarded(now - timedelta(seconds=rule.unrewarded_seconds), now))
        undone = {state.undone, versions.alarmed_versions(conn, state.active)}
        return changes + [claims.undone(conn, each, self.policy_id) for each in undone if each]

    def _watch(self, look: Look) -> Look:
        """Return the look with the alarm of the sentinels, which are read and stored now and then."""
        if time.monotonic() - self._checked_at < SENTINEL_SECONDS:
            return look
        with self._db.read() as conn:
            active = serving.serving_state(conn, self.policy_id).active
            alarm = sentinels.check(conn, self._rule.sentinels, self.policy_id)
        if active is None:
            return look
        self._checked_at = time.monotonic()
        if alarm != active.alarm:
            with self._db.write() as conn:
                versions.note_alarm(conn, active.version, alarm)
        return dataclasses.replace(look, alarm=alarm)

    def _read_quota(self, conn: Connection, now: datetime) -> str | None:
        """Return the quota of the policy's tenant that is used up."""
        rule, policy = self._rule, self._policy
        if policy is None:
            return None
        whose = f"the policies of tenant {policy.tenant!r}"
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        if (most_tokens := rule.tenant_trained_tokens_per_day) is not None:
            num_tokens = policy_summaries.trained_tokens_since(conn, policy.tenant, today)
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
