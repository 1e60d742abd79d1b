"""Exports of the store: each format's lines, the same bytes for the same input, and formats of packages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import invoke
from support.exchanged import CALL, TOOLS, captured, export, lines_of
from support.ledger_samples import add_session, finish, make_turn
from support.migrated import new_database

from turnwise.exchange import plugins
from turnwise.store import sessions, turns
from turnwise.store.database import Database
from turnwise.types import Session


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = captured(tmp_path)
    yield database
    database.close()


def test_trainers_elsewhere_get_prompts_with_completions_pairs_and_masked_tokens(database, tmp_path):
    with database.write() as connection:
        asks = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is kim's boss?"}]
        said = {"role": "assistant", "content": "tom"}
        worse = make_turn("t4", session_id="worse", messages=asks, response=said, tools=TOOLS)
        sessions.create_session(connection, Session(session_id="worse", task_id="kim", group_id="g"))
        turns.append_turns(connection, [worse])
    finish(database, "worse", value=0.25)
    rows = lines_of(export(tmp_path, "--format", "trl"))
    assert [row["reward"] for row in rows] == [0.5, 0.5, 0.25]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert [message["role"] for message in rows[0]["completion"]] == ["assistant", "tool", "assistant"]
    assert len(lines_of(export(tmp_path, "--format", "trl", "--min-reward", "0.5"))) == 2
    (pair,) = lines_of(export(tmp_path, "--format", "trl-pairs"))
    assert (pair["chosen_reward"], pair["rejected_reward"], pair["rejected"][0]["content"]) == (0.5, 0.25, "tom")
    assert pair["chosen"] == rows[0]["completion"]
    assert lines_of(export(tmp_path, "--format", "trl-pairs", "--min-reward", "0.6")) == []
    of_turnwise = lines_of(export(tmp_path, "--format", "jsonl"))
    for row, seen in zip(lines_of(export(tmp_path, "--format", "axolotl")), of_turnwise, strict=True):
        assert row.keys() == {"input_ids", "attention_mask", "labels"}
        mask = [False] * seen["prompt_length"] + seen["loss_mask"]
        assert row["labels"] == [token if kept else -100 for token, kept in zip(seen["tokens"], mask, strict=True)]
    called = {**CALL, "function": {"name": "lookup", "arguments": {"name": "kim"}}}
    assert rows[0]["completion"][0]["tool_calls"] == [called]


@pytest.mark.parametrize("format_name", ["jsonl", "sessions", "openai", "parquet", "hf"])
def test_the_same_input_gives_the_same_bytes(format_name, database, tmp_path):
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        export(tmp_path, "--format", format_name, "--output", str(place))
    files = [sorted(path for path in [place, *place.rglob("*")] if path.is_file()) for place in places]
    assert files[0]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_data_set_directory_is_read_by_the_datasets_library(database, tmp_path):
    datasets = pytest.importorskip("datasets")
    export(tmp_path, "--format", "hf", "--output", str(tmp_path / "set"), "--merge", "chain")
    rows = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    jsonl = lines_of(export(tmp_path, "--format", "jsonl", "--merge", "chain"))
    assert [row["tokens"] for row in rows] == [line["tokens"] for line in jsonl]
    assert [row["logprobs"][row["prompt_length"] :] for row in rows] == [line["logprobs"] for line in jsonl]
    assert [row["reward"] for row in rows] == [0.5, 0.5]


def test_a_binary_format_requires_an_output_path(database, tmp_path):
    result = invoke("export", "--database", f"sqlite:///{tmp_path}/turnwise.db", "--format", "parquet")
    assert result.exit_code == 2
    assert "--output" in result.stderr


def test_sessions_are_streamed_oldest_first(tmp_path):
    database = new_database(tmp_path / "turnwise.db")
    for number in range(40):  # more than one read returns
        add_session(database, f"s{number}")
    database.close()
    found = lines_of(export(tmp_path, "--format", "sessions", "--all"))
    assert [line["session_id"] for line in found] == [f"s{number}" for number in range(40)]


def test_sessions_that_are_open_unrewarded_or_empty_are_written_only_where_they_are_asked_for(tmp_path):
    database = new_database(tmp_path / "turnwise.db")
    for number, name in enumerate(("good", "open", "unrewarded", "empty")):
        with database.write() as connection:
            sessions.create_session(connection, Session(session_id=name, task_id=name))
            if name != "empty":
                turns.append_turns(connection, [make_turn(f"t{number}", session_id=name)])
    for name in ("good", "empty"):
        finish(database, name, value=1.0)
    with database.write() as connection:
        sessions.end_session(connection, "default", "unrewarded")
    database.close()

    def names(*options: str) -> list[str]:
        return [line["session_id"] for line in lines_of(export(tmp_path, "--format", "sessions", *options))]

    assert names() == ["good"]
    assert names("--all") == ["good", "open", "unrewarded", "empty"]
    assert (names("--session-id", "open"), names("--status", "open")) == (["open"], ["open"])
    assert [line["session_id"] for line in lines_of(export(tmp_path))] == ["good"]


def test_a_format_that_is_not_installed_names_its_package_or_the_formats(database, tmp_path):
    for name, expected in (
        ("nonsense", "installed are jsonl, axolotl, parquet, hf, sessions, openai, trl, trl-pairs"),
        ("atif", "extras/formats"),
    ):
        if name in plugins.installed(plugins.EXPORTS):
            continue
        command = ["export", "--database", f"sqlite:///{tmp_path}/turnwise.db", "--format", name]
        result = invoke(*command)
        assert result.exit_code == 2
        assert expected in result.stderr
    assert "openai" in invoke("export", "--format", "list").stdout.split()
