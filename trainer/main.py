"""The trainer process: builds the workflow, learns until it is told to stop, and leaves nothing behind.

A signal only closes the source. A batch that is under way is finished and committed, a batch that is not
there yet is not waited for, so a stop costs at most one batch's time and loses no work.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from types import FrameType

import torch

from trainer.loop.workflows import OnPolicyWorkflow, RLWorkflow
from trainer.parallel import leave_world
from trainer.recorders import ProgressLine, Recorder, TensorBoard, WeightsAndBiases
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError

log = logging.getLogger(__name__)


def run(settings: TrainerSettings) -> int:
    """Train as the settings say; return the exit status.

    Raises:
        TurnwiseError: the trainer cannot start or go on.
    """
    if not settings.model:
        raise SettingsError("no model: set model in [trainer], TURNWISE_TRAINER_MODEL, or --model")
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    try:
        workflow = _workflow_class(settings).build_from_config(
            settings, enable_multi_devices=settings.multi_devices, enable_jit=settings.compile
        )
        workflow.add_recorders(_optional_recorders(settings))
        with contextlib.closing(workflow), _stopped_by_signals(workflow):
            state = workflow.learn(workflow.setup(settings.seed))
    finally:
        leave_world()
    log.info("stopped after batch %d at policy version %d", state.progress.num_batches, state.progress.policy_version)
    return 0


def _workflow_class(settings: TrainerSettings) -> type[RLWorkflow]:
    if settings.workflow == "off_policy":
        from trainer.loop.off_policy import OffPolicyWorkflow

        return OffPolicyWorkflow
    return OnPolicyWorkflow


def _optional_recorders(settings: TrainerSettings) -> list[Recorder]:
    recorders: list[Recorder] = []
    if settings.progress:
        recorders.append(ProgressLine())
    if settings.tensorboard_dir is not None:
        recorders.append(TensorBoard(settings.tensorboard_dir))
    if settings.wandb_project is not None:
        recorders.append(WeightsAndBiases(settings.wandb_project, settings.model_dump(mode="json")))
    return recorders


@contextlib.contextmanager
def _stopped_by_signals(workflow: RLWorkflow) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the loop after the batch that is under way."""

    def stop(number: int, _frame: FrameType | None) -> None:
        log.info("stopping after this batch (%s)", signal.Signals(number).name)
        workflow.env.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
