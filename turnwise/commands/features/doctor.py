"""The command `turnwise doctor`: it examines an installation, or a model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from turnwise.commands.place import (
    database_option,
    database_url,
    engine_client_options,
    find_running_stack,
    json_option,
    load_section,
)
from turnwise.errors import SettingsError, TurnwiseError
from turnwise.types import PolicyKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnwise.processes.installation import Finding


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


def engine_urls(given: tuple[str, ...]) -> tuple[list[str], list[Finding]]:
    """Return the addresses of the engines to check, and what is wrong with the source that names them."""
    if given:
        return list(given), []
    proxy = load_section("proxy")
    running = find_running_stack()
    if running is not None and not {"engine", "engines"} & proxy.model_fields_set:
        return running.engines, []
    urls: list[str] = proxy.engine  # type: ignore[attr-defined]  # the proxy declares it
    source: str | None = getattr(proxy, "engines", None)
    if source is None:
        return urls, []
    from proxy.features.discovery.sources import reader
    from turnwise.processes.installation import Finding, Severity

    listed = urls if "engine" in proxy.model_fields_set else []
    try:
        return list(dict.fromkeys([*listed, *asyncio.run(reader(source)())])), []
    except SettingsError as error:
        return listed, [Finding("engines", Severity.FAIL, f"{error}; a running proxy keeps the last list that it read")]


def _examine(engine: tuple[str, ...], database: str | None) -> Iterator[Finding]:
    from turnwise.processes.installation import examine, examine_packages

    with contextlib.suppress(ImportError):  # a copy without the store
        import turnwise.features  # noqa: F401  the store calls them from here on
    try:
        urls, problems = engine_urls(engine)
        return itertools.chain(problems, examine(urls, database_url(database), **engine_client_options()))
    except ModuleNotFoundError:
        if engine or database:
            raise
        return examine_packages()  # the settings that name the rest are those of the proxy, which is not installed


def _examine_model(model: str) -> Iterator[Finding]:
    """Yield whether a model can be served and trained here, what an adapter of it changes, and its certificate."""
    from trainer.features import Settings
    from trainer.features.memory import longest_chain
    from turnwise.commands.features.certify.certificate import Certificate
    from turnwise.commands.preflight import check_trained
    from turnwise.processes.engine_command import EngineSettings, check_model_fits, gpu_bytes
    from turnwise.processes.installation import Finding, Severity
    from turnwise.processes.served_model import check_chat_template, check_model_directory

    memory = next(iter(gpu_bytes()), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for kind in PolicyKind:
        engine = EngineSettings(model=model, lora=kind is PolicyKind.LORA)
        try:
            check_model_directory(Path(model))
            check_chat_template(model, ())
            check_model_fits(engine)
            trainer = Settings(model=model, kind=kind)
            notes = check_trained(trainer)
            length = f"{longest_chain(trainer, memory):,} tokens with {memory / 1e9:.1f} GB for the trainer alone"
            notes["longest chain"] = f"about {length}, activations recomputed"
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
