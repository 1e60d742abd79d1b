"""The policies of one trainer: a workflow for each, over one base model in memory.

A policy's adapter, optimizer, counts, directory, gauges and status are its workflow's own, and it trains as in a
process of its own, bit for bit. Policies take turns, a batch each, so that none waits for more than one batch of every
other. What fails in one policy sets that policy aside, with the error as its last report, and the others go on; the
next start of the process tries it again. The error of the last policy ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from trainer.build import Shared
from trainer.ledger import UpdateIds
from trainer.model.model import Policy
from trainer.pacing import StopFlag, outlast
from trainer.recorders import Recorder
from trainer.settings import TrainerSettings
from trainer.state import State
from trainer.train import RLWorkflow
from turnwise.errors import SettingsError
from turnwise.store import policies, processes
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, PolicyKind
from turnwise.types import Policy as NamedPolicy

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often new policies are looked for."""
SHORTEST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5
"""Between two looks at what is ready, while no policy has a batch."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Trained:
    """A policy that this process trains."""

    number: int
    workflow: RLWorkflow
    state: State


class Policies:
    """Trains all policies of a ledger."""

    def __init__(
        self,
        settings: TrainerSettings,
        kind: type[RLWorkflow],
        recorders: Callable[[TrainerSettings], list[Recorder]] = lambda _: [],
    ) -> None:
        """Prepare the default policy's workflow; nothing is loaded yet.

        Args:
            settings: Of the default policy; those of the others differ in names and directories alone.
            kind: The class of the workflows.
            recorders: Makes a policy's recorders from its settings, besides the file in its directory.
        """
        self._settings = settings
        self._kind = kind
        self._recorders = recorders
        self._stopped = StopFlag()
        db = Database(settings.database.get_secret_value())
        self._shared = Shared(db=db, model=Policy(settings), update_ids=UpdateIds(), stopped=self._stopped)
        self.workflows: list[RLWorkflow] = []
        """The workflows that are not closed."""
        self._looked_at = -LOOK_SECONDS
        self._trained: dict[int, Trained] = {}
        """By the numbers of the policies."""
        self._errors: dict[int, Exception] = {}
        """Of the policies that were set aside, by their numbers."""
        self._default = self._workflow(None)

    @property
    def states(self) -> dict[int, State]:
        """The states of the policies that are trained, by their numbers."""
        return {number: one.state for number, one in self._trained.items()}

    def learn(self) -> None:
        """Train until every policy reaches the configured end, or until `stop`.

        Raises:
            Exception: That of the last policy, or, at the configured end, of the first one that was set aside.
        """
        self._begin(DEFAULT_POLICY, self._default)
        pause = SHORTEST_PAUSE_SECONDS
        while not self._is_stopped():
            self._look_for_policies()
            active = [one for one in self._trained.values() if not one.workflow.is_done(one.state)]
            if not active:
                break
            # A policy alone waits inside of its step, until it is time to look for others.
            patience = LOOK_SECONDS if len(active) == 1 else 0.0
            had_batch = [self._advance(one, patience) for one in active]
            if any(had_batch):
                pause = SHORTEST_PAUSE_SECONDS
            elif len(active) > 1:
                self._stopped.wait(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        for one in list(self._trained.values()):
            with self._set_aside_on_error(one.number, one.workflow):
                one.state.enter()
                one.workflow.commits.flush(one.state)
        if self._errors and not self._stopped.is_set():
            raise next(iter(self._errors.values()))

    def stop(self) -> None:
        """End after the batch in progress; safe in a signal handler."""
        self._stopped.set()

    def close(self) -> None:
        """Release what is held, and flush."""
        for workflow in self.workflows[::-1]:  # the default policy's last: it holds what the others send
            self._close(workflow)
        self._shared.db.close()

    def _is_stopped(self) -> bool:
        return self._default.agent.world.from_first(self._stopped.is_set)

    def _workflow(self, policy: NamedPolicy | None) -> RLWorkflow:
        settings = settings_of(self._settings, policy)
        workflow = self._kind.build_from_config(
            settings,
            enable_multi_devices=settings.multi_devices and policy is None,
            enable_jit=settings.compile,
            policy=policy,
            shared=self._shared,
        )
        workflow.add_recorders(self._recorders(settings))
        self.workflows.append(workflow)
        return workflow

    def _begin(self, number: int, workflow: RLWorkflow) -> None:
        """Set a policy up, and train it from now on."""
        with self._set_aside_on_error(number, workflow):
            if number != DEFAULT_POLICY:
                self._check_shares_model()
                workflow.weights = self._default.weights
            state = workflow.setup(self._settings.seed)
            self._trained[number] = Trained(number=number, workflow=workflow, state=state)

    def _check_shares_model(self) -> None:
        """Check that several policies can be trained over the model in memory.

        Raises:
            SettingsError: They cannot.
        """
        if self._settings.kind is not PolicyKind.LORA:
            raise SettingsError("named policies are adapters, and this trainer has kind='full': set kind='lora'")
        if self._settings.multi_devices:
            raise SettingsError("named policies are trained by one process: set multi_devices=false")

    def _advance(self, one: Trained, patience: float) -> bool:
        """Train a policy on its next batch; return whether it had one."""
        had_batch = False
        with self._set_aside_on_error(one.number, one.workflow):
            one.workflow.claims.patience = patience
            one.state.enter()
            had_batch, one.state = one.workflow.advance(one.state)
        return had_batch

    def _look_for_policies(self) -> None:
        """Begin with policies that are new, and end with those that were archived or deleted; in the first process."""
        now = time.monotonic()
        if not self._default.agent.world.is_first or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now

        def read() -> list[NamedPolicy]:
            with self._shared.db.read() as conn:
                return policies.list_policies(conn)

        listed = outlast(read, self._stopped)
        found = {one.policy_id: one for one in listed if one.archived_at is None}
        stored = {one.policy_id for one in listed}
        for number in (self._trained.keys() | self._errors.keys()) - found.keys() - {DEFAULT_POLICY}:
            self._leave(number, is_deleted=number not in stored)
        for number, policy in found.items():
            if number not in self._trained and number not in self._errors and not self._stopped.is_set():
                log.info("policy %r has the number %d", policy.name, number)
                self._begin(number, self._workflow(policy))

    def _leave(self, number: int, *, is_deleted: bool) -> None:
        """End with a policy that was archived or deleted; of a deleted one nothing stays on disk."""
        log.info("policy %d was %s, and is not trained any more", number, "deleted" if is_deleted else "archived")
        gone = self._trained.get(number)
        if gone is not None:
            if not is_deleted:
                with self._set_aside_on_error(number, gone.workflow):
                    gone.state.enter()
                    gone.workflow.commits.flush(gone.state)
            if self._trained.pop(number, None) is not None:
                self._close(gone.workflow)
        self._errors.pop(number, None)
        if is_deleted:
            shutil.rmtree(self._settings.policies_dir / str(number), ignore_errors=True)
            with self._shared.db.write() as conn:
                processes.delete_report(conn, f"{self._settings.trainer_id}/{number}")

    @contextlib.contextmanager
    def _set_aside_on_error(self, number: int, workflow: RLWorkflow) -> Iterator[None]:
        """Report an error of the block; the policies besides this one go on without it, if there are any."""
        try:
            yield
        except Exception as error:  # anybody's algorithm, data or disk; a trainer without other policies ends
            if workflow.agent.world.is_first:
                workflow.env.note_failure(error)
            if not self._trained.keys() - {number}:
                raise
            log.exception("policy %d is set aside until the trainer starts again; the others go on", number)
            self._errors[number] = error
            self._trained.pop(number, None)
            self._close(workflow)
            traceback.clear_frames(error.__traceback__)  # they hold the gradients of the failed batch
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _close(self, workflow: RLWorkflow) -> None:
        if workflow is not self._default:
            workflow.weights = None  # the default policy's
        self.workflows.remove(workflow)
        workflow.close()


def settings_of(settings: TrainerSettings, policy: NamedPolicy | None) -> TrainerSettings:
    """Return the settings of a policy's workflow; None is the default policy."""
    if policy is None:
        return settings
    number = str(policy.policy_id)
    board = settings.recorders.get("tensorboard")
    changes = {
        "policies_dir": settings.policies_dir / number,
        "trainer_id": f"{settings.trainer_id}/{number}",
        "recorders": {"tensorboard": f"{board}/{number}"} if board else {},
    }
    return settings.model_copy(update=changes, deep=True)
