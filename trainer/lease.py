"""The renewal of a claim while the trainer works on it."""

from __future__ import annotations

import logging
import threading

from turnwise.errors import LeaseLost, StoreUnavailable
from turnwise.store import claims
from turnwise.store.database import Database

log = logging.getLogger(__name__)


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
