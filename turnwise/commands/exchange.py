"""What `turnwise export` and `turnwise replay` do: a format's lines to a file, and recorded calls to an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TextIO

from turnwise.commands.operate import experience_json, opened
from turnwise.errors import InvalidRequest
from turnwise.store.experiences import SessionFilter, experiences
from turnwise.store.session_records import SessionRecord, session_records
from turnwise.types import Credit, Experience, Json

SESSION_FORMATS = {"openai": "openai_chat", "atif": "atif", "replay": "recorded_calls"}
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
) -> int:
    """Write what a filter selects; return the number of lines or rows.

    Raises:
        InvalidRequest: a format that is not text needs an output path.
    """
    with opened(url) as database, database.read() as conn:
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
