"""Commands that read and write the store: `db`, `keys`, `sessions`, `export`, `replay`, `verify`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from turnwise.commands.location import database_option, database_url, json_option
from turnwise.commands.output import print_records, print_stored

BAR_CHARACTERS = 30
"""Length of the progress bar."""


@click.group("db")
def db() -> None:
    """Manage the database."""


@db.command("upgrade")
@click.option(
    "--admin-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Create an admin key where there is no key yet; print it once and write it to this file, for its owner alone.",
)
@database_option
@json_option
def db_upgrade(database: str | None, admin_key_file: Path | None, *, as_json: bool) -> None:
    """Bring the tables to this release; safe to repeat, and to run from several machines at once."""
    operate, url = import_module("turnwise.commands.operate"), database_url(database)
    operate.upgrade(url)
    click.echo(json.dumps({"upgraded": True}) if as_json else "Database is up to date.")
    if admin_key_file is not None and (key := operate.create_first_key(url, admin_key_file)) is not None:
        click.echo(f"First admin key, shown once and kept in {admin_key_file}: {key}")


@db.command("make-password")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--host", default="postgres", show_default=True, help="Host of the database.")
@click.option("--port", type=click.IntRange(1, 65535), default=5432, show_default=True, help="Port of the database.")
@click.option("--name", default="turnwise", show_default=True, help="Name of the database.")
@click.option("--user", default="turnwise", show_default=True, help="User of the database.")
def db_make_password(directory: Path, host: str, port: int, name: str, user: str) -> None:
    """Write a random database password into a directory, for the server and for clients; keep an existing one."""
    files = import_module("turnwise.commands.secrets_files")
    is_new = files.make_database_password(directory, host=host, port=port, database=name, user=user)
    click.echo(f"wrote a new password to {directory}" if is_new else f"{directory} has a password already")


@db.command("backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@database_option
@json_option
def db_backup(file: Path, database: str | None, *, as_json: bool) -> None:
    """Copy an SQLite database to a new file, consistently, while agents and trainer use it."""
    print_records(import_module("turnwise.commands.operate").backup(database_url(database), file), as_json=as_json)


@click.command("prune")
@click.option(
    "--older-than-days", type=click.FloatRange(min=0), required=True, help="Age of the last activity, in days."
)
@database_option
@json_option
def prune(older_than_days: float, database: str | None, *, as_json: bool) -> None:
    """Delete sessions that are over for so long, with their turns and rewards; what waits for training stays."""
    deleted = import_module("turnwise.commands.operate").prune(database_url(database), older_than_days=older_than_days)
    print_records(deleted, as_json=as_json)


@click.command("forget")
@click.option("--tenant", required=True, help="Whose sessions.")
@click.option("--session-id", help="Only this session; by default everything of the tenant, its keys included.")
@database_option
@json_option
def forget(tenant: str, session_id: str | None, database: str | None, *, as_json: bool) -> None:
    """Delete a session or a tenant for good, and name the policy versions that were trained on it."""
    deleted = import_module("turnwise.commands.operate").forget(
        database_url(database), tenant=tenant, session_id=session_id
    )
    print_records(deleted, as_json=as_json)


KEY_COLUMNS = (
    *("key_id", "tenant", "role", "name", "created_at", "last_used_at", "expires_at", "revoked_at"),
    *("token_budget", "tokens_used"),
)


@click.group("keys")
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.option("--role", type=click.Choice(["agent", "trainer", "admin"]), default="agent", show_default=True)
@click.option("--tenant", default="default", show_default=True, help="Tenant whose data the key reaches.")
@click.option("--name", default="", help="What it is for.")
@click.option("--expires-days", type=click.FloatRange(min=0, min_open=True), help="Days that it is accepted for.")
@click.option("--token-budget", type=click.IntRange(min=1), help="Prompt and sampled tokens that its calls may use.")
@database_option
@json_option
def keys_create(
    role: str,
    tenant: str,
    name: str,
    expires_days: float | None,
    token_budget: int | None,
    database: str | None,
    *,
    as_json: bool,
) -> None:
    """Create a key. It is printed once and stored as a hash."""
    made = import_module("turnwise.commands.operate").create_key(
        database_url(database),
        tenant=tenant,
        role=role,
        name=name,
        expires_days=expires_days,
        token_budget=token_budget,
    )
    print_records(made, as_json=as_json)


@keys.command("list")
@click.option("--tenant", help="Only this tenant's.")
@database_option
@json_option
def keys_list(tenant: str | None, database: str | None, *, as_json: bool) -> None:
    """List the keys, revoked ones included."""
    url = database_url(database)
    found = import_module("turnwise.commands.operate").list_keys(url, tenant=tenant)
    print_stored(found, "keys", url, as_json=as_json, columns=KEY_COLUMNS)


@keys.command("revoke")
@click.argument("key_id")
@database_option
@json_option
def keys_revoke(key_id: str, database: str | None, *, as_json: bool) -> None:
    """Revoke a key: it is refused from now on."""
    revoked = import_module("turnwise.commands.operate").revoke_key(database_url(database), key_id)
    print_records(revoked, as_json=as_json, columns=("key_id", "tenant", "role", "name", "revoked_at"))


def _filter_options(command: Any) -> Any:
    """Add the options that filter sessions."""
    for option in (
        click.option("--tenant", help="Only this tenant's."),
        click.option("--task-id", help="Only of this task."),
        click.option("--group-id", help="Only of this group."),
        click.option("--session-id", help="Only this session."),
        click.option("--split", type=click.Choice(["train", "eval"])),
        click.option("--status", type=click.Choice(["open", "ended", "expired"])),
        click.option("--label", help="Only with this label."),
    ):
        command = option(command)
    return command


def _filter_of(given: dict[str, Any]) -> Any:
    """Return the filter of a command's options, and remove them from `given`."""
    filters, records = import_module("turnwise.store.experiences"), import_module("turnwise.types")
    kinds = {"split": records.Split, "status": records.SessionStatus}
    names = ("tenant", "task_id", "group_id", "session_id", "split", "status", "label")
    chosen = {name: given.pop(name) for name in names}
    return filters.SessionFilter(
        **{name: kinds.get(name, str)(value) for name, value in chosen.items() if value is not None}
    )


