"""The trainer process: it trains the policies of a ledger until a signal or the configured end.

A signal only closes the source: the batch in progress is finished and committed, and no further batch is waited for.
An evaluation in progress is ended. So a stop takes at most the time of one batch. It loses no work unless the database
is not available then: the batch is not recorded, and is trained again after the next start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
from collections.abc import Iterator
from types import FrameType

import torch

import turnwise.features  # noqa: F401  the store calls them from here on
from trainer.algorithms.trial import try_algorithm
from trainer.features import FEATURES
from trainer.features.policies import Policies, PolicyNames
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.telemetry.logs import configure_logging
from turnwise.types import PolicyKind

log = logging.getLogger(__name__)


def run(settings: TrainerSettings) -> int:
    """Train under these settings; return the exit status.

    Raises:
        TurnwiseError: the trainer cannot start or go on.
    """
    configure_logging(settings.log_level, "text")
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    try:
        check_startable(settings)
        for handler in logging.getLogger().handlers:
            handler.addFilter(PolicyNames())
        trained = Policies(settings, FEATURES)
        with contextlib.closing(trained), _stopped_by_signals(trained):
            trained.learn()
    finally:
        FEATURES.leave()
    for number, state in trained.states.items():
        progress = state.progress
        log.info(
            "policy %d: stopped after batch %d at version %d", number, progress.num_batches, progress.policy_version
        )
    return 0


def check_startable(settings: TrainerSettings) -> None:
    """Check what would stop a start, before anything is loaded or started.

    Raises:
        SettingsError: A setting is missing, two do not fit together, or a package is not installed.
    """
    if not settings.model:
        raise SettingsError("no model: set model in [trainer], TURNWISE_TRAINER_MODEL, or --model")
    if settings.schedule != "constant" and settings.total_batches is None:
        raise SettingsError(f"schedule={settings.schedule!r} needs total_batches: set it, or use schedule='constant'")
    if settings.kind is PolicyKind.LORA and importlib.util.find_spec("peft") is None:
        raise SettingsError("kind='lora' needs the package 'peft', which is not installed: run `pip install peft`")
    if settings.kind is PolicyKind.LORA and "embed_tokens" in settings.lora_targets:
        raise SettingsError("lora_targets has 'embed_tokens', and vLLM loads no adapter of the embeddings: remove it")
    try_algorithm(settings.algorithm)
    for check in FEATURES.checks:
        check(settings)


@contextlib.contextmanager
def _stopped_by_signals(trained: Policies) -> Iterator[None]:
    def stop(number: int, _frame: FrameType | None) -> None:
        log.info("stopping after this batch (%s)", signal.Signals(number).name)
        trained.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
