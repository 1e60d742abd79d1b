"""When the trainer takes a batch: once enough groups are ready, and nothing that features name holds it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from trainer.batch.chain import Chain
from trainer.claims.holds import Detour, Hold, own
from trainer.claims.ledger import NOTHING, ClaimedBatch, Kept, Ledger, RunProgress, TrainerProcess, outlast
from trainer.model.terms import Term
from trainer.settings import TrainerSettings
from turnwise.errors import StoreUnavailable
from turnwise.store import claims, groups, serving
from turnwise.store.database import Connection, Database
from turnwise.types import Policy, SessionKey

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
"""How long a claim lasts without renewal. The trainer renews it while it works."""
POLL_SECONDS = 0.5
MOST_REFILL_SECONDS = 60.0
"""Longest wait, by default, for groups in the place of those with equal rewards."""
SMALLEST_PART = 4
"""A batch that does not become whole in time is trained if this part of its places is filled, with an advantage."""
REPORT_SECONDS = 5.0
FIRST_WAIT_SECONDS = 5.0
"""How long the first batch of a run waits for further groups, where `wait_seconds` is longer."""


class Claims(Ledger):
    """The batches of one policy: each is claimed, held, and acknowledged."""

    may_imitate: ClassVar[bool] = True
    """Whether groups of imported sessions are claimed too, for a loss that reads no behaviour logprobs."""

    @classmethod
    def is_on(cls, settings: TrainerSettings) -> bool:  # noqa: ARG003  for subclasses
        return True

    def __init__(
        self,
        db: Database,
        settings: TrainerSettings,
        *,
        policy: Policy | None = None,
        process: TrainerProcess | None = None,
        terms: Sequence[Term] = (),
        holds: Sequence[type[Hold[Any]]] = (),
    ) -> None:
        """Claim for one policy; the arguments but `holds` are those of `Ledger`."""
        super().__init__(db, settings, policy=policy, process=process, terms=terms)
        self._with_imported = self.may_imitate and not settings.algorithm.needs_behaviour
        self._wait: Wait | None = None
        self.holds = [hold(self) for hold in holds if hold.is_on(settings)]
        self._watching, self._changing = own(self.holds, Hold.watch), own(self.holds, Hold.changes)
        self._denied = own(self.holds, Hold.denied)

    def denied(self, read: Sequence[Chain]) -> set[SessionKey]:
        """Return the sessions of chains that were read of which nothing may be trained any more."""
        keys = {chain.session_key for chain in read}
        return self.read(lambda conn: {key for denied in self._denied for key in denied(conn, keys)})

    def next(
        self,
        at: RunProgress,
        seconds: float | None = None,
        kept: Kept = NOTHING,  # noqa: ARG002  for subclasses
    ) -> ClaimedBatch | Detour | None:
        """Wait until a batch is ready and claim it; None after `stop` or a number of seconds.

        `seconds` None waits without an end, and 0 looks once. The next call goes on with the same wait. `kept` is what
        the batch before left.

        Raises:
            StoreUnavailable: The database fails in a way that repetitions cannot help.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        pause = min(0.02, POLL_SECONDS)
        while not self.process.is_stopped():
            is_first = at.num_batches == 0
            wait = self._wait = self._wait or Wait(self.settings, self.report_status, is_first=is_first)
            supply = self._supply(at)
            if isinstance(held := supply.held, Detour):
                self._wait = None
                return held
            self._is_blocked = supply.needs_person
            claim = None
            if wait.is_over(supply, held):
                claim = outlast(self._claiming(self.settings.groups_per_batch, at), self.process)
            if claim is not None:
                self._wait = None
                return self._held(claim, wait)
            if time.monotonic() >= until:
                break
            self.process.wait(pause)
            pause = min(pause * 1.5, POLL_SECONDS)
        return None

    def refill(self, batch: ClaimedBatch, num_groups: int, at: RunProgress, until: float) -> ClaimedBatch | None:
        started = time.monotonic()
        if until > started:
            self._report(describe_refill(batch.claim, num_groups, self.settings))
        while self._supply(at).num_filled(self.settings) < num_groups:
            if time.monotonic() >= until or self.process.is_stopped():
                break
            self.process.wait(min(0.05, POLL_SECONDS))
        more = None if self.process.is_stopped() else outlast(self._claiming(num_groups, at), self.process)
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
            num_refills=batch.num_refills + more.size(self.settings.singles_per_group),
        )

    def _claiming(self, max_groups: int, at: RunProgress) -> Callable[[], claims.Claim | None]:
        return functools.partial(
            claims.claim,
            self.db,
            self.settings.trainer_id,
            max_groups=max_groups,
            singles_per_group=self.settings.singles_per_group,
            lease_seconds=LEASE_SECONDS,
            min_policy_version=at.oldest_trainable(self.settings.max_staleness) if self.is_paced else None,
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

    def _experiences(self, claim: claims.Claim) -> list[Chain]:
        return self.experiences_of(claim.group_pks, with_imported=self._with_imported)

    def _supply(self, at: RunProgress) -> Supply:
        try:
            with self.db.read() as conn:
                state = serving.serving_state(conn, self.policy_id)
                changes = [change for changes_of in self._changing for change in changes_of(conn, state)]
                due = [change for change in changes if change.is_due(conn)]
                supply = self._read_supply(conn, state, at)
            if due:
                with self.db.write() as conn:
                    for change in due:
                        change.make(conn)
                with self.db.read() as conn:
                    supply = self._read_supply(conn, state, at)
            if supply.num_filled(self.settings) < smallest_batch(self.settings):
                return supply
            for watch in self._watching:
                watch()
            with self.db.read() as conn:
                state = serving.serving_state(conn, self.policy_id)
                return self._asked(conn, state, supply, at, self.holds)
        except StoreUnavailable as error:
            if error.is_permanent:
                raise
            log.warning("the database is not available, trying again: %s", error)
            return Supply(num_ready=0)

    def _read_supply(self, conn: Connection, state: serving.ServingState, at: RunProgress) -> Supply:
        of = self.policy_id
        num_ready, num_singles = claims.num_claimable(
            conn, with_imported=self._with_imported, policy_id=of, held=self.held_groups
        )
        supply = Supply(num_ready=num_ready, num_singles=num_singles)
        if supply.num_filled(self.settings) < smallest_batch(self.settings):
            supply = dataclasses.replace(supply, num_open=groups.num_open_with_reward(conn, of))
            return self._asked(conn, state, supply, at, [hold for hold in self.holds if not hold.needs_batch])
        return supply

    @staticmethod
    def _asked(
        conn: Connection, state: serving.ServingState, supply: Supply, at: RunProgress, holds: Sequence[Hold[Any]]
    ) -> Supply:
        for hold in holds:
            if (why := hold.why_held(conn, state, at)) is not None:
                return dataclasses.replace(supply, held=why, needs_person=hold.needs_person)
        return supply


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """The state of the ledger at one moment."""

    num_ready: int
    """Groups that can be claimed, without single sessions, which `num_singles` counts."""
    num_singles: int = 0
    num_open: int = 0
    """Sessions that have a reward and are not over, read while a batch lacks groups."""
    held: str | Detour | None = None
    """Why a feature holds the training, or what is to be done first."""
    needs_person: bool = False

    def num_filled(self, settings: TrainerSettings) -> int:
        return self.num_ready + self.num_singles // settings.singles_per_group


def describe_claim(claim: claims.Claim) -> str:
    num_singles = sum(group.is_single for group in claim.groups)
    num_groups = len(claim.groups) - num_singles
    counted = [f"{num_groups} groups"] if num_groups or not num_singles else []
    return " and ".join(counted + ([f"{num_singles} single sessions"] if num_singles else []))


def refill_limit(settings: TrainerSettings) -> float:
    """Return how long a batch waits at most for groups in the place of those with equal rewards, seconds."""
    if settings.refill_seconds is not None:
        return settings.refill_seconds
    return MOST_REFILL_SECONDS if settings.wait_seconds is None else min(settings.wait_seconds, MOST_REFILL_SECONDS)


def smallest_batch(settings: TrainerSettings) -> int:
    return -(-settings.groups_per_batch // SMALLEST_PART)


class Wait:
    """A wait for a batch: when it is over, what it waits for, and for how long it was held back."""

    def __init__(
        self, settings: TrainerSettings, report: Callable[[str, float | None], None], *, is_first: bool = False
    ) -> None:
        self._settings = settings
        self._report = report
        self._patience = settings.wait_seconds
        if is_first and self._patience is not None:
            self._patience = min(self._patience, FIRST_WAIT_SECONDS)
        self.started_at = time.monotonic()
        self.held_seconds = 0.0
        self._seen_at: float | None = None
        self._held_since: float | None = None
        self._reported: str | None = None
        self._reported_at = 0.0
        self._logged: tuple[int, int, bool, str | None] | None = None

    def is_over(self, supply: Supply, held: str | None) -> bool:
        """Take what the ledger holds now, and why nothing may be claimed; return whether a batch is claimed now."""
        now, num_filled = time.monotonic(), supply.num_filled(self._settings)
        if self._seen_at is None and (supply.num_ready or supply.num_singles):
            self._seen_at = now
        left = None
        if self._patience is not None and self._seen_at is not None and num_filled >= smallest_batch(self._settings):
            left = self._seen_at + self._patience - now
        if self._held_since is not None:
            self.held_seconds += now - self._held_since
        self._held_since = None if held is None else now
        is_full = num_filled >= self._settings.groups_per_batch and held is None
        if not is_full:
            self._log(supply, left, held, now)
        return is_full or (held is None and left is not None and left <= 0)

    def _log(self, supply: Supply, left: float | None, held: str | None, now: float) -> None:
        """Report and log what is waited for when it changed, at most every few seconds.

        The number of open sessions changes with each reward of live traffic: it is reported, and logged with the rest.
        """
        report = describe_wait(supply, self._settings, None, held)
        if report == self._reported or (self._reported is not None and now - self._reported_at < REPORT_SECONDS):
            return
        self._reported, self._reported_at = report, now
        self._report(report, left if held is None else None)
        logged = (supply.num_ready, supply.num_singles, supply.num_open > 0, held)
        if logged != self._logged:
            self._logged = logged
            log.info("%s", describe_wait(supply, self._settings, left, held))


def describe_wait(supply: Supply, settings: TrainerSettings, seconds_left: float | None, held: str | None) -> str:
    each_counts = settings.singles_per_group == 1
    num_ready = supply.num_filled(settings) if each_counts else supply.num_ready
    smallest, is_enough = smallest_batch(settings), supply.num_filled(settings) >= smallest_batch(settings)
    counted, least = (
        f"{num_ready} of {settings.groups_per_batch} groups are ready",
        f"; a batch needs at least {smallest}",
    )
    if supply.num_singles and not each_counts and num_ready:
        counted += f", and {supply.num_singles} single sessions, of which {settings.singles_per_group} count as a group"
    elif supply.num_singles and not each_counts:
        num_needed = settings.singles_per_group * (settings.groups_per_batch if is_enough else smallest)
        counted, least = f"{supply.num_singles} of {num_needed} single sessions are ready", ""
    elif supply.num_open and not each_counts and not num_ready:
        least += f", or {settings.singles_per_group * smallest} single sessions"
    if held is not None:
        return f"{counted}; {held}"
    if not is_enough:
        return f"waiting: {counted}{least}" + (f"; {_describe_open(supply)}" if supply.num_open else "")
    return f"waiting: {counted}" + ("" if seconds_left is None else f", starts in {max(seconds_left, 0):.0f} s")


def describe_refill(claim: claims.Claim, num_groups: int, settings: TrainerSettings) -> str:
    singles = "" if settings.singles_per_group == 1 else f" ({settings.singles_per_group} single sessions count as one)"
    return (
        f"waiting: too many of {describe_claim(claim)} have equal rewards, which teach nothing; "
        f"{num_groups} more groups{singles} are taken if they are ready within {refill_limit(settings):.0f} s"
    )


def _describe_open(supply: Supply) -> str:
    counted = f"{supply.num_open} open sessions have a reward" if supply.num_open > 1 else "1 open session has a reward"
    return (
        f"{counted}: a session counts once it is over (POST /v1/sessions/{{session_id}}/end; one that no call names is "
        f"over after ten minutes without a call)"
    )