@click.command("sessions")
@_filter_options
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@database_option
@json_option
def sessions(database: str | None, limit: int, *, as_json: bool, **chosen: Any) -> None:
    """List the newest sessions."""
    operate, url = import_module("turnwise.commands.operate"), database_url(database)
    found = operate.list_sessions(url, _filter_of(chosen), limit=limit)
    columns = ("session_id", "status", "split", "task_id", "run", "num_turns", "num_chains", "reward", "created_at")
    print_stored(found, "matching sessions", url, as_json=as_json, columns=columns)


@click.command("export")
@_filter_options
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["jsonl", "parquet", "hf", "openai", "atif", "replay", "otlp"]),
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
@click.option("--to", metavar="URL", help="otlp: send to this OTLP endpoint, …/v1/traces, instead of writing.")
@click.option("--headers", default="", envvar="OTEL_EXPORTER_OTLP_HEADERS", help="For --to: NAME=VALUE,NAME=VALUE.")
@click.option("--langfuse", metavar="URL", help="otlp: send to this Langfuse server, with rewards as scores.")
@click.option("--langfuse-keys", default="", envvar="LANGFUSE_KEYS", hidden=True, help="PUBLIC_KEY:SECRET_KEY.")
@click.option(
    "--archive",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read the sessions of an archive that `turnwise archive` wrote, instead of the database's.",
)
@database_option
@click.option("--json", "as_json", is_flag=True, help="Print the number of lines or rows as JSON, on stderr.")
def export(database: str | None, output: Path | None, *, as_json: bool, **given: Any) -> None:
    """Write experiences or sessions: JSON Lines, Parquet, a Hugging Face data set, OpenAI's format, ATIF, or calls."""
    exchange = import_module("turnwise.commands.exchange")
    path = None if output is None or str(output) == "-" else output
    wanted = _filter_of(given)
    endpoint = {name: given.pop(name) for name in ("to", "headers", "langfuse", "langfuse_keys")}
    if endpoint["to"] or endpoint["langfuse"]:
        if given["format_name"] != "otlp":
            raise click.UsageError("--to and --langfuse send --format otlp alone")
        count = exchange.send_traces(database_url(database), wanted, archive=given["archive"], **endpoint)
        click.echo(f"{count} sessions sent", err=True)
        return
    count = exchange.export(database_url(database), wanted, output=path, **given)
    if as_json:
        click.echo(json.dumps({"format": given["format_name"], "count": count}), err=True)


