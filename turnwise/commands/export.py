"""`turnwise export`: experiences as a trainer sees them, or whole sessions in a format of another program."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import click

from turnwise.client import wire
from turnwise.client.conversations import with_images
from turnwise.commands.features.session_filter import api_filters, filter_of, filter_options, sessions_of
from turnwise.commands.place import DataPlace, takes_place
from turnwise.errors import InvalidRequest
from turnwise.exchange import plugins, training_formats
from turnwise.files import create_private
from turnwise.types import Credit, Json, SessionStatus, values_of

if TYPE_CHECKING:
    from turnwise.chains import Experience
    from turnwise.client import Client
    from turnwise.store.database import Connection
    from turnwise.store.selection import SessionFilter

EXPERIENCE_FORMATS = ("jsonl", "axolotl", "parquet", "hf")
CORE_FORMATS = (*EXPERIENCE_FORMATS, "sessions", "openai", "trl", "trl-pairs")
LineMaker = Callable[[Iterable[Json]], Iterable[Json]]


@click.command("export")
@filter_options
@click.option(
    "--format",
    "format_name",
    default="jsonl",
    show_default=True,
    metavar="NAME",
    help="jsonl, axolotl, parquet and hf are experiences, as a trainer sees them; sessions, openai, trl, trl-pairs "
    "and those of installed packages are whole sessions. `list` prints all names.",
)
@click.option("--denied", is_flag=True, help="Only sessions that are marked train = false, which are left out else.")
@click.option("--min-reward", type=float, help="Only sessions with at least this reward; of a pair, the chosen one.")
@click.option(
    "--all",
    "has_all",
    is_flag=True,
    help="Also sessions that are open, have no reward, or no turn. --session-id and --status write such ones too.",
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
@takes_place
@click.option("--json", "as_json", is_flag=True, help="Print the number of lines or rows as JSON, on stderr.")
def export(
    place: DataPlace,
    output: Path | None,
    format_name: str,
    *,
    min_reward: float | None,
    has_all: bool,
    denied: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Write experiences or sessions: JSON Lines, Parquet, a Hugging Face data set, or a format of another trainer."""
    if format_name == "list":
        click.echo("\n".join([*CORE_FORMATS, *sorted(plugins.installed(plugins.EXPORTS))]))
        return
    path = None if output is None or str(output) == "-" else output
    lines = None if format_name in EXPERIENCE_FORMATS else _line_maker(format_name, min_reward)
    if lines is not None and not has_all and given["session_id"] is None and given["status"] is None:
        lines = _of_finished(lines)
    with place.client() as client:
        if client is not None:
            given["train"] = not denied
            count = _write_lines(_remote_lines(client, format_name, lines, min_reward, given), path)
        else:
            wanted = dataclasses.replace(filter_of(given), train=not denied)
            count = _write_stored(place, format_name, lines, path, wanted, given | {"min_reward": min_reward})
    if as_json:
        click.echo(json.dumps({"format": format_name, "count": count}), err=True)
    elif path is not None:
        click.echo(f"wrote {count} {'line' if count == 1 else 'lines'} of {format_name} to {path}", err=True)


def _remote_lines(
    client: Client, format_name: str, lines: LineMaker | None, min_reward: float | None, given: dict[str, Any]
) -> Iterator[Json]:
    filters = {"train": given.pop("train"), **api_filters(given)}
    if format_name not in ("jsonl", "axolotl") and lines is None:
        raise InvalidRequest(f"--format {format_name} needs the database; over HTTP export a text format")
    if lines is not None:
        yield from lines(session_document(client, session) for session in sessions_of(client, filters))
        return
    found = client.experiences(**filters, **{name: value for name, value in given.items() if value is not None})
    rewarded = (each for each in found if _is_at_least(each["session_reward"], min_reward))
    yield from rewarded if format_name == "jsonl" else map(training_formats.axolotl_line, rewarded)


def _write_stored(
    place: DataPlace,
    format_name: str,
    lines: LineMaker | None,
    output: Path | None,
    wanted: SessionFilter,
    given: dict[str, Any],
) -> int:
    with place.store() as store, store.read() as conn:
        if lines is None:
            return _write_experiences(conn, wanted, format_name, output, **given)
        return _write_lines(lines(_sessions(conn, wanted)), output)


