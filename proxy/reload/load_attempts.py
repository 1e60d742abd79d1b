"""Repeated attempts to load a version after a failure that may pass: a busy engine, or a read error of its files."""

from __future__ import annotations

import logging
import time

from proxy.metrics import Metrics
from turnwise.errors import ReloadFailed, TurnwiseError

log = logging.getLogger(__name__)

MAX_LOAD_ATTEMPTS = 3
"""Attempts to load a version whose failures may pass; it fails after the last."""
RETRY_LOAD_SECONDS = 1.0
"""Pause before the second attempt; it doubles with each further one."""


class LoadAttempts:
    """Counts the failed attempts to load a version, of one version at a time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._version = -1
        self._count = 0
        self._not_before = 0.0
        """When the next attempt may start, on the monotonic clock."""

    def is_waiting(self, version: int) -> bool:
        """Return whether the next attempt to load a version must not start yet."""
        return version == self._version and time.monotonic() < self._not_before

    def forget(self, version: int) -> None:
        """Forget the failed attempts of a version, after one that succeeded or the last."""
        if version == self._version:
            self._version, self._count = -1, 0

    def schedule(self, version: int, error: TurnwiseError) -> bool:
        """Schedule another attempt if the failure may pass; return whether one is scheduled."""
        if self._version != version:
            self._version, self._count = version, 0
        self._count += 1
        may_pass = isinstance(error, ReloadFailed) and error.is_transient
        if not may_pass or self._count >= MAX_LOAD_ATTEMPTS:
            self.forget(version)
            return False
        pause = RETRY_LOAD_SECONDS * 2 ** (self._count - 1)
        self._not_before = time.monotonic() + pause
        self._metrics.reloads.labels("retried").inc()
        log.warning(
            "attempt %d of %d to load policy version %d failed, the next one is in %.0f s: %s",
            self._count,
            MAX_LOAD_ATTEMPTS,
            version,
            pause,
            error,
        )
        return True
