"""The `turnwise` command.

The decision behind it: a command loads what it needs when it runs, so the SDK alone has a command line too, and what
an extra would bring is named when it is missing. An error that we raise on purpose is one sentence on stderr: exit
status 2 for what the caller can change, 1 for the rest.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import SecretStr

from turnwise.commands import run as run_agents
from turnwise.commands.flags import SettingsCommand
from turnwise.errors import ClientError, SettingsError, TurnwiseError
from turnwise.settings import load_settings

if TYPE_CHECKING:
    from turnwise.processes.engine_command import EngineSettings
    from turnwise.processes.stack import UpSettings
    from turnwise.settings import Settings

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
"""The extra that brings a module."""
_COLOURS = {"engine": "magenta", "proxy": "cyan", "trainer": "green", "migrate": "yellow", "model": "blue"}


class _Commands(click.Group):
    """Turns expected errors into a sentence and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ClientError, SettingsError) as error:
            _complain(str(error))
            ctx.exit(2)
        except TurnwiseError as error:
            _complain(str(error))
            ctx.exit(1)
        except ModuleNotFoundError as error:
            extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            _complain(f"this command needs {error.name!r}, which is not installed; pip install 'turnwise[{extra}]'")
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="turnwise")
def main() -> None:
    """Serve a model through a proxy that captures every sampled token, and train it from rewards."""


def _complain(text: str) -> None:
    click.echo(f"turnwise: {text}", err=True)


