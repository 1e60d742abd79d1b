"""Evaluation: an agent plays held-out sessions through the proxy, and their rewards are read from the ledger.

The trainer does not generate itself. It starts a command, the same agent that a user runs, and reads the result from
the ledger, so the served model is measured through the proxy. The result names the version that sampled the sessions.
The command's processes end with its time limit, with a stop of the trainer, and also if the trainer is killed.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import subprocess
import time
from collections.abc import Iterator

from pydantic import Field

from trainer.claims.holds import Beside, OfFirst
from trainer.claims.ledger import Ledger, RunProgress
from trainer.model.agent import PolicyAgent
from turnwise.errors import NotFound, StoreUnavailable
from turnwise.features import evaluation
from turnwise.features.statistics import intervals
from turnwise.processes import guard
from turnwise.processes.limited import GRACE_SECONDS
from turnwise.settings import Settings, child_environment, variable_name
from turnwise.store import keys, serving, sessions, versions
from turnwise.store.selection import SessionFilter
from turnwise.types import (
    DEFAULT_POLICY_NAME,
    Json,
    PolicyStatus,
    Session,
    SessionKey,
    SessionStatus,
    Split,
    utc_now,
)

log = logging.getLogger(__name__)

NEWEST_SESSIONS = 1000
MOST_VERSIONS = 10**6
SERVED_SECONDS = 60.0
POLL_SECONDS = 0.1
KEY_MARGIN_SECONDS = 3600.0
"""How much longer than the evaluation its key is valid at most; the proxy's clock may differ by nearly so much."""
COMING = (PolicyStatus.PUBLISHED, PolicyStatus.CANARY)


class EvaluationSettings(Settings):
    """How versions are evaluated."""

    evaluate_every: int | None = Field(default=None, ge=1)
    """Batches between evaluations; None never evaluates."""
    evaluation_command: tuple[str, ...] = ()
    """Command that plays held-out tasks through the proxy, in sessions of split `eval`. Empty: only read the eval
    sessions that others played."""
    evaluation_seconds: float = Field(default=600.0, gt=0, le=365 * 86400)
    """Time limit of the evaluation command."""
    proxy_url: str = "http://127.0.0.1:8100"
    """Address of the proxy, which evaluation commands get with a key and the version in their environment."""
    keep_best: int = Field(default=0, ge=0)
    """So many versions with the best evaluations stay on disk, by mean reward."""


