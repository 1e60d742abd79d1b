"""`turnwise import`: conversations of other tools into the store, by which format and which tokenizer."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.place import database_option, database_url
from turnwise.errors import NotFound, SettingsError
from turnwise.exchange import plugins
from turnwise.types import DEFAULT_POLICY_NAME, MAX_REWARD, Json, Split

if TYPE_CHECKING:
    from turnwise.exchange.imports.formats import Format
    from turnwise.exchange.imports.tokenise import Tokeniser
    from turnwise.store.database import Database

CORE_FORMATS = ("openai", "hf")


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--format",
    "format_name",
    required=True,
    metavar="NAME",
    help="What the file holds: openai, hf, or a format of an installed package.",
)
@click.option(
    "--tokenizer",
    metavar="PATH",
    help="Directory or id of the served model [default: that of policy version 0].",
)
@click.option("--engine", metavar="URL", help="Engine whose tokens of a few conversations must be the same.")
@click.option("--template-arguments", metavar="JSON", help="Arguments of the chat template, as chat_template_kwargs.")
@click.option("--tenant", default="default", show_default=True, help="Whose sessions they become.")
@click.option(
    "--policy",
    "policy_name",
    default=DEFAULT_POLICY_NAME,
    show_default=True,
    help="The tenant's policy that learns from them.",
)
@click.option("--split", type=click.Choice(["train", "eval"]), default="train", show_default=True)
@click.option("--reward", type=float, default=1.0, show_default=True, help="Of sessions without one in the file.")
@click.option("--no-reward", is_flag=True, help="Leave sessions without a reward in the file to a judge.")
@click.option("--dry-run", is_flag=True, help="Read and tokenise everything and store nothing.")
@database_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def imports(path: Path, database: str | None, template_arguments: str | None, *, as_json: bool, **given: Any) -> None:
    """Store conversations as sessions for SFT, DPO and judges; exit 1 if a line is bad.

    PATH is a file of JSON Lines, a JSON array, a Parquet file, or a directory of such files. Nothing that is imported
    counts as sampled, so reinforcement learning never trains it. A second import of the same file adds nothing.
    """
    is_shown = sys.stderr.isatty() and not as_json

    def show_progress(report: Any) -> None:
        if is_shown:
            click.echo(f"\r{report.lines} lines, {report.sessions} sessions", nl=False, err=True)

    reward = None if given.pop("no_reward") else given["reward"]
    if reward is not None and not abs(reward) <= MAX_REWARD:
        raise SettingsError(f"--reward {reward!r} is not a number from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    report = _import(
        database_url(database),
        path,
        arguments=_arguments(template_arguments),
        progress=show_progress,
        **given | {"reward": reward},
    )
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print_report(report, is_dry_run=given["dry_run"])
    if report["num_bad"]:
        sys.exit(1)


def _print_report(report: dict[str, Any], *, is_dry_run: bool) -> None:
    for bad in report["bad"]:
        click.echo(f"{click.style('bad line', fg='red')}  {bad['file']}:{bad['line']}: {bad['reason']}", err=True)
    for reason, number in report["skipped"].items():
        click.echo(f"{click.style('skipped', fg='yellow')}  {number}: {reason}", err=True)
    if report["num_unended"]:
        click.echo(
            f"{click.style('warning', fg='yellow')}  {report['num_unended']} replies end without an end token of the "
            "model: the template has another one, so that the text after it is trained and no end is; give the "
            "tokenizer's generation_config.json the template's token in eos_token_id",
            err=True,
        )
    if report["num_without_tools"]:
        click.echo(
            f"{click.style('warning', fg='yellow')}  {report['num_without_tools']} replies follow a prompt without all "
            "results and schemas of their tools: the template leaves some out, so that the model learns to answer "
            "without having seen them; train a model whose template renders tools",
            err=True,
        )
    if report["num_unscored"]:
        click.echo(
            f"{click.style('warning', fg='yellow')}  {report['num_unscored']} sessions have a null as their reward, so "
            "they get none and are not trained; leave the column out where a reply is to be imitated",
            err=True,
        )
    done = "would be stored" if is_dry_run else "stored"
    click.echo(
        f"{report['lines']} lines read: {report['sessions']} sessions with {report['turns']} replies of "
        f"{report['tokens']} tokens {done}, {report['already_there']} sessions there already, "
        f"{report['num_bad']} lines bad"
    )


def _arguments(given: str | None) -> dict[str, Any]:
    try:
        found = {} if given is None else json.loads(given)
    except ValueError as error:
        raise SettingsError(f"--template-arguments {given!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"--template-arguments {given!r} is not a JSON object")
    return found


def _reader(format_name: str) -> Format:
    """Return what reads a format."""
    from turnwise.exchange.imports.formats import FORMATS, plugin_format

    return FORMATS.get(format_name) or plugin_format(plugins.load(plugins.IMPORTS, format_name, CORE_FORMATS))


def _import(
    url: str,
    path: Path,
    *,
    format_name: str,
    tokenizer: str | None,
    engine: str | None,
    arguments: Json,
    tenant: str,
    policy_name: str,
    split: str,
    reward: float | None,
    dry_run: bool,
    progress: Callable[[Any], None],
) -> Json:
    """Store the conversations of a file; return what became of its lines."""
    from turnwise.commands.place import opened
    from turnwise.exchange.imports import writer as imports
    from turnwise.store import policies
    from turnwise.store.database import missing_file

    reader = _reader(format_name)
    with contextlib.ExitStack() as stack:
        if dry_run and missing_file(url) is not None:  # a dry run creates nothing
            url = f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/turnwise.db"
        database = stack.enter_context(opened(url))
        served = _tokeniser(database, tokenizer, arguments)
        if engine is not None:
            from turnwise.exchange.imports.tokenise import use_engines_template

            use_engines_template(served, engine)
        with database.read() as conn:
            policy = policies.find_policy(conn, tenant, policy_name)
        rule = imports.ImportRule(
            format_name=format_name,
            tenant=tenant,
            policy_id=policy.policy_id,
            split=Split(split),
            reward=reward,
            is_dry_run=dry_run,
        )
        report = imports.import_files(database, path, reader, served, rule, progress)
    return report.as_json()


def _tokeniser(database: Database, tokenizer: str | None, arguments: Json) -> Tokeniser:
    from turnwise.exchange.imports.tokenise import Tokeniser
    from turnwise.store import versions

    path = tokenizer
    if path is None:
        with database.read() as conn:
            try:
                path = versions.get_version(conn, 0).path
            except NotFound as error:
                raise SettingsError("no policy is published yet; name the served model by --tokenizer") from error
    try:
        return Tokeniser(path, arguments)
    except (OSError, ValueError) as error:
        raise SettingsError(f"there is no tokenizer at {path!r}: {error}; name the served model's directory") from error
