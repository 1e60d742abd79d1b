"""What tests of exports and imports share: a captured session, the two commands, and an example of a conversation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke
from support.ledger_samples import finish, make_turn
from support.migrated import new_database
from turnwise_fake_engine import tokens

from turnwise.features.records import SessionRecord, session_records
from turnwise.store import sessions, turns
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import Session

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "kim"}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who is kim's boss?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "lea"},
    {"role": "assistant", "content": "Lea is."},
]
HELLO = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the stand-in engine's tokenizer, with which imports render."""
    return tokens.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """The empty database that `run_import` fills."""
    database = new_database(tmp_path / "turnwise.db")
    yield database
    database.close()


def captured(tmp_path: Path) -> Database:
    """Return a database with one rewarded session; a second conversation branches off its first turn."""
    database = new_database(tmp_path / "turnwise.db")
    asks = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is kim's boss?"}]
    called = {"role": "assistant", "content": None, "reasoning": "look it up", "tool_calls": [CALL]}
    tool_message = {"role": "tool", "tool_call_id": "call_1", "content": '{"boss": "lea"}'}
    t1 = make_turn("t1", messages=asks, response=called, tools=TOOLS, sampling={"temperature": 1.0})
    t2 = make_turn("t2", t1, messages=[tool_message], response={"role": "assistant", "content": "lea"})
    t3 = make_turn("t3", t1, chain_id="t3", messages=[{"role": "user", "content": "Never mind."}])
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id="s", task_id="kim", group_id="g"))
        turns.append_turns(connection, [t1, t2, t3])
    finish(database, value=0.5)
    return database


def export(tmp_path: Path, *arguments: str) -> str:
    result = invoke("export", "--database", f"sqlite:///{tmp_path}/turnwise.db", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def run_import(
    tmp_path: Path, model: Path, lines: Any, format_name: str, *options: str, name: str = "file.jsonl", status: int = 0
) -> dict:
    file = tmp_path / name
    if isinstance(lines, list):
        file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    command = ["import", str(file), "--format", format_name, "--tokenizer", str(model), "--json"]
    result = invoke(*command, "--database", f"sqlite:///{tmp_path}/turnwise.db", *options)
    assert result.exit_code == status, result.output
    return json.loads(result.stdout or json.dumps({"error": result.stderr}))


def records(database: Database) -> list[SessionRecord]:
    with database.read() as conn:
        return list(session_records(conn, SessionFilter()))


def install_format(directory: Path, group: str, name: str, source: str) -> None:
    """Write a package with one format, as pip would install it: a module, and its entry point."""
    (directory / f"format_{name}.py").write_text(source)
    metadata = directory / f"format_{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: format-{name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = format_{name}\n")