class Evaluator:
    """Starts the command, if there is one, and sums up the eval sessions that ended meanwhile."""

    def __init__(self, ledger: Ledger, settings: EvaluationSettings) -> None:
        self._ledger = ledger
        self._db = ledger.db
        self._process = ledger.process
        self._settings = settings
        self._command = list(settings.evaluation_command)
        self._counted: set[SessionKey] | None = None
        """The sessions that were over at the last evaluation. Known by name: clocks of other machines may be off."""

    def evaluate(self, policy_version: int) -> Json:
        """Return mean reward, turns and count of the eval sessions that ended during the evaluation.

        Without a command, of those that ended since the last evaluation. When a single version sampled them, the result
        is also stored with that version. A command that the time limit ended has played a part of its sessions: its
        gauges have `is_partial`, and are not stored. A stop of the trainer, or an outage of the database, gives no
        result.
        """
        try:
            return self._evaluate(policy_version)
        except StoreUnavailable as error:
            log.warning("policy version %d is not evaluated: %s", policy_version, error)
            return {}

    def _evaluate(self, policy_version: int) -> Json:
        is_partial = False
        if self._command:
            # Read before each evaluation: after an outage, sessions of the evaluation that failed must not count here.
            self._counted = {_key(one) for one in self._over()}
            self._wait_until_served(policy_version)
            is_partial = not self._play(policy_version)
            if is_partial and self._process.is_stopped():
                return {}
        over = self._over()
        ended = [one for one in over if _key(one) not in (self._counted or ())]
        self._counted = {_key(one) for one in over}
        rewards = [one.reward for one in ended if one.reward is not None]
        if not rewards:
            return {}
        with self._db.read() as conn:
            oldest, newest = evaluation.versions_sampled(conn, [_key(one) for one in ended])
        gauges: Json = {
            "policy_version": newest,
            "oldest_policy_version": oldest,
            "reward_mean": sum(rewards) / len(rewards),
            "turns_mean": sum(one.num_turns for one in ended) / len(ended),
            "num_sessions": len(rewards),
        }
        if len(rewards) > 1:
            gauges["reward_margin"] = intervals.shown_margin(rewards)
        if is_partial:
            # Not comparable with the evaluations of other versions, by which the best ones are chosen.
            return gauges | {"is_partial": True}
        if newest is not None and oldest == newest:
            with contextlib.suppress(NotFound), self._db.write() as conn:  # a version that was never published
                versions.add_metrics(conn, newest, {"eval": gauges})
        return gauges

    def _over(self) -> list[Session]:
        wanted = SessionFilter(split=Split.EVAL, policy_id=self._ledger.policy_id)
        with self._db.read() as conn:
            found, _ = sessions.list_sessions(conn, wanted, limit=NEWEST_SESSIONS)
        return [one for one in found if one.status is not SessionStatus.OPEN]

    def _wait_until_served(self, version: int) -> None:
        deadline = time.monotonic() + SERVED_SECONDS
        while time.monotonic() < deadline and not self._process.is_stopped():
            with self._db.read() as conn:
                policy = versions.get_version(conn, version)
                pinned = serving.serving_state(conn, self._ledger.policy_id).pinned_version
            if policy.status not in COMING or pinned not in (None, version):
                return
            self._process.wait(POLL_SECONDS)
        log.warning("policy version %d is not served yet; what is served is evaluated instead", version)

    def _play(self, version: int) -> bool:
        guarded = guard.guarded(self._command, GRACE_SECONDS)
        with self._temporary_key() as key:
            environment = child_environment(evaluation_environment(self._settings.proxy_url.rstrip("/"), key, version))
            with subprocess.Popen(guarded, env=environment, start_new_session=True) as process:  # noqa: S603  the operator's
                reason = self._wait_for(process)
        if reason is not None:
            log.error("the evaluation command %r was ended: %s", self._command, reason)
        elif process.returncode:
            log.error("the evaluation command %r exited with status %d", self._command, process.returncode)
        return reason is None

    def _wait_for(self, process: subprocess.Popen[bytes]) -> str | None:
        started = time.monotonic()
        try:
            while process.poll() is None:
                if self._process.is_stopped():
                    return "the trainer stops"
                if time.monotonic() - started > (limit := self._settings.evaluation_seconds):
                    return f"it ran longer than {limit:g} s (evaluation_seconds); its result is partial"
                self._process.wait(POLL_SECONDS)
        finally:
            process.terminate()
        return None

    @contextlib.contextmanager
    def _temporary_key(self) -> Iterator[str]:
        """Create an agent key for one evaluation and revoke it afterwards; `none` where none may do what it does.

        A named policy's sessions always need one. It expires by itself: a trainer that is killed revokes nothing.
        """
        lifetime = datetime.timedelta(seconds=self._settings.evaluation_seconds + KEY_MARGIN_SECONDS)
        policy, made = self._ledger.policy, None
        tenant, name = ("default", DEFAULT_POLICY_NAME) if policy is None else (policy.tenant, policy.name)
        with self._db.write() as conn:
            if policy is not None or keys.any_keys(conn) or keys.has_local_key(conn):
                expires_at, role = utc_now() + lifetime, keys.KeyRole.AGENT
                made = keys.create_key(
                    conn, tenant, role, "evaluation", expires_at=expires_at, policy=name, locks_out=False
                )
        if made is None:
            yield "none"
            return
        key_id, key = made
        try:
            yield key
        finally:
            with self._db.write() as conn:
                keys.revoke_key(conn, key_id)


class Evaluation(Beside[EvaluationSettings]):
    """Evaluates every so many batches, and keeps the versions with the best results."""

    @classmethod
    def is_on(cls, settings: EvaluationSettings) -> bool:
        return settings.evaluate_every is not None or settings.keep_best > 0

    def __init__(self, ledger: Ledger, learner: PolicyAgent, first: OfFirst) -> None:
        super().__init__(ledger, learner, first)
        self.evaluator: Evaluator | None = Evaluator(ledger, self._settings)

    def trained(self, at: RunProgress, *, is_last: bool) -> Json:
        every = self._settings.evaluate_every
        is_due = every is not None and (at.num_batches % every == 0 or is_last)
        found = self.evaluate(at.policy_version) if is_due else {}
        return {f"eval/{name}": value for name, value in found.items()}

    def evaluate(self, policy_version: int) -> Json:
        """Return what the evaluator finds, in the first process."""
        if self.evaluator is None or not self._learner.world.is_first:
            return {}
        return self.evaluator.evaluate(policy_version)

    def kept_versions(self) -> set[int]:
        """Return the versions with the best evaluations; of equal ones the newer."""
        if not self._settings.keep_best:
            return set()
        of = [self._ledger.policy_id]
        stored, _ = self._ledger.read(lambda conn: versions.list_versions(conn, limit=MOST_VERSIONS, policy_ids=of))
        evaluated = [(each.metrics.get("eval", {}).get("reward_mean"), each.version) for each in stored]
        best = sorted((mean, version) for mean, version in evaluated if mean is not None)[-self._settings.keep_best :]
        return {version for _, version in best}


def evaluation_environment(proxy_url: str, key: str, version: int) -> dict[str, str]:
    base_url = f"{proxy_url}/v1"
    return {
        "TURNWISE_BASE_URL": base_url,
        "TURNWISE_API_KEY": key,
        "TURNWISE_POLICY_VERSION": str(version),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        variable_name("run", "url"): proxy_url,
        variable_name("run", "api_key"): key,
    }


def _key(session: Session) -> SessionKey:
    return session.tenant, session.session_id
