"""The command `turnwise verify`: what it is run on, and how findings are printed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.features.session_filter import api_filters, filter_of, filter_options, sessions_of
from turnwise.commands.place import DataPlace, engine_client_options, json_option, opened, takes_place
from turnwise.types import Json

if TYPE_CHECKING:
    from turnwise.client import Client
    from turnwise.features.verify.records import Verification
    from turnwise.store.selection import SessionFilter

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
    from turnwise.features.verify import records as checks
    from turnwise.features.verify.logprobs import LogprobChecker

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
    from turnwise.commands.features.verify.remote import ServedLogprobs, verify_served

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
