"""The commands `engine`, which runs vLLM as capture needs it, and `fake-engine`, its stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.errors import SettingsError

if TYPE_CHECKING:
    from turnwise.processes.engine_command import EngineSettings


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
