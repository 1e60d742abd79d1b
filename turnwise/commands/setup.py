"""Commands about an installation: `init`, `doctor`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import click

from turnwise.commands.location import database_option, database_url, engine_urls, json_option
from turnwise.errors import SettingsError
from turnwise.settings import DEFAULT_FILE


@click.command("init")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=DEFAULT_FILE,
    show_default=True,
    help="File to write; - is stdout.",
)
def init(output: Path) -> None:
    """Write an annotated settings file with every setting and its default; never over an existing file."""
    text: str = import_module("turnwise.commands.settings_file").settings_file()
    if str(output) == "-":
        click.echo(text)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise SettingsError(f"{str(output)!r} exists; name another file with --output, or remove it") from error
    except OSError as error:
        raise SettingsError(f"cannot write {str(output)!r}: {error.strerror}; name another file") from error
    click.echo(f"Wrote {output}. Every setting is a comment; remove the comment sign of those that you change.")


@click.command("doctor")
@click.option(
    "--engine",
    multiple=True,
    metavar="URL",
    help="Engine to check [default: those of the running `turnwise up`, or the proxy's].",
)
@database_option
@json_option
def doctor(engine: tuple[str, ...], database: str | None, *, as_json: bool) -> None:
    """Check this installation, the engines and the database; exit 1 if something has to be done."""
    examine = import_module("turnwise.commands.doctor").examine
    findings = []
    for finding in examine(engine_urls(engine), database_url(database)):
        findings.append({"check": finding.check, "verdict": finding.verdict.value, "text": finding.text})
        if not as_json:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict.value]
            click.echo(f"{click.style(finding.verdict.value.ljust(4), fg=colour)}  {finding.check}: {finding.text}")
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    if any(finding["verdict"] == "fail" for finding in findings):
        sys.exit(1)
