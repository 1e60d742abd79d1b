"""`turnwise train`: the trainer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from turnwise.commands.flags import SettingsCommand

if TYPE_CHECKING:
    from trainer.settings import TrainerSettings


def _check(settings: TrainerSettings) -> dict[str, Any]:
    """Call the algorithm once on a small batch, as a start does."""
    from trainer.algorithms.trial import try_algorithm

    try_algorithm(settings.algorithm)
    return {}


def _run(settings: TrainerSettings) -> None:
    """Run the trainer until it is told to stop."""
    from trainer.main import check_startable, run
    from turnwise.commands.preflight import check_database_model, check_model
    from turnwise.processes.engine_command import is_directory

    check_startable(settings)
    if is_directory(settings.model):
        check_model(settings.model)
    check_database_model(settings.database.get_secret_value(), settings.model)
    sys.exit(run(settings))


train = SettingsCommand(
    "train",
    section="trainer",
    run=_run,
    show=_check,
    help="Run the trainer: claim experiences, update the weights, publish versions.",
)
