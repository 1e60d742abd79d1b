"""The ledger as the trainer's environment: it gives finished, rewarded groups and takes acks.

What is handed out is a lease, kept alive by a thread for as long as the trainer works on it. So a trainer
that hangs or dies gives its groups up by itself, and one that comes back under the same name takes them up at once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol

from pydantic import Field

from turnwise.errors import LeaseLost, StoreUnavailable
from turnwise.settings import Settings
from turnwise.store import claims, experiences, groups, policies, queries
from turnwise.store.claims import LONGEST_LEASE_SECONDS
from turnwise.store.database import Database, clock, from_micros
from turnwise.types import Experience, GroupKey, PolicyVersion, UpdateRecord

log = logging.getLogger(__name__)


class SourceRule(Settings):
    """When a batch is complete, and how long it is held."""

    trainer_id: str = "trainer"
    """Name under which groups are claimed. A process that restarts under it takes over the groups that it held. Each
    running process needs its own."""
    groups_per_batch: int = Field(default=32, ge=1)
    """Groups of a whole batch."""
    wait_seconds: float | None = 60.0
    """How long to wait for a whole batch once a group is ready; then a smaller batch is trained. None has no limit."""
    lease_seconds: float = Field(default=60.0, gt=0, le=LONGEST_LEASE_SECONDS)
    """How long a claim lasts without renewal. The trainer renews it while it works."""
    poll_seconds: float = Field(default=0.5, gt=0)
    """Longest pause between two queries for ready groups."""
    stalled_seconds: float | None = None
    """Close a group without activity for this long; None leaves it open."""
    stalled_policy: Literal["train", "drop"] = "train"
    """Train a stalled group without its missing sessions, or drop it."""
    reward_bonus_coeff: float = 0.0
    """Bonus for a step that is better than the one before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """Groups that are ours until they are acked."""

    claim: claims.Claim
    experiences: Sequence[Experience]
    waited_seconds: float


class Source(Protocol):
    """Where a workflow gets its experiences: what `env` must be."""

    def next_batch(self, min_policy_version: int) -> ClaimedBatch | None:
        """Wait for a batch; None after `close`."""

    def ack(
        self, batch: ClaimedBatch, update: UpdateRecord, policy: PolicyVersion | None, refused: dict[GroupKey, str]
    ) -> bool:
        """Finish a batch, durably; False when this update was committed before."""

    def open(self, base: PolicyVersion) -> None:
        """Take up what an earlier process held, and announce version 0 unless a version is known already."""

    def last_update(self) -> UpdateRecord | None:
        """Return what was committed last."""

    def newest_version(self) -> int:
        """Return the highest version that was ever published."""

    def versions_in_use(self) -> set[int]:
        """Return the versions that may be asked for: active, pinned, newest good."""

    def stop(self) -> None:
        """Let `next_batch` return None; safe in a signal handler."""

    def close(self) -> None:
        """Stop waiting and give back what is held."""


