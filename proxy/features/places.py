"""How many clients of one kind may be served at once for a long time, with a share for each tenant."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from turnwise.errors import Overloaded


class Places:
    """The places of one process for clients that may read for a long time, with a share for each tenant."""

    def __init__(self, does: str, total: int, of_tenant: int) -> None:
        """`does` says what such clients do, as `listen to events`."""
        self._does = does
        self._total = total
        self._of_tenant = of_tenant
        self._taken: list[str] = []
        self._lock = threading.Lock()

    def num_taken(self) -> int:
        return len(self._taken)

    def check(self, tenant: str) -> None:
        """Check that there is a place.

        Raises:
            Overloaded: all are taken, or all of the tenant.
        """
        if self._taken.count(tenant) >= self._of_tenant:
            raise Overloaded(
                f"{self._of_tenant} clients of this tenant {self._does}, which is the limit; close one, or retry later"
            )
        if len(self._taken) >= self._total:
            raise Overloaded(f"{self._total} clients {self._does}, which is the limit; retry later")

    @contextlib.contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Take a place for the block, in any thread.

        Raises:
            Overloaded: as `check`.
        """
        with self._lock:
            self.check(tenant)
            self._taken.append(tenant)
        try:
            yield
        finally:
            self._taken.remove(tenant)
