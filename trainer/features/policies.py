"""The policies of one trainer over one base model: whose turn it is, and what an error in one does to the others.

A policy's adapter, optimizer, counts, directory, gauges and status are its training's own, and it trains as in a
process of its own, bit for bit. Policies take turns, a batch each, so that none waits for more than one batch of every
other. What fails in one policy sets that policy aside, with the error as its last report, and the others go on; the
next start of the process tries it again. The error of the last policy ends the process. A policy waits where its
tenant has used up a quota: tokens trained in a day, or bytes on disk.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import shutil
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field

from trainer.claims.claims import Claims
from trainer.claims.holds import Beside, Hold
from trainer.claims.ledger import RunProgress, TrainerProcess
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from trainer.settings import TrainerSettings
from trainer.train import Features, Training
from trainer.versions.resume import OptimizerLike
from trainer.versions.state import State
from turnwise.errors import SettingsError
from turnwise.features.policies import measured_versions, num_bytes_on_disk, trained_tokens_since
from turnwise.settings import Settings
from turnwise.store import database, policies, rows, trainer_reports
from turnwise.store.database import Connection, Database
from turnwise.store.serving import ServingState
from turnwise.types import DEFAULT_POLICY, PolicyKind
from turnwise.types import Policy as NamedPolicy

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
SHORTEST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts that the policies of one process share."""

    db: Database
    model: Policy
    """They train adapters of it, in turns (`State.enter`)."""
    process: TrainerProcess | None = None
    """None for one policy alone."""
    first: dict[type[Beside[Any]], Beside[Any]] = dataclasses.field(default_factory=dict)
    """What stands beside the first policy."""


def make_parts(
    settings: TrainerSettings,
    policy: NamedPolicy | None = None,
    shared: Shared | None = None,
    features: Features = Features(),  # noqa: B008  it is frozen
) -> tuple[Claims, PolicyAgent, OptimizerLike]:
    """Make the parts of a policy's training from its settings; nothing is loaded yet."""
    shared = shared or Shared(db=Database(settings.database.get_secret_value()), model=Policy(settings, features.terms))
    claims = next((kind for kind in features.claims if kind.is_on(settings)), Claims)(
        shared.db,
        settings,
        policy=policy,
        process=shared.process,
        terms=shared.model.terms,
        holds=features.holds,
    )
    heads = [head for heads_of in features.heads for head in heads_of(shared.model)]
    learner = features.agent(shared.model, settings, heads)
    return claims, learner, lambda parameters: features.optimizer(parameters, settings)


@dataclasses.dataclass(slots=True, kw_only=True)
class Trained:
    """A policy that this process trains."""

    training: Training
    state: State


training_policy: contextvars.ContextVar[str | None] = contextvars.ContextVar("policy", default=None)


