"""The commands that run one process: `proxy`, `engine`, `train`, `reward`, and the stand-in `fake-engine`."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.commands.place import at_running_proxy
from turnwise.errors import EngineError, SettingsError
from turnwise.types import PolicyKind

if TYPE_CHECKING:
    from proxy.features import Settings as ProxySettings
    from trainer.features import Settings
    from turnwise.processes.engine_command import EngineSettings
    from turnwise.rewards.posting import Poster
    from turnwise.rewards.settings import RewardSettings


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


def _become_engine(settings: EngineSettings, extra: tuple[str, ...]) -> None:
    from turnwise.processes.engine_command import build_command, check_startable, length_note

    check_startable(settings, extra, is_trained=False)
    if note := length_note(settings, extra):
        click.echo(f"turnwise: {note}", err=True)
    build_command(settings, extra).execute()


def _show_engine(settings: EngineSettings, extra: tuple[str, ...]) -> dict[str, Any]:
    from turnwise.processes.engine_command import build_command

    command = build_command(settings, extra)
    return {"argv": list(command.argv), "environment": command.environment, "shell": command.shell()}


engine = SettingsCommand(
    "engine",
    section="engine",
    run=_become_engine,
    show=_show_engine,
    takes_extra="[-- VLLM FLAGS…]",
    help="Run vLLM with the flags that capture and reload need. Arguments after -- go to vLLM.",
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


@click.command("fake-engine")
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="Port to listen on.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--model", help="Name of the model it serves [default: the script's, else fake].")
@click.option(
    "--pace-ms", type=click.FloatRange(min=0), help="Delay before each token [default: the script's, else 0]."
)
@click.option("--script", type=click.Path(path_type=Path), help="JSON file with replies, tool calls and faults.")
@click.option("--dry-run", is_flag=True, help="Print the resolved script and do nothing.")
def fake_engine(
    port: int,
    host: str,
    model: str | None,
    pace_ms: float | None,
    script: Path | None,
    *,
    dry_run: bool,
) -> None:
    """Stand in for vLLM: the same wire format, scripted replies, faults on demand. For tests and CI."""
    from turnwise_fake_engine import Script, serve

    loaded = Script.load(script) if script else Script()
    pace_seconds = None if pace_ms is None else pace_ms / 1000
    given = {"model": model, "pace_seconds": pace_seconds}
    resolved = loaded.model_copy(update={name: value for name, value in given.items() if value is not None})
    if dry_run:
        click.echo(resolved.model_dump_json(indent=2))
        return
    try:
        serve(resolved, host=host, port=port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error


def _run_reward(settings: RewardSettings, *, as_json: bool) -> None:
    from turnwise.rewards import posting

    terminal = sys.stderr.isatty()

    def report(text: str) -> None:
        click.echo(f"\r\x1b[K{text}" if terminal else text, err=True, nl=not terminal)

    counts = asyncio.run(posting.post_rewards(at_running_proxy(settings), report, on_start=_stop_on_signals))
    if terminal:
        click.echo(err=True)
    click.echo(json.dumps(dataclasses.asdict(counts), indent=2) if as_json else counts.line())
    if counts.last_error is not None:
        click.echo(f"turnwise: {counts.num_failed} sessions failed, the last: {counts.last_error}", err=True)
    sys.exit(1 if counts.num_failed else 0)


def _stop_on_signals(poster: Poster) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, poster.stopping.set)


reward = SettingsCommand(
    "reward",
    section="reward",
    run=_run_reward,
    prints_json=True,
    help="Give ended sessions their rewards: from a program, a Python function, rules, or a judging model.",
)
