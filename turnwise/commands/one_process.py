"""The commands `proxy` and `train`, which run one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.commands.flags import SettingsCommand
from turnwise.errors import EngineError
from turnwise.types import PolicyKind

if TYPE_CHECKING:
    from proxy.features import Settings as ProxySettings
    from trainer.features import Settings


def _run_proxy(settings: ProxySettings) -> None:
    from turnwise.commands.place import opened
    from turnwise.commands.preflight import check_keys
    from turnwise.processes.ports import check_port_is_free

    if settings.workers > 1:
        from proxy.features.workers.parent import run
    else:
        from proxy.main import serve as run
    check_port_is_free("the proxy", settings.host, settings.port)
    database = settings.database.get_secret_value()
    with opened(database):  # brings the tables of an SQLite file up to date
        pass
    check_keys(database, settings.host)
    sys.exit(run(settings))


proxy = SettingsCommand(
    "proxy",
    section="proxy",
    run=_run_proxy,
    help="Run the proxy: the API for agents, sessions, rewards and policies.",
)


def _tried(settings: Settings) -> dict[str, Any]:
    """Call the algorithm once on a small batch, as a start does; return what the trainer makes of the model.

    Where vLLM is installed, it also says what an engine on this machine would be refused for.
    """
    from trainer.algorithms.trial import try_algorithm
    from trainer.model.loading import described
    from turnwise.processes.engine_command import has_gpu
    from turnwise.processes.served_model import NO_ENGINE, check_served

    try_algorithm(settings.algorithm)
    if not Path(settings.model).is_dir():  # it is downloaded later, or on another machine
        return {}
    notes, lora = described(settings), settings.kind is PolicyKind.LORA
    if importlib.util.find_spec("vllm") is not None:
        try:
            check_served(settings.model, gpu=has_gpu(), lora=lora, dtype=None)
        except EngineError as error:
            notes[NO_ENGINE] = str(error)
    return {"notes": notes}


def _run_trainer(settings: Settings) -> None:
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
    run=_run_trainer,
    show=_tried,
    help="Run the trainer: claim experiences, update the weights, publish versions.",
)
