"""`turnwise sessions pin`, `turnwise examples` and `turnwise gate`: failures, and what versions make of them.

`gate` plays both versions itself, from their files, so it needs neither a proxy nor an engine, and fits a CI.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from turnwise.client import Client, wire
from turnwise.commands.output import print_records, print_stored
from turnwise.commands.place import (
    DataPlace,
    database_option,
    database_url,
    json_option,
    opened,
    refuse_tenant,
    takes_place,
)
from turnwise.errors import BadLine, SettingsError
from turnwise.exchange.imports.values import value_of_json
from turnwise.settings import load_settings, settings_model
from turnwise.types import DEFAULT_POLICY_NAME, Json, values_of

MUST = "must"
VERSIONS_SHOWN = 4
_COLUMNS = ("example_id", "policy", "session_id", "check", "answers", "note")


def _checks(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--least", type=click.FloatRange(0, 1), help="With --rubric: the least score of a right reply."),
        click.option("--rubric", help="A right reply gets a good score by this rubric from the trainer's judge."),
        click.option("--command", help="A right reply passes this program of the trainer's `examples.commands`."),
        click.option("--contains", help="A right reply contains this text."),
        click.option("--equals", help="A right reply is this text, but for white space."),
        click.option("--arguments", metavar="JSON", help="With --tool-call: arguments that it has."),
        click.option("--tool-call", metavar="NAME", help="A right reply calls this tool."),
    ):
        command = option(command)
    return command


@click.command("pin")
@click.argument("session_id")
@click.option("--turn", "turn_id", help="The turn with the failure [default: the session's last reply].")
@_checks
@click.option("--note", help="Free text.")
@click.option("--tenant", help="Whose session [default: default; over HTTP the caller's].")
@takes_place
def pin(
    session_id: str, turn_id: str | None, note: str | None, tenant: str | None, place: DataPlace, **given: Any
) -> None:
    """Make an example of a reply: each later version answers the same prompt, and must not fail there.

    Without an option that says what is right, any other reply is.
    """
    check = _check(**given)
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            turn_id = turn_id or _last_reply(client, session_id)
            body = {"check": check, **({} if note is None else {"note": note})}
            _ask(client, "PUT", f"/v1/examples/{wire.segment(turn_id)}", body)
        else:
            turn_id = _pin(place, tenant or "default", session_id, turn_id, check, note)
    click.echo(f"Turn {turn_id} is pinned: versions answer its prompt before they are published.")


def _check(*, tool_call: str | None, arguments: str | None, command: str | None, **others: Any) -> Json:
    found: Json = {name: value for name, value in others.items() if value is not None}
    kinds = [("tool_call", tool_call), ("command", command)]
    named = [(kind, {"name": name}) for kind, name in kinds if name is not None]
    named += [("text", {name: found[name]}) for name in ("equals", "contains") if name in found]
    named += (
        [("rubric", {name: found[name] for name in ("rubric", "least") if name in found})] if "rubric" in found else []
    )
    if len(named) > 1:
        raise click.UsageError("give one of --tool-call, --equals, --contains, --command and --rubric")
    if (arguments is not None and tool_call is None) or ("least" in found and "rubric" not in found):
        raise click.UsageError("--arguments goes with --tool-call, --least with --rubric")
    if not named:
        return {"kind": "not_again"}
    kind, fields = named[0]
    if arguments is not None:
        try:
            fields["arguments"] = value_of_json(arguments)
        except BadLine as error:
            raise SettingsError(f"--arguments {error}") from error
    return {"kind": kind, **fields}


def _last_reply(client: Client, session_id: str) -> str:
    turns = [turn["turn_id"] for turn in client.turns(session_id) if turn["token_ids"]]
    if not turns:
        raise SettingsError(f"session {session_id!r} has no reply to pin; `turnwise sessions` lists others")
    return str(turns[-1])


def _pin(place: DataPlace, tenant: str, session_id: str, turn_id: str | None, check: Json, note: str | None) -> str:
    from turnwise.features import examples
    from turnwise.store.selection import session_of_turn

    with place.store() as store, store.write() as conn:
        if turn_id is None:
            turn_id = examples.last_reply(conn, tenant, session_id)
        session_of_turn(conn, tenant, turn_id, session_id)
        return examples.pin(conn, tenant, turn_id, check, note=note).example_id


@click.command("unpin")
@click.argument("name", metavar="SESSION_ID|EXAMPLE_ID")
@click.option("--tenant", help="Whose [default: default; over HTTP the caller's].")
@takes_place
def unpin(name: str, tenant: str | None, place: DataPlace) -> None:
    """Remove an example, or all of a session: versions are not held to it any more."""
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            is_example = any(each["example_id"] == name for each in _examples(client))
            if is_example:
                _ask(client, "DELETE", f"/v1/examples/{wire.segment(name)}")
            else:
                client.remove_label(name, MUST)
        else:
            _unpin(place, tenant or "default", name)
    click.echo(f"{name} is not pinned any more.")


def _unpin(place: DataPlace, tenant: str, name: str) -> None:
    from turnwise.features import examples

    with place.store() as store, store.write() as conn:
        if examples.is_pinned(conn, tenant, name):
            examples.unpin(conn, tenant, name)
        else:
            examples.unpin_session(conn, tenant, name)


@click.group("examples", invoke_without_command=True)
@click.option("--tenant", help="Whose [default: default; over HTTP the caller's].")
@takes_place
@json_option
@click.pass_context
def examples(context: click.Context, tenant: str | None, place: DataPlace, *, as_json: bool) -> None:
    """List pinned examples, and how many answers of each version to them were right."""
    if context.invoked_subcommand is None:
        found = list(_lines(place, tenant))
        url = place.url if place.url is not None and place.database is None else place.database_url
        shown = found if as_json else list(map(_shown, found))
        print_stored(shown, "pinned examples", url, as_json=as_json, columns=_COLUMNS)


def _shown(line: Json) -> Json:
    """Return an example with its check, and what its newest versions answered, as text."""
    check = " ".join([line["check"]["kind"], *(f"{k}={v}" for k, v in line["check"].items() if k != "kind")])
    newest = sorted(line["answers"].items(), key=lambda each: int(each[0]))[-VERSIONS_SHOWN:]
    answers = ", ".join(f"{version}: {right}/{num}" for version, (right, num) in newest)
    return line | {"check": check, "answers": answers}


@examples.command("export")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--tenant", help="Whose [default: default; over HTTP the caller's].")
@takes_place
def export(path: Path, tenant: str | None, place: DataPlace) -> None:
    """Write all examples to PATH, as JSON Lines that an agent's repository can hold."""
    from turnwise.files import write_whole

    lines = [json.dumps(each, sort_keys=True, default=str) for each in _lines(place, tenant)]
    write_whole(path, "".join(f"{line}\n" for line in lines))
    click.echo(f"{len(lines)} examples are in {path}.")


