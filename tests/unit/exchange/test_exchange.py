"""Exports of the store: each format's lines, the same bytes for the same input, and replayed calls."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.ledger_samples import add_session, finish, make_turn
from support.migrated import migrated

from turnwise.commands.cli import main
from turnwise.exchange.replay import offsets
from turnwise.fake_engine import running_fake_engine
from turnwise.store import ledger
from turnwise.store.database import Database
from turnwise.types import Session

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "kim"}'}}


@pytest.fixture
def database(tmp_path: Path) -> Database:
    """One rewarded session that looks a name up and answers, with a second conversation that branches off."""
    database = Database(migrated(f"sqlite:///{tmp_path}/turnwise.db"))
    asks = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is kim's boss?"}]
    called = {"role": "assistant", "content": None, "reasoning": "look it up", "tool_calls": [CALL]}
    tool_message = {"role": "tool", "tool_call_id": "call_1", "content": '{"boss": "lea"}'}
    t1 = make_turn("t1", messages=asks, response=called, tools=TOOLS, sampling={"temperature": 1.0})
    t2 = make_turn("t2", t1, messages=[tool_message], response={"role": "assistant", "content": "lea"})
    t3 = make_turn("t3", t1, chain_id="t3", messages=[{"role": "user", "content": "Never mind."}])
    with database.write() as connection:
        ledger.create_session(connection, Session(session_id="s", task_id="kim", group_id="g"))
        ledger.append_turns(connection, [t1, t2, t3])
    finish(database, value=0.5)
    yield database
    database.close()


def export(tmp_path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["export", "--database", f"sqlite:///{tmp_path}/turnwise.db", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_conversation_becomes_a_line_of_openais_format(database: Database, tmp_path: Path) -> None:
    first, second = lines_of(export(tmp_path, "--format", "openai"))
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who is kim's boss?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"boss": "lea"}'},
        {"role": "assistant", "content": "lea"},
    ]
    assert first["tools"] == TOOLS
    assert [message["role"] for message in second["messages"]][-2:] == ["user", "assistant"]


def test_a_trajectory_has_steps_with_token_ids_and_observations(database: Database, tmp_path: Path) -> None:
    first, second = lines_of(export(tmp_path, "--format", "atif"))
    assert (first["schema_version"], first["session_id"]) == ("ATIF-v1.4", "s")
    assert [step["step_id"] for step in first["steps"]] == [1, 2, 3, 4]
    assert [step["source"] for step in first["steps"]] == ["system", "user", "agent", "agent"]
    called = first["steps"][2]
    assert called["reasoning_content"] == "look it up"
    assert called["tool_calls"] == [{"tool_call_id": "call_1", "function_name": "lookup", "arguments": {"name": "kim"}}]
    assert called["observation"] == {"results": [{"source_call_id": "call_1", "content": '{"boss": "lea"}'}]}
    assert called["metrics"]["prompt_token_ids"] == [10, 11]
    assert called["metrics"]["completion_token_ids"] == [12, 13]
    assert called["metrics"]["logprobs"] == [-1.0, -1.25]
    answered = first["steps"][3]
    assert answered["metrics"]["prompt_token_ids"] == [10, 11, 12, 13, 20, 21]
    assert first["extra"]["reward"] == 0.5
    # 2 + 6 prompt tokens, 2 + 2 sampled ones
    assert first["final_metrics"] == {"total_prompt_tokens": 8, "total_completion_tokens": 4, "total_steps": 4}
    assert second["extra"]["chain_id"] == "t3"


def test_broken_sampled_arguments_are_kept_as_text(tmp_path: Path) -> None:
    from turnwise.exchange.atif import _tool_call

    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": '}}
    assert _tool_call(call)["arguments"] == {"unparsed": '{"a": '}


@pytest.mark.parametrize("format_name", ["jsonl", "openai", "atif", "replay", "parquet", "hf"])
def test_the_same_input_gives_the_same_bytes(format_name: str, database: Database, tmp_path: Path) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        export(tmp_path, "--format", format_name, "--output", str(place))
    files = [sorted(path for path in [place, *place.rglob("*")] if path.is_file()) for place in places]
    assert files[0]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_data_set_directory_is_read_by_the_datasets_library(database: Database, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export(tmp_path, "--format", "hf", "--output", str(tmp_path / "set"), "--merge", "chain")
    rows = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    jsonl = lines_of(export(tmp_path, "--format", "jsonl", "--merge", "chain"))
    assert [row["tokens"] for row in rows] == [line["tokens"] for line in jsonl]
    assert [row["logprobs"][row["prompt_length"] :] for row in rows] == [line["logprobs"] for line in jsonl]
    assert [row["reward"] for row in rows] == [0.5, 0.5]


def test_a_binary_format_requires_an_output_path(database: Database, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["export", "--database", f"sqlite:///{tmp_path}/turnwise.db", "--format", "parquet"]
    )
    assert result.exit_code == 2
    assert "--output" in result.stderr


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


def test_sessions_are_streamed_oldest_first(tmp_path: Path) -> None:
    database = Database(migrated(f"sqlite:///{tmp_path}/turnwise.db"))
    for number in range(40):  # more than one read returns
        add_session(database, f"s{number}")
    database.close()
    found = lines_of(export(tmp_path, "--format", "replay"))
    assert [line["session_id"] for line in found] == [f"s{number}" for number in range(40)]


def test_further_choices_of_a_call_are_not_separate_calls(database: Database, tmp_path: Path) -> None:
    with database.write() as connection:
        first = make_turn("t1", session_id="n")
        ledger.create_session(connection, Session(session_id="n"))
        ledger.append_turns(connection, [dataclasses.replace(first, turn_id="x", chain_id="x")])
        ledger.append_turns(connection, [dataclasses.replace(first, turn_id="x#1", chain_id="x#1")])
    found = lines_of(export(tmp_path, "--format", "replay", "--session-id", "n"))
    assert [line["turn_id"] for line in found] == ["x"]
