"""The ledger as the trainer uses it: what it reads and records there, through outages, and what it holds meanwhile.

A claimed batch is a lease, which a thread renews while the trainer works on it. A trainer that hangs or dies loses its
groups without further action: another trainer takes them, and the acknowledgement then fails, since it checks the
fencing tokens. One that restarts under the same name takes them over at once. An outage of the database does not end
the trainer: what failed is repeated until it succeeds, or until the trainer is stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from trainer.batch.chain import Chain, chain_of
from trainer.claims.holds import Hold
from trainer.model.terms import Term
from trainer.settings import TrainerSettings
from turnwise.chains import Experience
from turnwise.errors import Conflict, LeaseLost, NotFound, StoreUnavailable
from turnwise.store import (
    claims,
    experiences,
    serving,
    trainer_reports,
    updates,
    versions,
)
from turnwise.store.database import Connection, Database
from turnwise.types import DEFAULT_POLICY, GroupKey, Json, Policy, PolicyVersion, UpdateRecord

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
LOOK_SECONDS = 0.05
MOST_ERROR_CHARACTERS = 1000

Result = TypeVar("Result")
Kept: TypeAlias = Mapping[str, Sequence[Json]]
"""What claims keep for later batches, by name: rows that name groups and sessions by their digests alone."""
NOTHING: Kept = {}


class TrainerProcess:
    """What the ledgers of one process have in common: the ids of its updates, and whether it is to stop.

    A signal handler or a thread stops it, once, which ends waits. `threading.Event` is not for signal handlers: one
    that runs while its own thread is inside of `Event.wait` may find the event's lock held, and wait for it without an
    end.
    """

    def __init__(self) -> None:
        self._is_stopped = False
        self._last_update_id = 0

    def stop(self) -> None:
        self._is_stopped = True

    def is_stopped(self) -> bool:
        return self._is_stopped

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_stopped and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))

    def next_update_id(self, stored: int) -> int:
        """Return the id after those that are stored and those that were given: batches are acknowledged later."""
        self._last_update_id = max(self._last_update_id, stored) + 1
        return self._last_update_id


def outlast(operation: Callable[[], Result], process: TrainerProcess) -> Result:
    """Return what an operation on the ledger returns; repeat it while the database is not available.

    Raises:
        StoreUnavailable: It is not available, and the trainer is to stop, or a repetition cannot help.
    """
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return operation()
        except StoreUnavailable as error:
            if process.is_stopped() or error.is_permanent:
                raise
            log.warning("the database is not available, trying again in %.1f s: %s", pause, error)
            process.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class Renewal:
    """Renews something in the ledger from a thread until it is stopped, also while a batch takes long."""

    def __init__(self, what: str, every_seconds: float, renew: Callable[[], object]) -> None:
        self._what = what
        self._every_seconds = every_seconds
        self._renew = renew
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_seconds):
            try:
                self._renew()
            except LeaseLost:
                # The ack fails with the same error, in the thread that can act on it.
                log.warning("%s was lost", self._what)
                return
            except StoreUnavailable as error:
                log.warning("%s could not be renewed, trying again: %s", self._what, error)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The counts of a run, and which versions its weights came from."""

    seed: int = 0
    num_batches: int = 0
    update_id: int = 0
    """The id of the last batch in the ledger, unique over all policies."""
    num_optimizer_steps: int = 0
    policy_version: int = 0
    num_groups: int = 0
    num_sessions: int = 0
    num_tokens: int = 0
    """Sampled tokens that carried loss."""
    num_refused_groups: int = 0
    recent_versions: tuple[int, ...] = (0,)
    """The versions that the weights came from, oldest first, this version last; the latest ones only."""
    rewound_to: int | None = None
    """The version that the run went back to: the pinned one until no version is pinned, or the one before a failed one
    until the next batch."""

    def rng(self) -> np.random.Generator:
        """Return the random numbers of the coming batch."""
        return np.random.default_rng(self.seeds())

    def seeds(self) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, self.num_batches])

    def staleness_of(self, version: int) -> int:
        return sum(known > version for known in self.recent_versions)

    def oldest_trainable(self, max_staleness: int | None) -> int | None:
        """Return the oldest version whose turns may be trained; None where there is no bound."""
        if max_staleness is None:
            return None
        return self.recent_versions[max(len(self.recent_versions) - 1 - max_staleness, 0)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """Groups that this trainer holds until they are acked."""

    claim: claims.Claim
    experiences: Sequence[Chain]
    waited_seconds: float
    held_seconds: float = 0.0
    """The part of it in which the trainer waited for sessions of older versions, or for the pinned version."""
    pinned: int | None = None
    num_refills: int = 0
    """Groups that were claimed in addition, because others had equal rewards."""
    kept: Kept | None = None
    """What is kept for later batches once this one is acked; None for what the one before left."""
    untrained: Json | None = None
    """The gauges of a claim that is only kept; None for one that is trained."""
    may_grow: ClassVar[bool] = True
    """Whether further groups may be claimed in the place of those of equal rewards."""

    @property
    def group_keys(self) -> set[GroupKey]:
        return {group.key for group in self.claim.groups}

    @property
    def keys(self) -> set[GroupKey]:
        """The groups that are to be trained."""
        return self.group_keys | {experience.group_key for experience in self.experiences}

    @property
    def num_groups(self) -> int:
        return len(self.claim.groups)

    def dropped(self, refused: Mapping[GroupKey, str]) -> dict[GroupKey, str]:
        """Return those of the refused groups that are never trained."""
        return {group: reason for group, reason in refused.items() if group in self.group_keys}


class Ledger:
    """What the trainer of one policy reads, holds and records."""

    is_paced: ClassVar[bool] = True
    """Whether it waits for older versions, and drops stale groups."""

    def __init__(
        self,
        db: Database,
        settings: TrainerSettings,
        *,
        policy: Policy | None = None,
        process: TrainerProcess | None = None,
        terms: Sequence[Term] = (),
    ) -> None:
        """Use the ledger for a named policy, or None for the default one.

        `process` is that of all policies of this process, which share the store; None for one alone. `terms` are asked
        about each chain that is read.
        """
        self.db = db
        self.settings = settings
        self.policy = policy
        self.policy_id = DEFAULT_POLICY if policy is None else policy.policy_id
        self.process = process or TrainerProcess()
        """Once it is to stop, nothing is waited for, and a batch in progress can still be acked."""
        self._is_alone = process is None
        self._terms = terms
        self._shape = dataclasses.replace(experiences.CLAIMED, roles=settings.train_roles, policy_id=self.policy_id)
        self.holds: Sequence[Hold[Any]] = ()
        self._leases: dict[claims.Claim, Renewal] = {}
        self._signs: Renewal | None = None
        self._has_failed = False
        self._is_blocked = False
        """Whether engines refused the last versions, or a sentinel is beyond its bound: a person has to act."""
        self._versions: set[int] = set()
        self._unacknowledged: set[int] = set()

    def open(self, base: PolicyVersion, version: int) -> None:
        """Take over what an earlier process held; in an empty ledger publish version 0.

        So proxy and trainer agree on what version 0 is, and no one waits for the lease of a dead process. `version` is
        what the weights are.

        Raises:
            SettingsError: The ledger belongs to another model.
        """
        trainer_id = self.settings.trainer_id
        self._versions = {version}
        self.report_status("starting")
        self._signs = Renewal("the sign of life", trainer_reports.BEAT_SECONDS, self._give_sign)
        freed = claims.take_back(self.db, trainer_id, self.policy_id)
        if freed:
            log.info("took over %d groups that an earlier process of trainer %r held", freed, trainer_id)
        with self.db.write() as conn:
            versions.adopt_base(conn, base)

    def stop(self) -> None:
        self.process.stop()

    def close(self) -> None:
        if self._is_alone:
            self.stop()
        for held in list(self._leases):
            self.end_lease(held)
            self._release(held, "the trainer stopped")
        if self._signs is not None:
            self._signs.stop()
            if not self._has_failed:
                self.report_status("stopped", state=trainer_reports.TrainerState.STOPPED)
        if self._is_alone:
            self.db.close()

    def read(self, query: Callable[[Connection], Result]) -> Result:
        def read() -> Result:
            with self.db.read() as conn:
                return query(conn)

        return outlast(read, self.process)

    def write(self, change: Callable[[Connection], None]) -> None:
        def write() -> None:
            with self.db.write() as conn:
                change(conn)

        outlast(write, self.process)

    def hold(self, claim: claims.Claim, seconds: float) -> None:
        """Renew the lease of a claim from now on, for this number of seconds each time."""
        what = f"the lease on {len(claim.groups)} groups"
        self._leases[claim] = Renewal(what, seconds / 3, lambda: claims.renew(self.db, claim, seconds))

    @property
    def held_groups(self) -> list[int]:
        """The keys of the held groups, also of those whose lease has run out without the trainer's knowledge."""
        return [group_pk for claim in list(self._leases) for group_pk in claim.group_pks]

    def end_lease(self, held: claims.Claim) -> None:
        lease = self._leases.pop(held, None)
        if lease is not None:
            lease.stop()

    def experiences_of(self, group_pks: Sequence[int], *, with_imported: bool = False) -> list[Chain]:
        """Return the chains of groups, by their numbers in the store, with the rewards that they have by now."""
        shape = dataclasses.replace(self._shape, with_imported=True) if with_imported else self._shape
        return self.chains(self.read(lambda conn: list(experiences.experiences_of_groups(conn, group_pks, shape))))

    def chains(self, found: Iterable[Experience]) -> list[Chain]:
        """Return stored chains as they are trained, each asked about by the terms."""
        return [functools.reduce(lambda chain, term: term.of_chain(chain), self._terms, chain_of(one)) for one in found]

    def pinned_version(self) -> int | None:
        """Return the pinned version; None for one that is served until the next version."""
        state = self.read(lambda conn: serving.serving_state(conn, self.policy_id))
        return None if state.choice else state.pinned_version

    def first_version(self) -> PolicyVersion | None:
        version = None if self.policy is None else self.policy.base_version
        return None if version is None else self.read(lambda conn: versions.get_version(conn, version))

    def newest_version(self) -> int:
        return self.read(versions.highest_version) or 0

    def versions_in_use(self) -> set[int]:
        """Return the active version, the one on trial, the hold-out, the pinned and the newest good one."""
        state = self.read(lambda conn: serving.serving_state(conn, self.policy_id))
        return state.in_use | {one.version for one in (state.pinned, state.newest) if one is not None}

    def last_update(self) -> UpdateRecord | None:
        return self.read(lambda conn: updates.last_update(conn, policy_id=self.policy_id))

    def updates_after(self, update_id: int) -> list[UpdateRecord]:
        return self.read(lambda conn: updates.updates_after(conn, update_id, self.policy_id))

    def kept_state(self) -> Json | None:
        return self.read(lambda conn: trainer_reports.kept_state(conn, self.policy_id))

    def next_update_id(self) -> int:
        return self.process.next_update_id(self.read(updates.last_update_id))

    def publish(self, policy: PolicyVersion, came_from: Sequence[int] = ()) -> None:
        """Announce a version, or that its files are written; its groups stay claimed until `ack`.

        It is stored as failed where a hold says so of the versions that its weights came from.

        Raises:
            Conflict: Another trainer trains the same policy.
        """

        def publish(conn: Connection) -> None:
            updates.check_lineage(conn, self._versions, self.policy_id)
            state = serving.serving_state(conn, self.policy_id)
            errors = (policy.error, *(hold.why_failed(state, came_from) for hold in self.holds))
            versions.publish_version(conn, dataclasses.replace(policy, error=next(filter(None, errors), None)))

        with self._failing_versions():
            self.write(publish)
        self._versions.add(policy.version)
        self._unacknowledged.add(policy.version)

    def ack(self, finished: Sequence[claims.Finished]) -> None:
        """Record batches, their groups and their versions in one transaction; a batch recorded before is left out.

        Raises:
            LeaseLost: The lease of a batch ran out and another trainer has a group; nothing was recorded.
            Conflict: Another trainer trains the same policy; nothing was recorded.
        """
        recorded = {one.update.policy_version for one in finished}

        def ack(conn: Connection) -> None:
            if any(one.policy is not None for one in finished):
                updates.check_lineage(conn, self._versions | recorded, self.policy_id)
            for one in finished:
                claims.ack(conn, one)

        batches = [one.claim for one in finished]
        for lease in map(self._leases.get, batches):
            if lease is not None:  # it is the trainer's until it is recorded, also through an outage of the database
                lease.stop()
        try:
            with self._failing_versions():
                self.write(ack)
        except (Conflict, LeaseLost):
            for held in batches:
                self._release(held, "another trainer trains their policy")
            raise
        finally:
            for held in batches:
                self.end_lease(held)
        self._versions |= recorded
        self._unacknowledged -= recorded

    def report_status(
        self,
        text: str,
        seconds_left: float | None = None,
        state: trainer_reports.TrainerState = trainer_reports.TrainerState.RUNNING,
    ) -> None:
        """Store what the trainer is doing, for the page; training does not depend on it."""
        if state is trainer_reports.TrainerState.RUNNING and self._is_blocked:
            state = trainer_reports.TrainerState.BLOCKED
        if self.policy is not None:
            text = f"policy {self.policy.name!r}: {text}"
        try:
            with self.db.write() as conn:
                trainer_reports.report_status(conn, self.settings.trainer_id, text, state, seconds_left=seconds_left)
        except StoreUnavailable as error:
            log.warning("the trainer's status was not stored: %s", error)

    def note_failure(self, error: BaseException) -> None:
        self._has_failed = True
        self.report_status(
            f"{type(error).__name__}: {error}"[:MOST_ERROR_CHARACTERS], state=trainer_reports.TrainerState.DIED
        )

    def _give_sign(self) -> None:
        with self.db.write() as conn:
            trainer_reports.note_sign_of_life(conn, self.settings.trainer_id)

    def _release(self, held: claims.Claim, reason: str) -> None:
        try:
            claims.release(self.db, held, reason)
        except LeaseLost:
            log.info("the groups of an unfinished batch were taken by another trainer already")
        except StoreUnavailable as error:
            log.warning("the groups of an unfinished batch are free when their lease ends: %s", error)

    @contextlib.contextmanager
    def _failing_versions(self) -> Iterator[None]:
        """Fail the versions without an acknowledgement if another trainer has their groups, or trains their policy.

        Engines go back to a version whose groups are recorded. What these versions sampled keeps its logprobs.
        """
        try:
            yield
        except (Conflict, LeaseLost) as error:
            reason = f"{versions.OVERTAKEN}: {error}"
            self.write(lambda conn: self._fail_unacknowledged(conn, reason))
            raise

    def _fail_unacknowledged(self, conn: Connection, reason: str) -> None:
        for version in sorted(self._unacknowledged):
            with contextlib.suppress(NotFound):  # deleted with its policy
                serving.fail_version(conn, version, reason)
                log.warning("version %d fails: %s", version, reason)