@examples.command("import")
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tenant", help="Whose they become [default: default; over HTTP the caller's].")
@takes_place
def import_examples(path: Path, tenant: str | None, place: DataPlace) -> None:
    """Store exported examples, without their sessions; those that are stored already stay as they are."""
    lines = [value_of_json(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            added = [_ask(client, "POST", "/v1/examples", {"example": line})["is_new"] for line in lines]
        else:
            added = _import(place, tenant or "default", lines)
    click.echo(f"{sum(added)} examples are new, and {len(added) - sum(added)} were stored already.")


def _import(place: DataPlace, tenant: str, lines: list[Json]) -> list[bool]:
    from turnwise.features import examples as stored

    with place.store(creates=True) as store, store.write() as conn:
        return [stored.import_line(conn, tenant, line) for line in lines]


def _lines(place: DataPlace, tenant: str | None) -> Iterator[Json]:
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            yield from _examples(client)
            return
    from turnwise.features import examples as stored

    with place.store() as store, store.read() as conn:
        yield from map(values_of, stored.list_lines(conn, tenant or "default")[0])


def _examples(client: Client) -> Iterator[Json]:
    return client._rows(wire.get("/v1/examples"), "example_id")  # noqa: SLF001  the SDK has no examples


def _ask(client: Client, method: str, path: str, body: Json | None = None) -> Json:
    return client._json(wire.ApiCall(method, path, body=body))  # noqa: SLF001  the SDK has no examples


@click.command("gate")
@click.argument("version", metavar="POLICY[@VERSION]", default=DEFAULT_POLICY_NAME)
@click.option("--against", type=click.IntRange(min=0), required=True, help="The version that it must not fall behind.")
@click.option("--answers", type=click.IntRange(1, 1000), help="Of each to each example [default: the trainer's].")
@click.option("--tenant", default="default", show_default=True, help="Whose policy and examples.")
@database_option
@json_option
def gate(version: str, against: int, answers: int | None, tenant: str, database: str | None, *, as_json: bool) -> None:
    """Let two versions answer a tenant's pinned examples; exit 1 if the first one would not be published.

    The first is POLICY@VERSION, or the served one of POLICY. Both are computed here, from their files.
    """
    from trainer.features.examples.checks import ExampleRules
    from turnwise.commands.features.examples_gate import play

    settings = load_settings(settings_model("trainer"), config=None, section="trainer", overrides={})
    rules = {**vars(settings)["examples"], **({} if answers is None else {"answers": answers})}
    with opened(database_url(database), creates=False) as store:
        gated = play(store, ExampleRules(**rules), tenant, version, against, log=Path("example-commands.log"))
    if as_json:
        print_records(values_of(gated), as_json=True)
    else:
        print_records(gated.rows, as_json=False, columns=("example_id", "check", "before", "now", "seconds"))
        click.echo(gated.text())
    if gated.reason is not None:
        sys.exit(1)