class PolicyNames(logging.Filter):
    """Puts the name of the policy that is trained before each line, where it is not the default one."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = training_policy.get()
        if name is not None:
            record.msg, record.args = f"policy {name!r}: {record.getMessage()}", ()
        return True


class QuotaSettings(Settings):
    """What the named policies of one tenant may use."""

    tenant_trained_tokens_per_day: int | None = Field(default=None, ge=1)
    """Tokens that the named policies of one tenant may train in a UTC day. Then their training waits for the next."""
    tenant_policy_bytes: int | None = Field(default=None, ge=1)
    """Bytes that the versions and states of the named policies of one tenant may take on disk. Above it their training
    waits."""


class Bases(Beside[TrainerSettings]):
    """Keeps the versions that named policies started from: they serve them until they have versions of their own."""

    def kept_versions(self) -> set[int]:
        listed = self._ledger.read(policies.list_policies)
        return {each.base_version for each in listed if each.base_version is not None}


class Quotas(Hold[QuotaSettings]):
    """Waits where a quota of the policy's tenant is used up."""

    needs_batch = True

    @classmethod
    def is_on(cls, settings: QuotaSettings) -> bool:
        return (settings.tenant_trained_tokens_per_day or settings.tenant_policy_bytes) is not None

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | None:  # noqa: ARG002
        if self._ledger.policy is None:
            return None
        tenant = self._ledger.policy.tenant
        whose, settings = f"the policies of tenant {tenant!r}", self._settings
        most_tokens, most_bytes = settings.tenant_trained_tokens_per_day, settings.tenant_policy_bytes
        if most_tokens is not None:
            now = rows.from_micros(database.clock(conn))
            today = now.replace(hour=0, minute=0, second=0, microsecond=0)
            num_tokens = trained_tokens_since(conn, tenant, today)
            if num_tokens >= most_tokens:
                return (
                    f"{whose} have trained {num_tokens} tokens today, of {most_tokens} a day "
                    "(tenant_trained_tokens_per_day): training waits until 00:00 UTC"
                )
        if most_bytes is not None:
            own = [one.policy_id for one in policies.list_policies(conn) if one.tenant == tenant]
            num_bytes = num_bytes_on_disk(each for number in own for each in measured_versions(conn, number))
            if num_bytes is not None and num_bytes >= most_bytes:
                return (
                    f"{whose} take {num_bytes} bytes on disk, of {most_bytes} (tenant_policy_bytes): training "
                    "waits until the quota is raised, or directories of versions that are not needed are deleted"
                )
        return None


