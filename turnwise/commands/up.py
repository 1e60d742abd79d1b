"""`turnwise up`: engine, proxy and trainer together, with which model, adapter and directories."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.commands.output import print_process_line
from turnwise.commands.place import KEY_FILE, STATE_FILE, RunningStack, find_running_stack, opened, stored_key
from turnwise.errors import SettingsError
from turnwise.files import lock, write_whole
from turnwise.settings import has_sections

if TYPE_CHECKING:
    from proxy.settings import ProxySettings
    from turnwise.processes.stack import Stack, UpSettings

DEVICES = "CUDA_VISIBLE_DEVICES"


def _run(settings: UpSettings, vllm_flags: tuple[str, ...], config: Path | None) -> None:
    from turnwise.commands.preflight import check_database_model, check_up, load_proxy
    from turnwise.processes.limited import call_in_child
    from turnwise.processes.served_model import check_chat_template
    from turnwise.processes.stack import Stack
    from turnwise.processes.supervisor import Supervisor
    from turnwise.processes.terminal import print_last_line

    check_none_runs()
    config = config if config is not None and has_sections(config) else None
    checked = call_in_child(check_up, settings, config, vllm_flags)
    if checked.lora_offer is not None and _takes_adapter(checked.lora_offer):
        settings = settings.model_copy(update={"kind": "lora"})
        checked = call_in_child(check_up, settings, config, vllm_flags)
    with _interrupted_by_signals():
        try:
            model = settings.model or _own_model(settings)
            check_chat_template(model, vllm_flags)
            check_database_model(settings.database.get_secret_value(), model)
            key = make_key(settings.database.get_secret_value())
            stack = Stack(
                settings,
                model=model,
                gpus=checked.gpus,
                needs=checked.needs,
                config=config,
                engine_wait_seconds=_engine_wait_seconds(settings, load_proxy(settings, config)),
                vllm_flags=vllm_flags,
            )
            logs = settings.runs_dir / "logs"
            started = Supervisor(stack.children(), log_directory=logs, say=print_process_line)
            with announced(_state_of(stack, settings)), started as running:
                running.say("up", f"serving {model} at {stack.proxy_url}/v1; page: {stack.proxy_url}/#key={key}")
                if checked.length_note:
                    running.say("up", checked.length_note)
                if settings.trainer and checked.needs.lora_rank is None:
                    running.say("up", "whole weights are trained; named policies and a hold-out need --kind lora")
                running.say("up", "ctrl-C stops everything; another terminal: turnwise doctor, turnwise sessions")
                running.wait(threading.Event())
        except KeyboardInterrupt:
            print_last_line(print_process_line, "up", "everything is stopped")


def _takes_adapter(reason: str) -> bool:
    """Ask a person at the terminal whether to train an adapter; without one, what the settings say is done."""
    offer = f"{reason}: an adapter (--kind lora) needs a fraction of the memory, and allows named policies"
    if sys.stdin.isatty():
        return click.confirm(f"{offer}. Train an adapter instead of all weights?", default=True, err=True)
    print_process_line("up", f"{offer}; all weights are trained; with --kind full nothing is offered")
    return False


def _show(settings: UpSettings, vllm_flags: tuple[str, ...], config: Path | None) -> dict[str, Any]:
    """Return the commands of the processes for `--dry-run`, and what they need of the GPUs' memory.

    The database's URL goes by environment.
    The plan may be for another machine: GPUs that the settings name need not exist here.
    """
    from turnwise.commands.preflight import check_memory, load_engine, load_proxy, load_trainer, needs_of
    from turnwise.processes.engine_command import num_gpus
    from turnwise.processes.stack import Stack, TrainerNeeds

    config = config if config is not None and has_sections(config) else None
    named = (*(settings.engine_gpus or ()), *(settings.trainer_gpus or ()))
    trainer = load_trainer(settings, config) if settings.trainer else None
    needs = TrainerNeeds() if trainer is None else needs_of(trainer)
    plan = settings.gpu_plan(max(num_gpus(), *(gpu + 1 for gpu in (-1, *named))), load_engine(settings, config, needs))
    stack = Stack(
        settings,
        model=settings.model or str(_own_model_directory(settings)),
        gpus=plan,
        needs=needs,
        config=config,
        engine_wait_seconds=_engine_wait_seconds(settings, load_proxy(settings, config)),
        vllm_flags=vllm_flags,
    )
    gpus = {child.name: child.env[DEVICES] for child in stack.children() if DEVICES in child.env}
    return {
        "notes": check_memory(plan, settings.model, trainer, vllm_flags),
        "commands": {child.name: list(child.argv) for child in stack.children()},
        "gpus": gpus,
    }


def _engine_wait_seconds(settings: UpSettings, proxy: ProxySettings) -> float | None:
    """Return how long calls wait while an engine restarts: as long as it may take, unless a setting says otherwise."""
    return None if "engine_wait_seconds" in proxy.model_fields_set else settings.start_seconds


def _state_of(stack: Stack, settings: UpSettings) -> RunningStack:
    return RunningStack(
        pid=os.getpid(),
        database=settings.database.get_secret_value(),
        proxy=stack.proxy_url,
        engines=stack.engine_urls,
    )


def _own_model(settings: UpSettings) -> str:
    """Write the model that is served where none is named, unless it is there already; return its directory."""
    from turnwise.default_models.pretrained import INSTALL, is_installed, write_pretrained
    from turnwise.default_models.small_model import ensure_small_model

    directory = _own_model_directory(settings)
    if is_installed():
        print_process_line("up", f"no --model: serving SmolLM2-135M-Instruct, from its package, in {directory}")
        return str(write_pretrained(directory))
    print_process_line(
        "up",
        "no --model: serving a model of 0.7 M parameters that only knows the demo's task. For replies that make sense: "
        f"{INSTALL}; or pass --model",
    )
    return str(ensure_small_model(directory, print_process_line))


def _own_model_directory(settings: UpSettings) -> Path:
    from turnwise.default_models.pretrained import is_installed

    return settings.runs_dir / ("SmolLM2-135M-Instruct" if is_installed() else "model")


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGINT interrupt the start and the run; a shell's background job ignores SIGINT otherwise."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


up = SettingsCommand(
    "up",
    section="up",
    run=_run,
    show=_show,
    takes_extra="[-- VLLM FLAGS…]",
    takes_config=True,
    help="Run engine, proxy and trainer on this machine, with SQLite; ctrl-C stops all. Arguments after -- go to vLLM.",
)


def make_key(database: str) -> str:
    """Return the key of this directory for a database's proxy, and store it in both where one has it not."""
    from turnwise.store import keys

    given = stored_key()
    with opened(database) as store, store.write() as conn:
        key = keys.local_key(conn, given)
    if key != given:
        write_whole(KEY_FILE, f"{key}\n")
    KEY_FILE.chmod(0o600)
    return key


@contextlib.contextmanager
def announced(stack: RunningStack) -> Iterator[None]:
    """Keep the state file while the block runs.

    Raises:
        SettingsError: another `turnwise up` runs in this directory.
    """
    STATE_FILE.touch(mode=0o600)
    try:
        locked = lock(STATE_FILE)
    except BlockingIOError as error:
        raise SettingsError(_already_runs()) from error
    with locked as file:
        file.truncate(0)
        json.dump(dataclasses.asdict(stack), file)
        file.flush()
        try:
            yield
        finally:
            STATE_FILE.unlink(missing_ok=True)


def check_none_runs() -> None:
    """Refuse a second `turnwise up` in one directory."""
    if find_running_stack() is not None:
        raise SettingsError(_already_runs())


def _already_runs() -> str:
    return (
        "`turnwise up` runs in this directory already; stop it first, or start this one in another directory: "
        "both would use one database and one trainer"
    )
