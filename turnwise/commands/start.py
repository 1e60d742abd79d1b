"""The commands that start processes: engine, proxy, trainer, and all of them together."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from turnwise.commands import running_stack
from turnwise.commands.output import print_process_line
from turnwise.settings import has_sections

if TYPE_CHECKING:
    from turnwise.processes.engine_command import EngineSettings
    from turnwise.processes.stack import Stack, UpSettings

DEVICES = "CUDA_VISIBLE_DEVICES"


def run_engine(settings: EngineSettings, extra: tuple[str, ...]) -> None:
    """Become the engine."""
    engine = import_module("turnwise.processes.engine_command")
    engine.check_startable(settings)
    engine.build_command(settings, extra).execute()


def show_engine(settings: EngineSettings, extra: tuple[str, ...]) -> dict[str, Any]:
    """Return the engine's command for `--dry-run`."""
    command = import_module("turnwise.processes.engine_command").build_command(settings, extra)
    return {"argv": list(command.argv), "environment": command.environment, "shell": command.shell()}


def run_proxy(settings: Any) -> None:
    """Run the proxy until it is told to stop."""
    main = import_module("proxy.workers.parent" if settings.workers > 1 else "proxy.main")
    preflight, ports = import_module("turnwise.commands.preflight"), import_module("turnwise.processes.ports")
    operate = import_module("turnwise.commands.operate")
    ports.check_port_is_free("the proxy", settings.host, settings.port)
    database = settings.database.get_secret_value()
    operate.prepare(database)
    preflight.check_keys(database, settings.host)
    sys.exit(main.run(settings))


def run_trainer(settings: Any) -> None:
    """Run the trainer until it is told to stop."""
    preflight, operate = import_module("turnwise.commands.preflight"), import_module("turnwise.commands.operate")
    trainer = import_module("trainer.main")
    trainer.check_startable(settings)
    if import_module("turnwise.processes.engine_command").is_directory(settings.model):
        preflight.check_model(settings.model)
    operate.prepare(settings.database.get_secret_value())
    sys.exit(trainer.run(settings))


def run_stack(settings: UpSettings, config: Path | None) -> None:
    """Run engine, proxy and trainer until a signal or a child that cannot run ends them."""
    supervisor = import_module("turnwise.processes.supervisor")
    running_stack.check_none_runs()
    config = config if config is not None and has_sections(config) else None
    checked = import_module("turnwise.commands.preflight").check_up(settings, config)
    with _interrupted_by_sigterm():
        try:
            model = settings.model or _demo_model(settings)
            stack = import_module("turnwise.processes.stack").Stack(
                settings, model=model, gpus=checked.gpus, config=config, lora_rank=checked.lora_rank
            )
            logs = settings.runs_dir / "logs"
            started = supervisor.Supervisor(stack.children(), log_directory=logs, say=print_process_line)
            with running_stack.announced(_state_of(stack, settings)), started as running:
                running.say("up", f"serving {model} at {stack.proxy_url}/v1; page: {stack.proxy_url}/")
                running.say("up", "ctrl-C stops everything; another terminal: turnwise doctor, turnwise sessions")
                running.wait(threading.Event())
        except KeyboardInterrupt:
            import_module("turnwise.processes.printer").print_last_line(
                print_process_line, "up", "everything is stopped"
            )


def show_stack(settings: UpSettings, config: Path | None) -> dict[str, Any]:
    """Return the commands of the processes for `--dry-run`; the database's URL goes by environment.

    The plan may be for another machine: GPUs that the settings name need not exist here.
    """
    stacks, engine = import_module("turnwise.processes.stack"), import_module("turnwise.processes.engine_command")
    config = config if config is not None and has_sections(config) else None
    trainer = import_module("turnwise.commands.preflight").load_trainer(settings, config) if settings.trainer else None
    named = (*(settings.engine_gpus or ()), *(settings.trainer_gpus or ()))
    stack = stacks.Stack(
        settings,
        model=settings.model or str(settings.runs_dir / "model"),
        gpus=settings.gpu_plan(max(engine.num_gpus(), *(gpu + 1 for gpu in (-1, *named)))),
        config=config,
        lora_rank=trainer.lora_rank if trainer is not None and trainer.kind == "lora" else None,
    )
    gpus = {child.name: child.env[DEVICES] for child in stack.children() if DEVICES in child.env}
    return {"commands": {child.name: list(child.argv) for child in stack.children()}, "gpus": gpus}


def _state_of(stack: Stack, settings: UpSettings) -> running_stack.RunningStack:
    return running_stack.RunningStack(
        pid=os.getpid(),
        database=settings.database.get_secret_value(),
        proxy=stack.proxy_url,
        engines=stack.engine_urls,
    )


def _demo_model(settings: UpSettings) -> str:
    """Build the demo's model unless it is there already; return its directory."""
    directory = settings.runs_dir / "model"
    small_model = import_module("turnwise.demo.small_model")
    return str(small_model.ensure_small_model(directory, print_process_line))


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt the start and the run, as ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
