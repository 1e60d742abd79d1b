"""The held-out runner: lets an agent play eval-split sessions through the proxy and reads how it went.

One decision: the trainer never plays itself. It starts a command, the same agent that a user runs, and takes the result
from the ledger, so what is measured is what is served, over the same road.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from typing import Protocol

from turnwise.store import queries
from turnwise.store.database import Database
from turnwise.types import Json, SessionStatus, Split, utc_now

log = logging.getLogger(__name__)

NEWEST_SESSIONS = 1000
"""How many eval sessions are looked at, at most."""


class Evaluator(Protocol):
    """Measures the served policy on held-out tasks."""

    def evaluate(self, policy_version: int) -> Json:
        """Return gauges; empty when nothing was played."""


class LedgerEvaluator:
    """Starts the command, if there is one, and sums up the eval sessions that ended meanwhile."""

    def __init__(self, db: Database, command: Sequence[str] = (), timeout_seconds: float = 600.0) -> None:
        self._db = db
        self._command = list(command)
        self._timeout_seconds = timeout_seconds
        self._since = utc_now()

    def evaluate(self, policy_version: int) -> Json:
        """Return mean reward, turns and count of the eval sessions since the last evaluation."""
        if self._command:
            self._play()
        with self._db.read() as conn:
            found, _ = queries.sessions(conn, queries.SessionFilter(split=Split.EVAL), limit=NEWEST_SESSIONS)
        ended = [one for one in found if one.status is not SessionStatus.OPEN and one.created_at >= self._since]
        rewards = [one.reward for one in ended if one.reward is not None]
        self._since = utc_now()
        if not rewards:
            return {}
        return {
            "policy_version": policy_version,
            "reward_mean": sum(rewards) / len(rewards),
            "turns_mean": sum(one.num_turns for one in ended) / len(ended),
            "num_sessions": len(rewards),
        }

    def _play(self) -> None:
        try:
            done = subprocess.run(self._command, timeout=self._timeout_seconds, check=False)  # noqa: S603  the operator's
        except (OSError, subprocess.TimeoutExpired) as error:
            log.error("the evaluation command %r did not run to its end: %s", self._command, error)  # noqa: TRY400
            return
        if done.returncode:
            log.error("the evaluation command %r exited with status %d", self._command, done.returncode)
