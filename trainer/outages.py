"""How the trainer keeps what it claimed, and how it waits: for a stop, for a database, after a jump of its clock.

A lease that runs out meanwhile is taken by a second trainer, if there is one; the acknowledgement then fails, since it
checks the fencing tokens. Without another trainer no work is lost.
"""

from __future__ import annotations

import datetime
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from turnwise.errors import LeaseLost, StoreUnavailable
from turnwise.store import claims
from turnwise.store.database import Database
from turnwise.store.trainer_status import BEAT_SECONDS, note_sign_of_life

log = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 10.0
LOOK_SECONDS = 0.05
"""How long a wait goes on after a stop, at most."""
JUMP_SECONDS = 30.0
"""Difference to this process's own clock from which on the database's clock counts as having jumped."""


class StopFlag:
    """Is set once, by a signal handler or a thread, and ends waits.

    `threading.Event` is not for signal handlers: one that runs while its own thread is inside of `Event.wait` may find
    the event's lock held, and wait for it without an end.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """End all waits, now and later."""
        self._is_set = True

    def is_set(self) -> bool:
        """Return whether waits have ended."""
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the flag is set."""
        deadline = time.monotonic() + seconds
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))


def outlast(operation: Callable[[], Result], stopped: StopFlag) -> Result:
    """Return what an operation on the ledger returns; repeat it while the database is not available.

    Args:
        operation: It can be repeated, also after a commit whose answer was lost.
        stopped: Once it is set, an operation that fails is not repeated.

    Raises:
        StoreUnavailable: The database is not available, and the trainer is to stop, or a repetition fails as well.
    """
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return operation()
        except StoreUnavailable as error:
            if stopped.is_set() or error.is_permanent:
                raise
            log.warning("the database is not available, trying again in %.1f s: %s", pause, error)
            stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class SteadyClock:
    """Compares the database's clock with this process's monotonic clock.

    After a jump forward, as when a virtual machine resumes, all sessions look as if they had been idle for its length.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._jumped_at = -math.inf

    def seconds_since_jump(self, now: datetime.datetime) -> float:
        """Return for how long the database's clock has run evenly; infinite if no jump was seen.

        Args:
            now: The database's time.
        """
        monotonic = time.monotonic()
        offset = now.timestamp() - monotonic
        if self._offset is not None and abs(offset - self._offset) > JUMP_SECONDS:
            log.warning("the database's clock jumped by %.0f s", offset - self._offset)
            self._jumped_at = monotonic
        self._offset = offset
        return monotonic - self._jumped_at


class Lease:
    """Renews a claim from a thread until it is stopped."""

    def __init__(self, db: Database, claim: claims.Claim, lease_seconds: float) -> None:
        self.claim = claim
        self._db = db
        self._lease_seconds = lease_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the renewal."""
        self._stopped.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stopped.wait(self._lease_seconds / 3):
            try:
                claims.renew(self._db, self.claim, self._lease_seconds)
            except LeaseLost:
                # The ack fails with the same error, in the thread that can act on it.
                log.warning("the lease on %d groups was lost", len(self.claim.groups))
                return
            except StoreUnavailable as error:
                log.warning("the lease could not be renewed, trying again: %s", error)


class SignsOfLife:
    """Tells others from a thread that this process lives, also while a batch takes long."""

    def __init__(self, db: Database, trainer_id: str) -> None:
        self._db = db
        self._trainer_id = trainer_id
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._give, name="signs of life", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give no further sign."""
        self._stopped.set()
        self._thread.join()

    def _give(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            try:
                with self._db.write() as conn:
                    note_sign_of_life(conn, self._trainer_id)
            except StoreUnavailable as error:
                log.warning("no sign of life could be stored, trying again: %s", error)
