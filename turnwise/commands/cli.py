"""The `turnwise` command.

A command loads what it needs when it runs, so the SDK alone has a command line too, and a missing package is reported
with the extra that installs it. An expected error is one sentence on stderr. The exit status is 2 for errors that last
until somebody changes settings, files or packages, and 1 for the rest.
"""

from __future__ import annotations

import errno
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from turnwise.commands import reward as reward_sessions
from turnwise.commands import run as run_agents
from turnwise.commands import start
from turnwise.commands.archive import archive
from turnwise.commands.flags import SettingsCommand
from turnwise.commands.importing import command as import_conversations
from turnwise.commands.output import print_error
from turnwise.commands.records import db, export, forget, keys, prune, replay, sessions, verify
from turnwise.commands.setup import doctor, init
from turnwise.commands.versions import policies, updates
from turnwise.errors import BadCheckpoint, ClientError, SchemaMismatch, SettingsError, TurnwiseError

_EXTRA_OF = {
    "sqlalchemy": "store",
    "alembic": "store",
    "psycopg": "store",
    "fastapi": "proxy",
    "starlette": "proxy",
    "uvicorn": "proxy",
    "httptools": "proxy",
    "orjson": "proxy",
    "jinja2": "proxy",
    "prometheus_client": "proxy",
    "torch": "trainer",
    "transformers": "trainer",
    "safetensors": "trainer",
    "tokenizers": "trainer",
    "peft": "trainer",
    "pyarrow": "export",
}
"""The extra that installs a module."""
_PERMANENT = (ClientError, SettingsError, SchemaMismatch, BadCheckpoint)
"""Errors that come back until somebody changes something: exit status 2. `turnwise up` does not retry them."""
_OPERATORS_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR}
)
"""Errors of files that an operator repairs: a full disk, a read-only or wrong place."""


class _Commands(click.Group):
    """Turns expected errors into a sentence and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TurnwiseError as error:
            print_error(str(error))
            ctx.exit(2 if isinstance(error, _PERMANENT) else 1)
        except OSError as error:
            if error.errno not in _OPERATORS_ERRORS:
                raise
            name = f" {str(error.filename)!r}" if error.filename is not None else ""
            print_error(f"cannot read or write{name}: {error.strerror}; free the disk, or name another place")
            ctx.exit(1)
        except ModuleNotFoundError as error:
            extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            print_error(f"this command needs {error.name!r}, which is not installed; pip install 'turnwise[{extra}]'")
            ctx.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="turnwise")
def main() -> None:
    """Serve a model through a proxy that captures every sampled token, and train it from rewards."""


main.add_command(
    SettingsCommand(
        "up",
        model="turnwise.processes.stack:UpSettings",
        section="up",
        run=start.run_stack,
        show=start.show_stack,
        takes_config=True,
        help="Run engine, proxy and trainer on this machine, with SQLite; ctrl-C stops all.",
    )
)
main.add_command(
    SettingsCommand(
        "proxy",
        model="proxy.settings:ProxySettings",
        section="proxy",
        run=start.run_proxy,
        help="Run the proxy: the API for agents, sessions, rewards and policies.",
    )
)
main.add_command(
    SettingsCommand(
        "train",
        model="trainer.settings:TrainerSettings",
        section="trainer",
        run=start.run_trainer,
        help="Run the trainer: claim experiences, update the weights, publish versions.",
    )
)
main.add_command(
    SettingsCommand(
        "engine",
        model="turnwise.processes.engine_command:EngineSettings",
        section="engine",
        run=start.run_engine,
        show=start.show_engine,
        takes_extra="[-- VLLM FLAGS…]",
        help="Run vLLM with the flags that capture and reload need. Arguments after -- go to vLLM.",
    )
)
main.add_command(run_agents.command)
main.add_command(reward_sessions.command)


@main.command("fake-engine")
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
    fake = import_module("turnwise.fake_engine")
    loaded = fake.Script.load(script) if script else fake.Script()
    pace_seconds = None if pace_ms is None else pace_ms / 1000
    given = {"model": model, "pace_seconds": pace_seconds}
    resolved = loaded.model_copy(update={name: value for name, value in given.items() if value is not None})
    if dry_run:
        click.echo(resolved.model_dump_json(indent=2))
        return
    try:
        fake.serve(resolved, host=host, port=port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error


_STORE_COMMANDS = (
    db,
    keys,
    sessions,
    prune,
    archive,
    forget,
    policies,
    updates,
    export,
    import_conversations,
    replay,
    verify,
)
for _command in (init, doctor, *_STORE_COMMANDS):
    main.add_command(_command)


if __name__ == "__main__":
    main()