class LedgerSource:
    """Claims groups from the store."""

    def __init__(self, db: Database, rule: SourceRule) -> None:
        self._db = db
        self._rule = rule
        self._closed = threading.Event()
        self._lease: _Lease | None = None

    def next_batch(self, min_policy_version: int) -> ClaimedBatch | None:
        """Wait until a batch is ready and claim it; None after `close`.

        Args:
            min_policy_version: Groups with an older turn are dropped as stale.
        """
        started = time.monotonic()
        while self._wait_until_ready():
            claim = claims.claim(
                self._db,
                self._rule.trainer_id,
                max_groups=self._rule.groups_per_batch,
                lease_seconds=self._rule.lease_seconds,
                min_policy_version=min_policy_version,
            )
            if claim is None:
                continue
            if claim.num_stale:
                log.warning("dropped %d groups older than policy version %d", claim.num_stale, min_policy_version)
            self._lease = _Lease(self._db, claim, self._rule.lease_seconds)
            with self._db.read() as conn:
                found = list(
                    experiences.experiences_of_groups(
                        conn, claim.group_pks, reward_bonus_coeff=self._rule.reward_bonus_coeff
                    )
                )
            return ClaimedBatch(claim=claim, experiences=found, waited_seconds=time.monotonic() - started)
        return None

    def ack(
        self, batch: ClaimedBatch, update: UpdateRecord, policy: PolicyVersion | None, refused: dict[GroupKey, str]
    ) -> bool:
        """Record the update, its groups and the policy version in one transaction.

        Raises:
            LeaseLost: The lease ran out and somebody else has a group; nothing was recorded.
        """
        self._end_lease()
        with self._db.write() as conn:
            return claims.ack(conn, batch.claim, update, policy, refused)

    def open(self, base: PolicyVersion) -> None:
        """Take up what an earlier process held; on an empty ledger announce version 0.

        So proxy and trainer agree on what version 0 is, and nobody waits for a dead process's lease.
        """
        freed = claims.take_back(self._db, self._rule.trainer_id)
        if freed:
            log.info("took up %d groups that an earlier process of %r held", freed, self._rule.trainer_id)
        with self._db.write() as conn:
            if policies.newest_policy(conn) is None:
                policies.publish_policy(conn, base)

    def last_update(self) -> UpdateRecord | None:
        """Return the update that was committed last."""
        with self._db.read() as conn:
            return queries.last_update(conn)

    def newest_version(self) -> int:
        """Return the highest version that was ever published, those that failed included."""
        with self._db.read() as conn:
            newest, _ = policies.list_policies(conn, limit=1)
        return newest[0].version if newest else 0

    def versions_in_use(self) -> set[int]:
        """Return the active, the pinned and the newest good version."""
        with self._db.read() as conn:
            found = [policies.active_policy(conn), policies.newest_policy(conn)]
            pinned = policies.pinned_version(conn)
        return {policy.version for policy in found if policy is not None} | ({pinned} if pinned is not None else set())

    def stop(self) -> None:
        """Let `next_batch` return None; what is under way can still be acked."""
        self._closed.set()

    def close(self) -> None:
        """Stop waiting and give back what is held, for the next process to take up."""
        self._closed.set()
        held = self._end_lease()
        if held is not None:
            try:
                claims.release(self._db, held, "the trainer stopped")
            except LeaseLost:
                log.info("the groups of the unfinished batch were taken by another trainer already")
        self._db.close()

    def _end_lease(self) -> claims.Claim | None:
        lease, self._lease = self._lease, None
        if lease is None:
            return None
        lease.stop()
        return lease.claim

    def _wait_until_ready(self) -> bool:
        """Return True once it is worth claiming, False after `close`."""
        pause = min(0.02, self._rule.poll_seconds)
        seen_at: float | None = None
        while not self._closed.is_set():
            ready = self._num_ready()
            if ready >= self._rule.groups_per_batch:
                return True
            if ready:
                seen_at = seen_at if seen_at is not None else time.monotonic()
                patience = self._rule.wait_seconds
                if patience is not None and time.monotonic() - seen_at >= patience:
                    return True
            self._closed.wait(pause)
            pause = min(pause * 1.5, self._rule.poll_seconds)
        return False

    def _num_ready(self) -> int:
        try:
            if self._rule.stalled_seconds is not None:
                with self._db.write() as conn:
                    now = from_micros(clock(conn))  # not this machine's, which may be hours off
                    since = now - timedelta(seconds=self._rule.stalled_seconds)
                    closed = groups.close_stalled_groups(conn, since, self._rule.stalled_policy, now)
                if closed:
                    log.warning("closed %d stalled groups (%s)", len(closed), self._rule.stalled_policy)
            with self._db.read() as conn:
                return claims.num_claimable(conn)
        except StoreUnavailable as error:
            log.warning("the database cannot be asked now, trying again: %s", error)
            return 0


class _Lease:
    """Renews a claim from a thread until it is stopped."""

    def __init__(self, db: Database, claim: claims.Claim, lease_seconds: float) -> None:
        self.claim = claim
        self._db = db
        self._lease_seconds = lease_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more."""
        self._stopped.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stopped.wait(self._lease_seconds / 3):
            try:
                claims.renew(self._db, self.claim, self._lease_seconds)
            except LeaseLost:
                # The ack will fail with the same error, in the thread that can act on it.
                log.warning("the lease on %d groups was lost", len(self.claim.groups))
                return
            except StoreUnavailable as error:
                log.warning("the lease could not be renewed now, trying again: %s", error)
