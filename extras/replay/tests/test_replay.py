"""Captured calls, made again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.exchanged import captured, export, lines_of
from support.ledger_samples import make_turn
from turnwise_fake_engine import running_fake_engine
from turnwise_replay.replaying import offsets

from turnwise.commands.cli import main
from turnwise.store import sessions, turns
from turnwise.store.database import Database
from turnwise.types import Session


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = captured(tmp_path)
    yield database
    database.close()


def test_recorded_calls_are_replayed(database: Database, tmp_path: Path) -> None:
    """Three turns are three calls; a turn waits for the answer of its parent."""
    export(tmp_path, "--format", "replay", "--output", str(tmp_path / "calls.jsonl"))
    with running_fake_engine() as engine:
        calls = str(tmp_path / "calls.jsonl")
        command = ["replay", calls, "--to", f"{engine.url}/v1", "--speed", "0", "--model", "fake"]
        result = CliRunner().invoke(main, [*command, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["calls"] == 3
        received = [call.body for call in engine.calls]
    assert sorted(len(body["messages"]) for body in received) == [2, 4, 4]
    assert all(body["temperature"] == 1.0 for body in received if len(body["messages"]) == 2)


def test_calls_are_due_at_their_recorded_distances_divided_by_the_speed() -> None:
    calls = [{"started_at": at} for at in (1000.0, 1000.5, 1003.0)]
    assert offsets(calls, 1) == [0.0, 0.5, 3.0]
    assert offsets(calls, 10) == [0.0, 0.05, 0.3]
    assert offsets(calls, 0.5) == [0.0, 1.0, 6.0]
    assert offsets(calls, 0) == [0.0, 0.0, 0.0]


def test_no_call_is_sent_before_it_is_due_and_the_report_states_how_late_the_calls_were(tmp_path: Path) -> None:
    """Three calls a second apart at speed 10: the last one is due 0.2 s after the start."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    calls = [
        {"turn_id": str(at), "parent_turn_id": None, "started_at": 1000.0 + at, "body": body | {"seed": at}}
        for at in range(3)
    ]
    file = tmp_path / "calls.jsonl"
    file.write_text("".join(json.dumps(call) + "\n" for call in calls))
    with running_fake_engine() as engine:
        command = ["replay", str(file), "--to", f"{engine.url}/v1", "--speed", "10", "--json"]
        result = CliRunner().invoke(main, command)
        assert sorted(call.body["seed"] for call in engine.calls) == [0, 1, 2]
    report = json.loads(result.stdout)
    assert report["seconds"] >= 0.2
    assert report["p99_delay_seconds"] >= 0


def test_failed_calls_are_counted_and_end_with_status_1(database: Database, tmp_path: Path) -> None:
    export(tmp_path, "--format", "replay", "--output", str(tmp_path / "calls.jsonl"))
    command = ["replay", str(tmp_path / "calls.jsonl"), "--to", "http://127.0.0.1:1/v1", "--speed", "0", "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failures"] == {"ConnectError": 3}


def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"messages": []}\n')
    result = CliRunner().invoke(main, ["replay", str(tmp_path / "other.jsonl"), "--to", "http://127.0.0.1:1/v1"])
    assert result.exit_code == 2
    assert "line 1" in result.stderr


def test_further_choices_of_a_call_are_not_separate_calls(database: Database, tmp_path: Path) -> None:
    with database.write() as connection:
        first = make_turn("t1", session_id="n")
        sessions.create_session(connection, Session(session_id="n"))
        turns.append_turns(connection, [dataclasses.replace(first, turn_id="x", chain_id="x")])
        turns.append_turns(connection, [dataclasses.replace(first, turn_id="x#1", chain_id="x#1")])
    found = lines_of(export(tmp_path, "--format", "replay", "--session-id", "n"))
    assert [line["turn_id"] for line in found] == ["x"]
