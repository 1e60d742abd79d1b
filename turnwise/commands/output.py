"""How commands print: tables, JSON, errors, and lines about the processes of `turnwise up`."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Iterable
from typing import Any

import click
from pydantic import SecretStr

from turnwise.errors import SettingsError
from turnwise.settings import describe_secret

_COLOURS = {"engine": "magenta", "proxy": "cyan", "trainer": "green", "model": "blue", "up": "yellow"}


def print_error(text: str) -> None:
    for handler in logging.root.handlers:
        handler.flush()
    click.echo(f"turnwise: {text}", err=True)


def confirm(question: str, refusal: str) -> None:
    """Ask on the terminal.

    Raises:
        SettingsError: the answer is not yes, with the refusal.
    """
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as error:
        raise SettingsError(refusal) from error


def print_records(value: Any, *, as_json: bool, columns: Iterable[str] = ()) -> None:
    """Print a record or a list of them: as JSON, or as lines of columns."""
    if as_json:
        click.echo(json.dumps(value, indent=2, default=str))
        return
    rows = value if isinstance(value, list) else [value]
    names = list(columns) or list(rows[0] if rows else {})
    if columns and any(row.get("cost") for row in rows):
        names.append("cost")
    cells = [names] + [[_cell(name, row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return " + ".join(f"{amount} {currency}" for currency, amount in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    if name.endswith("_at") and isinstance(value, str):
        return dt.datetime.fromisoformat(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return str(value)


def print_stored(found: list[Any], noun: str, url: str, *, as_json: bool, columns: Iterable[str]) -> None:
    """Print what a database contains; on stderr name the database if it contains nothing, because it may be another."""
    print_records(found, as_json=as_json, columns=columns)
    if not found and not as_json:
        click.echo(f"no {noun} in {describe_secret(SecretStr(url))}", err=True)


def print_process_line(name: str, text: str) -> None:
    colour = _COLOURS.get(name.partition("-")[0])
    click.echo(f"{click.style(name.rjust(8), fg=colour, bold=True)} │ {text}")
