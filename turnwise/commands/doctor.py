"""`turnwise doctor`: the checks of an installation."""

from __future__ import annotations

import json
import sys

import click

from turnwise.commands.place import database_option, database_url, engine_client_options, engine_urls, json_option


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
    from turnwise.processes.installation import examine

    findings = []
    for finding in examine(engine_urls(engine), database_url(database), **engine_client_options()):
        findings.append({"check": finding.check, "verdict": finding.verdict.value, "text": finding.text})
        if not as_json:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict.value]
            click.echo(f"{click.style(finding.verdict.value.ljust(4), fg=colour)}  {finding.check}: {finding.text}")
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    if any(finding["verdict"] == "fail" for finding in findings):
        sys.exit(1)