class Policies:
    """Trains all policies of a ledger."""

    def __init__(
        self,
        settings: TrainerSettings,
        features: Features = Features(),  # noqa: B008  it is frozen
    ) -> None:
        """Prepare the default policy's training under these settings; nothing is loaded yet.

        The settings of the other policies differ in names and directories alone. `features` stand beside the core.
        """
        self._settings = settings
        self._features = features
        self._process = TrainerProcess()
        db = Database(settings.database.get_secret_value())
        self._shared = Shared(db=db, model=Policy(settings, features.terms), process=self._process)
        self.trainings: list[Training] = []
        self._looked_at = -LOOK_SECONDS
        self._trained: dict[int, Trained] = {}
        self._errors: dict[int, Exception] = {}
        self._names: dict[int, str] = {}
        self._default = self._training(None)

    @property
    def states(self) -> dict[int, State]:
        return {number: one.state for number, one in self._trained.items()}

    def learn(self) -> None:
        """Train until every policy reaches the configured end, or until `stop`.

        Raises:
            Exception: That of the last policy, or, at the configured end, of the first one that was set aside.
        """
        self._begin(DEFAULT_POLICY, self._default)
        pause = SHORTEST_PAUSE_SECONDS
        while not self._default.learner.world.from_first(self._process.is_stopped):
            self._look_for_policies()
            active = {n: one for n, one in self._trained.items() if not one.training.is_done(one.state)}
            if not active:
                break
            # A policy alone waits inside of its step, until it is time to look for others.
            patience = LOOK_SECONDS if len(active) == 1 else 0.0
            num_batches = 0
            for number, one in active.items():
                with self._set_aside_on_error(number, one.training):
                    one.training.patience = patience
                    one.state.enter()
                    had_batch, one.state = one.training.advance(one.state)
                    num_batches += had_batch
            if num_batches:
                pause = SHORTEST_PAUSE_SECONDS
            elif len(active) > 1:
                self._process.wait(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        for number, one in list(self._trained.items()):
            with self._set_aside_on_error(number, one.training):
                one.state.enter()
                one.training.commits.flush(one.state)
        if self._errors and not self._process.is_stopped():
            raise next(iter(self._errors.values()))

    def stop(self) -> None:
        self._process.stop()

    def close(self) -> None:
        for training in self.trainings[::-1]:  # the default policy's last: it holds what the others send
            self._close(training)
        self._shared.db.close()

    def _training(self, policy: NamedPolicy | None) -> Training:
        settings = settings_of(self._settings, policy)
        parts = make_parts(settings, policy, self._shared, self._features)
        training = Training(*parts, settings=settings, features=self._features, first=self._shared.first)
        if policy is None:
            training.learner.shard(self._features.place(settings))
        if settings.compile:
            training.compile()
        self.trainings.append(training)
        return training

    def _begin(self, number: int, training: Training) -> None:
        with self._set_aside_on_error(number, training):
            if training.learner.world.is_first:
                for recorder in self._features.recorders(training.settings, training.claims.policy):
                    training.recorder.add(recorder)
            if number != DEFAULT_POLICY:
                self._check_shares_model()
            state = training.setup(self._settings.seed)
            self._trained[number] = Trained(training=training, state=state)

    def _check_shares_model(self) -> None:
        if self._settings.kind is not PolicyKind.LORA:
            raise SettingsError("named policies are adapters, and this trainer has kind='full': set kind='lora'")
        if not self._shared.model.place.is_whole:
            raise SettingsError("named policies are trained by one process: set multi_devices=false")

    def _look_for_policies(self) -> None:
        """Begin with policies that are new, and end with those that were archived or deleted; in the first process."""
        now = time.monotonic()
        if not self._default.learner.world.is_first or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now

        listed = self._default.claims.read(policies.list_policies)
        found = {one.policy_id: one for one in listed if one.archived_at is None}
        stored = {one.policy_id for one in listed}
        for number in (self._trained.keys() | self._errors.keys()) - found.keys() - {DEFAULT_POLICY}:
            self._leave(number, is_deleted=number not in stored)
        for number, policy in found.items():
            if number not in self._trained and number not in self._errors and not self._process.is_stopped():
                self._names[number] = policy.name
                log.info("policy %r has the number %d", policy.name, number)
                self._begin(number, self._training(policy))

    def _leave(self, number: int, *, is_deleted: bool) -> None:
        """End with a policy that was archived or deleted; of a deleted one nothing stays on disk."""
        log.info("policy %d was %s, and is not trained any more", number, "deleted" if is_deleted else "archived")
        gone = self._trained.get(number)
        if gone is not None:
            if not is_deleted:
                with self._set_aside_on_error(number, gone.training):
                    gone.state.enter()
                    gone.training.commits.flush(gone.state)
            if self._trained.pop(number, None) is not None:
                self._close(gone.training)
        self._errors.pop(number, None)
        if is_deleted:
            shutil.rmtree(self._settings.policies_dir / str(number), ignore_errors=True)
            with self._shared.db.write() as conn:
                trainer_reports.delete_report(conn, f"{self._settings.trainer_id}/{number}")

    @contextlib.contextmanager
    def _set_aside_on_error(self, number: int, training: Training) -> Iterator[None]:
        """Report an error of the block; the policies besides this one go on without it, if there are any."""
        named = training_policy.set(self._names.get(number))
        try:
            yield
        except Exception as error:  # anybody's algorithm, data or disk; a trainer without other policies ends
            if training.learner.world.is_first:
                training.claims.note_failure(error)
            if not self._trained.keys() - {number}:
                raise
            log.exception("policy %d is set aside until the trainer starts again; the others go on", number)
            self._errors[number] = error
            self._trained.pop(number, None)
            self._close(training)
            traceback.clear_frames(error.__traceback__)  # they hold the gradients of the failed batch
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        finally:
            training_policy.reset(named)

    def _close(self, training: Training) -> None:
        self.trainings.remove(training)
        training.close()


def settings_of(settings: TrainerSettings, policy: NamedPolicy | None) -> TrainerSettings:
    if policy is None:
        return settings
    number = str(policy.policy_id)
    changes = {
        "policies_dir": settings.policies_dir / number,
        "trainer_id": f"{settings.trainer_id}/{number}",
        "algorithm": type(settings.algorithm)(settings.algorithm.settings),
    }
    return settings.model_copy(update=changes)
