"""What `turnwise export`, `turnwise import` and `turnwise replay` do with a store, a file and an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TextIO

from turnwise.commands.operate import experience_json, opened
from turnwise.errors import InvalidRequest, NotFound, SettingsError
from turnwise.experience import Experience
from turnwise.store import policies
from turnwise.store.database import Database
from turnwise.store.experiences import SessionFilter, experiences
from turnwise.store.session_records import SessionRecord, session_records
from turnwise.types import Credit, Json, Split

SESSION_FORMATS = {"openai": "openai_chat", "atif": "atif", "replay": "recorded_calls", "otlp": "otlp"}
"""Formats of whole sessions, by the module of `turnwise.exchange` that makes their lines."""
TABLES = {"parquet": "write_parquet", "hf": "write_dataset"}
"""Formats of experiences as columns, by the function of `turnwise.exchange.experience_table` that writes them."""


def export(
    url: str,
    wanted: SessionFilter,
    *,
    format_name: str,
    output: Path | None,
    merge: Literal["turn", "chain"],
    credit: str | None,
    gamma: float | None,
    reward_bonus_coeff: float,
    archive: Path | None = None,
) -> int:
    """Write what a filter selects; return the number of lines or rows.

    Raises:
        InvalidRequest: a format that is not text needs an output path, or `archive` is no archive.
    """
    with _opened_source(url, archive) as database, database.read() as conn:
        if format_name in SESSION_FORMATS:
            make_lines: Callable[[SessionRecord], Iterator[Json]]
            make_lines = import_module(f"turnwise.exchange.{SESSION_FORMATS[format_name]}").lines
            return _write_lines(
                (line for record in session_records(conn, wanted) for line in make_lines(record)), output
            )
        policy = None if credit is None else Credit(credit)
        sequences = experiences(
            conn, wanted, merge=merge, credit=policy, gamma=gamma, reward_bonus_coeff=reward_bonus_coeff
        )
        if format_name in TABLES:
            return _write_table(sequences, format_name, output)
        return _write_lines(map(experience_json, sequences), output)


def send_traces(
    url: str,
    wanted: SessionFilter,
    *,
    to: str | None,
    headers: str,
    langfuse: str | None,
    langfuse_keys: str,
    archive: Path | None = None,
) -> int:
    """Send the sessions that a filter selects as traces; return how many.

    Raises:
        SettingsError: there is not exactly one endpoint, or Langfuse's keys are missing.
        ExportFailed: the endpoint does not take them.
    """
    endpoints = import_module("turnwise.exchange.trace_endpoint")
    if (to is None) == (langfuse is None):
        raise SettingsError("name one endpoint: --to for OTLP, or --langfuse")
    if langfuse is not None:
        if ":" not in langfuse_keys:
            raise SettingsError("--langfuse needs LANGFUSE_KEYS in the environment: PUBLIC_KEY:SECRET_KEY")
        endpoint = endpoints.langfuse(langfuse, langfuse_keys)
    else:
        pairs = [pair.partition("=") for pair in headers.split(",") if pair]
        endpoint = endpoints.TraceEndpoint(
            traces_url=to, headers={name.strip(): value.strip() for name, _, value in pairs}
        )
    with _opened_source(url, archive) as database, database.read() as conn:
        count: int = endpoints.send(session_records(conn, wanted), endpoint)
    return count


def _opened_source(url: str, archive: Path | None) -> contextlib.AbstractContextManager[Database]:
    return opened(url) if archive is None else _opened_archive(archive)


@contextlib.contextmanager
def _opened_archive(directory: Path) -> Iterator[Database]:
    """Open a temporary database with the sessions of an archive."""
    with tempfile.TemporaryDirectory(prefix="turnwise-archive-") as temporary:
        database = Database(f"sqlite:///{temporary}/archive.db")
        try:
            database.upgrade()
            import_module("turnwise.exchange.archive").restore(database, directory)
            yield database
        finally:
            database.close()


def replay(file: Path, base_url: str, *, api_key: str, speed: float, model: str | None) -> Json:
    """Make the calls of a recording again; return what became of them.

    Raises:
        InvalidRequest: the file is not a recording.
    """
    calls = [_recorded(line, number, file) for number, line in enumerate(file.read_text().splitlines(), 1) if line]
    play = import_module("turnwise.exchange.replay").replay
    report = asyncio.run(play(calls, base_url.rstrip("/"), api_key=api_key, speed=speed, model=model))
    figures: Json = report.as_json()
    return figures


def _recorded(line: str, number: int, file: Path) -> Json:
    try:
        call: Json = json.loads(line)
        if {"turn_id", "parent_turn_id", "started_at", "body"} <= call.keys():
            return call
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(f"line {number} of {str(file)!r} is not a JSON object: {error}") from error
    raise InvalidRequest(
        f"line {number} of {str(file)!r} is not a recorded call; write the file by `turnwise export --format replay`"
    )


def _write_table(found: Iterable[Experience], format_name: str, output: Path | None) -> int:
    if output is None:
        kind = "directory" if format_name == "hf" else "file"
        raise InvalidRequest(f"--format {format_name} is not text; name the {kind} to write by --output")
    table: Any = import_module("turnwise.exchange.experience_table")
    count: int = getattr(table, TABLES[format_name])(found, output)
    return count


def _write_lines(lines: Iterable[Json], output: Path | None) -> int:
    count = 0
    with _opened_output(output) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count


@contextlib.contextmanager
def _opened_output(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8") as file:
        yield file


def import_conversations(
    url: str,
    path: Path,
    *,
    module: str,
    format_name: str,
    tokenizer: str | None,
    engine: str | None,
    arguments: Json,
    tenant: str,
    split: str,
    reward: float | None,
    dry_run: bool,
    progress: Callable[[Any], None],
) -> Json:
    """Store the conversations of a file; return what became of its lines.

    Raises:
        InvalidRequest: the file is not of a known kind.
        SettingsError: there is no tokenizer.
        EngineUnsuitable: the engine tokenises differently.
    """
    imports = import_module("turnwise.exchange.imports.writer")
    with opened(url) as database:
        served = _tokeniser(database, tokenizer, arguments)
        if engine is not None:
            import_module("turnwise.exchange.imports.served_template").use_engines_template(served, engine)
        rule = imports.ImportRule(
            format_name=format_name, tenant=tenant, split=Split(split), reward=reward, is_dry_run=dry_run
        )
        reader = import_module(f"turnwise.exchange.imports.{module}")
        report = imports.import_files(database, path, reader, served, rule, progress)
    counts: Json = report.as_json()
    return counts


def _tokeniser(database: Database, tokenizer: str | None, arguments: Json) -> Any:
    """Load the tokenizer that is named, or that of version 0 of the policies."""
    path = tokenizer
    if path is None:
        with database.read() as conn:
            try:
                path = policies.get_policy(conn, 0).path
            except NotFound as error:
                raise SettingsError("no policy is published yet; name the served model by --tokenizer") from error
    try:
        return import_module("turnwise.exchange.imports.tokenise").Tokeniser(path, arguments)
    except (OSError, ValueError) as error:
        raise SettingsError(f"there is no tokenizer at {path!r}: {error}; name the served model's directory") from error