def _print(value: Any, *, as_json: bool, columns: Iterable[str] = ()) -> None:
    """Print a record or a list of them: as JSON, or as lines of columns."""
    if as_json:
        click.echo(json.dumps(value, indent=2, default=str))
        return
    rows = value if isinstance(value, list) else [value]
    names = list(columns) or list(rows[0] if rows else {})
    cells = [names] + [["" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _say(name: str, text: str) -> None:
    """Print a line about a process of the stack."""
    click.echo(f"{click.style(name.rjust(8), fg=_COLOURS.get(name), bold=True)} │ {text}")


def _run_engine(settings: EngineSettings, extra: tuple[str, ...]) -> None:
    engine = import_module("turnwise.processes.engine_command")
    engine.check_startable(settings)
    engine.build_command(settings, extra).execute()


def _show_engine(settings: EngineSettings, extra: tuple[str, ...]) -> dict[str, Any]:
    command = import_module("turnwise.processes.engine_command").build_command(settings, extra)
    return {"argv": list(command.argv), "environment": command.environment, "shell": command.shell()}


def _run_proxy(settings: Settings) -> None:
    sys.exit(import_module("proxy.main").run(settings))


def _run_trainer(settings: Settings) -> None:
    sys.exit(import_module("trainer.main").run(settings))


def _run_stack(settings: UpSettings) -> None:
    """Run engine, proxy and trainer until a signal or a child that does not stay up ends them."""
    stack, supervisor = import_module("turnwise.processes.stack"), import_module("turnwise.processes.supervisor")
    stop = threading.Event()
    # A term signal interrupts the start as well, as ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        model = settings.model or stack.demo_model(settings.runs_dir / "model", _say)
        children = stack.children(settings, model)
        with supervisor.Supervisor(children, log_directory=settings.runs_dir / "logs", say=_say) as running:
            _say("proxy", f"serving {model} on http://{settings.host}:{settings.port}/v1; ctrl-C stops everything")
            running.wait(stop)
    except KeyboardInterrupt:
        _say("up", "everything is stopped")


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _show_stack(settings: UpSettings) -> dict[str, Any]:
    stack = import_module("turnwise.processes.stack")
    children = stack.children(settings, settings.model or str(settings.runs_dir / "model"))
    return {"commands": {child.name: list(child.argv) for child in children}}


main.add_command(
    SettingsCommand(
        "up",
        model="turnwise.processes.stack:UpSettings",
        section="up",
        run=_run_stack,
        show=_show_stack,
        help="Run engine, proxy and trainer on this machine, with SQLite; ctrl-C stops all.",
    )
)
main.add_command(
    SettingsCommand(
        "proxy",
        model="proxy.settings:ProxySettings",
        section="proxy",
        run=_run_proxy,
        help="Run the proxy: the API for agents, sessions, rewards and policies.",
    )
)
main.add_command(
    SettingsCommand(
        "train",
        model="trainer.settings:TrainerSettings",
        section="trainer",
        run=_run_trainer,
        help="Run the trainer: claim experiences, update the weights, publish versions.",
    )
)
main.add_command(
    SettingsCommand(
        "engine",
        model="turnwise.processes.engine_command:EngineSettings",
        section="engine",
        run=_run_engine,
        show=_show_engine,
        takes_extra="[-- VLLM FLAGS…]",
        help="Become a vLLM server with the flags that capture and reload need. Arguments after -- go to vLLM.",
    )
)
main.add_command(run_agents.command)


@main.command("fake-engine")
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="Port to listen on.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--model", help="Name of the model it serves [default: the script's, else fake].")
@click.option(
    "--pace-ms", type=click.FloatRange(min=0), help="Delay before each token [default: the script's, else 0]."
)
@click.option("--script", type=click.Path(path_type=Path), help="JSON file with replies, tool calls and faults.")
@click.option(
    "--canned-tokens", type=click.IntRange(min=1), help="One precomputed reply of so many tokens, for benches."
)
@click.option("--dry-run", is_flag=True, help="Print the resolved script and do nothing.")
def fake_engine(
    port: int,
    host: str,
    model: str | None,
    pace_ms: float | None,
    script: Path | None,
    canned_tokens: int | None,
    *,
    dry_run: bool,
) -> None:
    """Stand in for vLLM: the same wire format, scripted replies, faults on demand. For tests and CI."""
    fake = import_module("turnwise.fake_engine")
    loaded = fake.Script.load(script) if script else fake.Script()
    pace_seconds = None if pace_ms is None else pace_ms / 1000
    given = {"model": model, "pace_seconds": pace_seconds, "canned_tokens": canned_tokens}
    resolved = loaded.model_copy(update={name: value for name, value in given.items() if value is not None})
    if dry_run:
        click.echo(resolved.model_dump_json(indent=2))
        return
    try:
        fake.serve(resolved, host=host, port=port)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error


def _database_url(given: str | None, config: Path | None = None) -> str:
    """Return the database of a command: its flag, else what the proxy would use."""
    if given is not None:
        return given
    settings = import_module("proxy.settings").ProxySettings
    database: SecretStr = load_settings(settings, config=config, section="proxy", overrides={}).database
    return database.get_secret_value()


_database_option = click.option("--database", metavar="URL", help="SQLAlchemy URL [default: the proxy's].")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@main.group("db")
def db() -> None:
    """Look after the database."""


@db.command("upgrade")
@_database_option
@_json_option
def db_upgrade(database: str | None, *, as_json: bool) -> None:
    """Bring the tables to this release; safe to repeat, and to run from several machines at once."""
    import_module("turnwise.commands.operate").upgrade(_database_url(database))
    click.echo(json.dumps({"upgraded": True}) if as_json else "the tables are those of this release")


@main.group("keys")
def keys() -> None:
    """Make, list and revoke API keys."""


@keys.command("create")
@click.option("--role", type=click.Choice(["agent", "trainer", "admin"]), default="agent", show_default=True)
@click.option("--tenant", default="default", show_default=True, help="Whose data the key reaches.")
@click.option("--name", default="", help="What it is for.")
@_database_option
@_json_option
def keys_create(role: str, tenant: str, name: str, database: str | None, *, as_json: bool) -> None:
    """Make a key. It is printed this once and stored as a hash."""
    made = import_module("turnwise.commands.operate").create_key(
        _database_url(database), tenant=tenant, role=role, name=name
    )
    _print(made, as_json=as_json)


@keys.command("list")
@click.option("--tenant", help="Only this tenant's.")
@_database_option
@_json_option
def keys_list(tenant: str | None, database: str | None, *, as_json: bool) -> None:
    """List the keys, revoked ones included."""
    found = import_module("turnwise.commands.operate").list_keys(_database_url(database), tenant=tenant)
    _print(found, as_json=as_json, columns=("key_id", "tenant", "role", "name", "created_at", "revoked_at"))


@keys.command("revoke")
@click.argument("key_id")
@_database_option
@_json_option
def keys_revoke(key_id: str, database: str | None, *, as_json: bool) -> None:
    """Make a key useless from now on."""
    revoked = import_module("turnwise.commands.operate").revoke_key(_database_url(database), key_id)
    _print(revoked, as_json=as_json, columns=("key_id", "tenant", "role", "name", "revoked_at"))


def _filter_options(command: Any) -> Any:
    """Add the options that narrow sessions."""
    for option in (
        click.option("--tenant", help="Only this tenant's."),
        click.option("--task-id", help="Only of this task."),
        click.option("--group-id", help="Only of this group."),
        click.option("--session-id", help="Only this session."),
        click.option("--split", type=click.Choice(["train", "eval"])),
        click.option("--status", type=click.Choice(["open", "ended", "expired"])),
    ):
        command = option(command)
    return command


def _filter_of(given: dict[str, Any]) -> Any:
    """Take the options that narrow sessions out of a command's."""
    filters, records = import_module("turnwise.store.experiences"), import_module("turnwise.types")
    kinds = {"split": records.Split, "status": records.SessionStatus}
    names = ("tenant", "task_id", "group_id", "session_id", "split", "status")
    narrowed = {name: given.pop(name) for name in names}
    return filters.SessionFilter(
        **{name: kinds.get(name, str)(value) for name, value in narrowed.items() if value is not None}
    )


@main.command("sessions")
@_filter_options
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@_database_option
@_json_option
def sessions(database: str | None, limit: int, *, as_json: bool, **narrowed: Any) -> None:
    """List the newest sessions."""
    operate = import_module("turnwise.commands.operate")
    found = operate.list_sessions(_database_url(database), _filter_of(narrowed), limit=limit)
    columns = ("session_id", "status", "split", "task_id", "run", "num_turns", "num_chains", "reward", "created_at")
    _print(found, as_json=as_json, columns=columns)


@main.command("export")
@_filter_options
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["jsonl", "parquet", "hf", "openai", "atif", "replay"]),
    default="jsonl",
    show_default=True,
    help="jsonl, parquet and hf are experiences, as a trainer sees them; the others are whole sessions.",
)
@click.option("--merge", type=click.Choice(["turn", "chain"]), default="chain", show_default=True)
@click.option("--credit", type=click.Choice(["step_wise", "propagate"]), help="Another credit policy, as a dry run.")
@click.option("--gamma", type=float, help="Another discount, as a dry run.")
@click.option("--reward-bonus-coeff", type=float, default=0.0, show_default=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File to write; for hf, a directory [default: stdout].",
)
@_database_option
@click.option("--json", "as_json", is_flag=True, help="Print the number of lines or rows as JSON, on stderr.")
def export(database: str | None, output: Path | None, *, as_json: bool, **given: Any) -> None:
    """Write experiences or sessions: JSON Lines, Parquet, a Hugging Face data set, OpenAI's format, ATIF, or calls."""
    exchange = import_module("turnwise.commands.exchange")
    path = None if output is None or str(output) == "-" else output
    wanted = _filter_of(given)
    count = exchange.export(_database_url(database), wanted, output=path, **given)
    if as_json:
        click.echo(json.dumps({"format": given["format_name"], "count": count}), err=True)