@click.command("replay")
@click.argument("recording", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--to", "base_url", required=True, metavar="URL", help="OpenAI-compatible endpoint, with its /v1.")
@click.option("--api-key", default="none", envvar="OPENAI_API_KEY", help="Bearer key [default: $OPENAI_API_KEY].")
@click.option("--speed", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0: without pauses.")
@click.option("--model", help="Model to ask for instead of the recorded one.")
@json_option
def replay(recording: Path, base_url: str, api_key: str, speed: float, model: str | None, *, as_json: bool) -> None:
    """Make recorded calls again, at their own pace or faster; exit 1 if any failed."""
    exchange = import_module("turnwise.commands.exchange")
    report = exchange.replay(recording, base_url, api_key=api_key, speed=speed, model=model)
    print_records(report, as_json=as_json)
    if report["failed"]:
        sys.exit(1)


@click.command("verify")
@_filter_options
@click.option("--engine", metavar="URL", help="Engine that recomputes logprobs [default: logprobs are not checked].")
@click.option("--tolerance", type=click.FloatRange(min=0), default=1e-3, show_default=True, help="In nats.")
@click.option("--share", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Of turns to recompute.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the share.")
@click.option(
    "--version-distance",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Also recompute turns of versions this far from the engine's; needs a larger --tolerance.",
)
@database_option
@json_option
def verify(database: str | None, *, as_json: bool, **given: Any) -> None:
    """Check stored turns, their logprobs and the weights' files; exit 1 and name the place on a mismatch."""
    command = import_module("turnwise.commands.verify")
    is_shown = sys.stderr.isatty() and not as_json

    def show_progress(num_checked: int, num_sessions: int) -> None:
        if is_shown:
            end = "\n" if num_checked == num_sessions else ""
            click.echo(f"\r{progress_bar(num_checked, num_sessions)}{end}", nl=False, err=True)

    wanted = _filter_of(given)
    report = command.verify(database_url(database), wanted, progress=show_progress, **given)
    _print_verification(report.as_json(), as_json=as_json)
    if report.num_mismatches:
        sys.exit(1)


def progress_bar(num_done: int, num_all: int) -> str:
    """Return a bar with the share and the number of checked sessions."""
    share = num_done / num_all
    filled = int(share * BAR_CHARACTERS)
    return f"[{'#' * filled}{'-' * (BAR_CHARACTERS - filled)}] {share:4.0%}  {num_done} of {num_all} sessions"


def _print_verification(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for mismatch in found["mismatches"]:
        click.echo(f"{click.style('mismatch', fg='red')}  {mismatch['place']}: {mismatch['problem']}")
    for what, number in found["checked"].items():
        click.echo(f"{click.style('checked', fg='green')}   {number} {what}")
    for reason, number in found["not_checked"].items():
        click.echo(f"{click.style('left out', fg='yellow')}  {number}: {reason}")
    click.echo(f"{found['num_mismatches']} mismatches")
