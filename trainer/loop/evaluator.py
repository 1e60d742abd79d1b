"""The held-out runner: lets an agent play eval-split sessions through the proxy and reads how it went.

The trainer never plays itself. It starts a command, the same agent that a user runs, and takes the result
from the ledger, so what is measured is what is served, over the same road; and it is said which version that was.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

from turnwise.store import evaluations, experiences, policies, queries
from turnwise.store.database import Database
from turnwise.types import Json, PolicyStatus, Session, SessionKey, SessionStatus, Split

log = logging.getLogger(__name__)

NEWEST_SESSIONS = 1000
"""How many eval sessions are looked at, at most."""
SERVED_SECONDS = 60.0
"""How long an evaluation waits for the version to be served."""
POLL_SECONDS = 0.1
COMING = (PolicyStatus.PUBLISHED, PolicyStatus.CANARY)
"""States of a version that engines may serve soon."""


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
        self._counted: set[SessionKey] | None = None
        """The sessions that were over at the last evaluation. Known by name: clocks of other machines may be off."""

    def evaluate(self, policy_version: int) -> Json:
        """Return mean reward, turns and count of the eval sessions that ended since the last evaluation.

        When a single version sampled them, the ledger keeps that with the version too.
        """
        if self._command:
            self._counted = self._counted if self._counted is not None else {_key(one) for one in self._over()}
            self._wait_until_served(policy_version)
            self._play()
        over = self._over()
        ended = [one for one in over if _key(one) not in (self._counted or ())]
        self._counted = {_key(one) for one in over}
        rewards = [one.reward for one in ended if one.reward is not None]
        if not rewards:
            return {}
        with self._db.read() as conn:
            sampled = evaluations.versions_sampled(conn, [_key(one) for one in ended])
        gauges: Json = {
            "policy_version": sampled.newest,
            "oldest_policy_version": sampled.oldest,
            "reward_mean": sum(rewards) / len(rewards),
            "turns_mean": sum(one.num_turns for one in ended) / len(ended),
            "num_sessions": len(rewards),
        }
        if sampled.newest is not None and sampled.oldest == sampled.newest:
            with self._db.write() as conn:
                evaluations.record_evaluation(conn, sampled.newest, gauges)
        return gauges

    def _over(self) -> list[Session]:
        """Return the newest eval sessions that are over."""
        with self._db.read() as conn:
            found, _ = queries.sessions(conn, experiences.SessionFilter(split=Split.EVAL), limit=NEWEST_SESSIONS)
        return [one for one in found if one.status is not SessionStatus.OPEN]

    def _wait_until_served(self, version: int) -> None:
        """Give the proxy time to hand the version to its engines, unless it will not: it failed, or is not wanted."""
        deadline = time.monotonic() + SERVED_SECONDS
        while time.monotonic() < deadline:
            with self._db.read() as conn:
                policy, pinned = policies.get_policy(conn, version), policies.pinned_version(conn)
            if policy.status not in COMING or pinned not in (None, version):
                return
            time.sleep(POLL_SECONDS)
        log.warning("policy version %d is not served yet; what is served is evaluated instead", version)

    def _play(self) -> None:
        try:
            done = subprocess.run(self._command, timeout=self._timeout_seconds, check=False)  # noqa: S603  the operator's
        except (OSError, subprocess.TimeoutExpired) as error:
            log.error("the evaluation command %r did not run to its end: %s", self._command, error)  # noqa: TRY400
            return
        if done.returncode:
            log.error("the evaluation command %r exited with status %d", self._command, done.returncode)


def _key(session: Session) -> SessionKey:
    return session.tenant, session.session_id