def _line_maker(format_name: str, min_reward: float | None) -> LineMaker:
    """Return the function of a format of whole sessions."""
    of_session: dict[str, Callable[[Json], Iterable[Json]]] = {
        "sessions": lambda session: [session],
        "openai": training_formats.openai_lines,
        "trl": training_formats.trl_lines,
    }
    if format_name == "trl-pairs":
        pairs = training_formats.trl_pairs
        return lambda sessions: (one for one in pairs(sessions) if _is_at_least(one["chosen_reward"], min_reward))
    lines = of_session.get(format_name) or plugins.load(plugins.EXPORTS, format_name, CORE_FORMATS).lines
    return lambda sessions: (
        line for session in sessions if _is_at_least(session["reward"], min_reward) for line in lines(session)
    )


def _of_finished(lines: LineMaker) -> LineMaker:
    """Return a format without the sessions that experiences leave out too."""

    def is_finished(session: Json) -> bool:
        return session["status"] != SessionStatus.OPEN and session["reward"] is not None and bool(session["turns"])

    return lambda sessions: lines(filter(is_finished, sessions))


def _is_at_least(reward: float | None, bound: float | None) -> bool:
    return bound is None or (reward is not None and reward >= bound)


def _sessions(conn: Connection, wanted: SessionFilter) -> Iterator[Json]:
    from turnwise.exchange import session_document as documents
    from turnwise.features import records
    from turnwise.features.images import read_media

    for record in records.session_records(conn, wanted):
        tenant = record.session.tenant

        def data_url(digest: str, tenant: str = tenant) -> str:
            return wire.data_url(*read_media(conn, tenant, [digest])[digest])

        yield with_images(documents.session_document(record), data_url)


def _write_experiences(
    conn: Connection,
    wanted: SessionFilter,
    format_name: str,
    output: Path | None,
    *,
    merge: Literal["turn", "chain"],
    credit: str | None,
    gamma: float | None,
    reward_bonus_coeff: float,
    min_reward: float | None,
) -> int:
    from turnwise.features import advantages
    from turnwise.store import experiences

    policy = None if credit is None else Credit(credit)
    shape = experiences.Shape(credit=policy, gamma=gamma, reward_bonus_coeff=reward_bonus_coeff, merge=merge)
    found = (each for each in advantages.with_advantages(conn, wanted, shape) if _is_at_least(each.reward, min_reward))
    if format_name == "jsonl":
        return _write_lines(map(_experience_line, found), output)
    if format_name == "axolotl":
        return _write_lines(map(training_formats.axolotl_line, map(_experience_line, found)), output)
    from turnwise.exchange.parquet import write_dataset, write_parquet

    return (write_dataset if format_name == "hf" else write_parquet)(found, _named(output, format_name))


def _named(output: Path | None, format_name: str) -> Path:
    if output is None:
        kind = "directory" if format_name == "hf" else "file"
        raise InvalidRequest(f"--format {format_name} is not text; name the {kind} to write by --output")
    return output


def _experience_line(experience: Experience) -> Json:
    from turnwise.features.experts import experts_of
    from turnwise.features.exports import experience_json

    shown = experience_json(experience)
    own = {"tenant": experience.tenant, "routed_experts": experts_of(experience)}
    return {name: values_of(value) for name, value in (shown | own).items()}


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
    create_private(output)
    with output.open("w", encoding="utf-8") as file:
        yield file


def session_document(client: Client, session: Json) -> Json:
    turns = [turn | client.turn(turn["turn_id"], prompt="whole") for turn in client.turns(session["session_id"])]
    whole = client.session(session["session_id"])["rewards"]
    given = {line["reward_id"]: line for line in (*whole, *(line for turn in turns for line in turn["rewards"]))}
    # The latest line of each target and name is in force; the lines of a step are with each of its turns.
    latest = {(line["turn_id"], line["step"], line["name"]): line for _, line in sorted(given.items())}
    lines = sorted(latest.values(), key=lambda line: int(line["reward_id"]))
    return with_images({**session, "turns": turns, "rewards": lines}, client.image)