@main.command("replay")
@click.argument("recording", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--to", "base_url", required=True, metavar="URL", help="OpenAI-compatible endpoint, with its /v1.")
@click.option("--api-key", default="none", envvar="OPENAI_API_KEY", help="Bearer key [default: $OPENAI_API_KEY].")
@click.option("--speed", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0: without pauses.")
@click.option("--model", help="Model to ask for instead of the recorded one.")
@_json_option
def replay(recording: Path, base_url: str, api_key: str, speed: float, model: str | None, *, as_json: bool) -> None:
    """Make recorded calls again, at their own pace or faster; exit 1 if any failed."""
    exchange = import_module("turnwise.commands.exchange")
    report = exchange.replay(recording, base_url, api_key=api_key, speed=speed, model=model)
    _print(report, as_json=as_json)
    if report["failed"]:
        sys.exit(1)


@main.command("doctor")
@click.option("--engine", multiple=True, metavar="URL", help="Engine to look at [default: the proxy's].")
@_database_option
@_json_option
def doctor(engine: tuple[str, ...], database: str | None, *, as_json: bool) -> None:
    """Look over this installation, the engine and the database; exit 1 if something has to be done."""
    examine = import_module("turnwise.commands.doctor").examine
    urls = list(engine)
    if not urls:
        settings = import_module("proxy.settings").ProxySettings
        urls = list(load_settings(settings, config=None, section="proxy", overrides={}).engine)
    findings = []
    for finding in examine(urls, _database_url(database)):
        findings.append({"check": finding.check, "verdict": finding.verdict.value, "text": finding.text})
        if not as_json:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict.value]
            click.echo(f"{click.style(finding.verdict.value.ljust(4), fg=colour)}  {finding.check}: {finding.text}")
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    if any(finding["verdict"] == "fail" for finding in findings):
        sys.exit(1)


if __name__ == "__main__":
    main()
