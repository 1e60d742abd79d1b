"""`turnwise verify` and `turnwise doctor`: what each is run on, and how findings are printed."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.place import (
    DataPlace,
    api_filters,
    database_option,
    database_url,
    engine_client_options,
    engine_urls,
    filter_of,
    filter_options,
    json_option,
    opened,
    sessions_of,
    takes_place,
)
from turnwise.errors import TurnwiseError
from turnwise.types import Json, PolicyKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnwise.client import Client
    from turnwise.processes.installation import Finding
    from turnwise.store.selection import SessionFilter
    from turnwise.verify.records import Verification

BAR_CHARACTERS = 30


@click.command("verify")
@filter_options
@click.option("--engine", metavar="URL", help="Engine that recomputes logprobs [default: logprobs are not checked].")
@click.option(
    "--forward",
    "is_forward",
    is_flag=True,
    help="Recompute logprobs from the published files, with transformers on the CPU.",
)
@click.option("--served", "is_served", is_flag=True, help="Over HTTP: recompute logprobs with the served version.")
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
@takes_place
@json_option
def verify(
    place: DataPlace,
    *,
    engine: str | None,
    is_forward: bool,
    is_served: bool,
    tolerance: float,
    version_distance: int,
    share: float,
    seed: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Check stored turns, their logprobs and the weights' files; exit 1 and name the place on a mismatch."""
    if engine is not None and is_forward:
        raise click.UsageError("--engine and --forward recompute the same logprobs; give one of them")
    is_shown = sys.stderr.isatty() and not as_json

    def show_progress(num_checked: int, num_sessions: int) -> None:
        if is_shown:
            end = "\n" if num_checked == num_sessions else ""
            click.echo(f"\r{progress_bar(num_checked, num_sessions)}{end}", nl=False, err=True)

    rule: Json = {"tolerance": tolerance, "version_distance": version_distance}
    drawn: Json = {"share": share, "seed": seed, "progress": show_progress}
    with place.client() as client:
        if client is None:
            if is_served:
                raise click.UsageError("--served needs --url; with the database give --engine")
            report = _verify_database(place.database_url, filter_of(given), engine, rule, drawn, is_forward=is_forward)
        else:
            if engine is not None or is_forward:
                raise click.UsageError("--engine and --forward need the database; over HTTP give --served")
            report = _verify_served(client, api_filters(given), rule if is_served else None, drawn)
    _print_verification(report.as_json(), as_json=as_json)
    if report.num_mismatches:
        sys.exit(1)


def _verify_database(
    url: str, wanted: SessionFilter, engine: str | None, rule: Json, drawn: Json, *, is_forward: bool
) -> Verification:
    from turnwise.verify import records as checks
    from turnwise.verify.logprobs import LogprobChecker

    with opened(url, creates=False) as store:
        checker: checks.Checker | None = None
        if engine is not None:
            checker = LogprobChecker(engine, **rule, **engine_client_options())
        elif is_forward:
            from trainer.forward import ForwardChecker

            versions = {policy.version: policy for policy in checks.all_policies(store)}
            checker = ForwardChecker(versions, tolerance=rule["tolerance"])
        report = checks.verify(store, wanted, checker=checker, **drawn)
        if is_forward:
            from trainer.forward import name_stale_parts

            name_stale_parts(versions, report)
    return report


def _verify_served(client: Client, filters: Json, rule: Json | None, drawn: Json) -> Verification:
    from turnwise.verify.remote import ServedLogprobs, verify_served

    checker = None if rule is None else ServedLogprobs(client, **rule)
    return verify_served(client, list(sessions_of(client, filters)), checker=checker, **drawn)


def progress_bar(num_done: int, num_all: int) -> str:
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


@click.command("doctor")
@click.option(
    "--engine",
    multiple=True,
    metavar="URL",
    help="Engine to check [default: those of the running `turnwise up`, or the proxy's].",
)
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Directory of a model to serve and train.")
@database_option
@json_option
def doctor(engine: tuple[str, ...], model: str | None, database: str | None, *, as_json: bool) -> None:
    """Check this installation, the engines and the database, or a model; exit 1 if something has to be done."""
    findings = []
    for finding in _examine(engine, database) if model is None else _examine_model(model):
        findings.append({"check": finding.check, "verdict": finding.verdict.value, "text": finding.text})
        if not as_json:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.verdict.value]
            click.echo(f"{click.style(finding.verdict.value.ljust(4), fg=colour)}  {finding.check}: {finding.text}")
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    if any(finding["verdict"] == "fail" for finding in findings):
        sys.exit(1)


def _examine(engine: tuple[str, ...], database: str | None) -> Iterator[Finding]:
    from turnwise.processes.installation import examine, examine_packages

    with contextlib.suppress(ImportError):  # a copy without the store
        import turnwise.features  # noqa: F401  the store calls them from here on
    try:
        return examine(engine_urls(engine), database_url(database), **engine_client_options())
    except ModuleNotFoundError:
        if engine or database:
            raise
        return examine_packages()  # the settings that name the rest are those of the proxy, which is not installed


def _examine_model(model: str) -> Iterator[Finding]:
    """Yield whether a model can be served and trained here, what an adapter of it changes, and its certificate."""
    from trainer.features import Settings
    from turnwise.commands.preflight import check_trained
    from turnwise.processes.engine_command import EngineSettings, check_model_fits
    from turnwise.processes.installation import Finding, Severity
    from turnwise.processes.served_model import check_chat_template, check_model_directory
    from turnwise.verify.certificate import Certificate

    for kind in PolicyKind:
        engine = EngineSettings(model=model, lora=kind is PolicyKind.LORA)
        try:
            check_model_directory(Path(model))
            check_chat_template(model, ())
            check_model_fits(engine)
            notes = check_trained(Settings(model=model, kind=kind))
            text = "; ".join(f"{name}: {note}" for name, note in notes.items())
            yield Finding(f"model, kind {kind}", Severity.OK, text)
        except TurnwiseError as error:
            yield Finding(f"model, kind {kind}", Severity.FAIL, str(error))
    certificate, changed = Certificate.valid(model)
    if changed:
        text = f"was made with another {', '.join(changed)}, and says nothing any more; run `turnwise certify` again"
        yield Finding("certificate", Severity.WARN, text)
        return
    rows = ["none; `turnwise certify` makes one"] if certificate is None else certificate.rows()
    yield from (Finding("certificate", Severity.OK, row) for row in rows)
