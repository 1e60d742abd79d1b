"""Imports: each format becomes sessions with the template's tokens, once, and never as sampled ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.ledger_samples import add_session, finish
from support.migrated import migrated

from turnwise.chains import is_imported, is_trainable
from turnwise.commands.cli import main
from turnwise.fake_engine import running_fake_engine, tokens
from turnwise.store import claims, experiences
from turnwise.store.database import Database
from turnwise.store.experiences import SessionFilter
from turnwise.store.session_records import SessionRecord, session_records

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
    return tokens.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(migrated(f"sqlite:///{tmp_path}/turnwise.db"))
    yield database
    database.close()


def run_import(
    tmp_path: Path, model: Path, lines: Any, format_name: str, *options: str, name: str = "file.jsonl", status: int = 0
) -> dict:
    file = tmp_path / name
    if isinstance(lines, list):
        file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    command = ["import", str(file), "--format", format_name, "--tokenizer", str(model), "--json"]
    result = CliRunner().invoke(main, [*command, "--database", f"sqlite:///{tmp_path}/turnwise.db", *options])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout or json.dumps({"error": result.stderr}))


def records(database: Database) -> list[SessionRecord]:
    with database.read() as conn:
        return list(session_records(conn, SessionFilter()))


def exported(tmp_path: Path, format_name: str) -> str:
    command = ["export", "--format", format_name, "--database", f"sqlite:///{tmp_path}/turnwise.db"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_replies_have_the_templates_tokens_and_extend_one_another(
    database: Database, tmp_path: Path, model: Path
) -> None:
    report = run_import(tmp_path, model, [{"messages": CONVERSATION, "tools": TOOLS}], "openai")
    assert (report["lines"], report["sessions"], report["turns"], report["num_bad"]) == (1, 1, 2, 0)
    (record,) = records(database)
    first, second = record.views()
    prompt = tokens.encode(tokens.render(CONVERSATION[:2], TOOLS))
    assert first.prompt_token_ids.tolist() == prompt
    called = '<tool_call>\n{"name": "lookup", "arguments": {"name": "kim"}}\n</tool_call><|im_end|>'
    assert first.turn.token_ids.tolist() == tokens.encode(called)
    assert second.turn.parent_turn_id == first.turn.turn_id
    assert second.prompt_token_ids.tolist() == tokens.encode(tokens.render(CONVERSATION[:4], TOOLS))
    assert second.turn.token_ids.tolist() == tokens.encode("Lea is.<|im_end|>")
    assert second.turn.messages == CONVERSATION[3:4]
    assert (record.session.reward, record.session.status, record.session.opened_by) == (1.0, "ended", "import")
    assert report["tokens"] == first.turn.token_ids.size + second.turn.token_ids.size


def test_an_imported_reply_is_never_counted_as_sampled(database: Database, tmp_path: Path, model: Path) -> None:
    run_import(tmp_path, model, [HELLO], "openai")
    (record,) = records(database)
    (turn,) = record.turns
    assert is_imported(turn)
    assert not is_trainable(turn)
    assert (turn.outcome, turn.reason, turn.policy_version_first, turn.logprobs.size) == (
        "untrainable",
        "imported",
        -1,
        0,
    )
    with database.read() as conn:
        assert list(experiences.experiences(conn, SessionFilter())) == []


def test_only_a_claim_for_imported_groups_gets_them(database: Database, tmp_path: Path, model: Path) -> None:
    """A trainer of another loss leaves them where they are, instead of dropping them."""
    run_import(tmp_path, model, [HELLO], "openai")
    add_session(database, "sampled")
    finish(database, "sampled")
    with database.read() as conn:
        assert claims.num_claimable(conn) == 1
        assert claims.num_claimable(conn, with_imported=True) == 2
        assert claims.oldest_version_in_flight(conn, records(database)[0].session.created_at) is None
    claim = claims.claim(database, "rl", max_groups=9, lease_seconds=60)
    assert [group.group_id for group in claim.groups] == ["sampled"]
    claim = claims.claim(database, "sft", max_groups=9, lease_seconds=60, with_imported=True)
    with database.read() as conn:
        (experience,) = experiences.experiences_of_groups(conn, claim.group_pks, with_imported=True)
    trained = experience.tokens[experience.loss_mask]
    assert trained.tolist() == tokens.encode("Hello<|im_end|>")
    assert np.isfinite(experience.logprobs).all()


def test_a_second_import_adds_nothing_and_equal_lines_are_as_many_sessions(
    database: Database, tmp_path: Path, model: Path
) -> None:
    first = run_import(tmp_path, model, [HELLO, HELLO], "openai")
    assert (first["sessions"], first["already_there"]) == (2, 0)
    again = run_import(tmp_path, model, [HELLO, HELLO, {"messages": CONVERSATION}], "openai")
    assert (again["sessions"], again["already_there"]) == (1, 2)
    assert len(records(database)) == 3


def test_bad_lines_are_reported_with_number_and_reason_and_the_rest_is_stored(
    database: Database, tmp_path: Path, model: Path
) -> None:
    lines = [
        HELLO,
        "{broken\n",
        "\n",
        "[1]\n",
        {"messages": []},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "wizard", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *CONVERSATION[-1:]]},
        {"prompt": "x"},
    ]
    report = run_import(tmp_path, model, lines, "openai", status=1)
    assert (report["sessions"], report["num_bad"]) == (1, 7)
    found = {bad["line"]: bad["reason"] for bad in report["bad"]}
    assert sorted(found) == [2, 4, 5, 6, 7, 8, 9]
    assert "not JSON" in found[2]
    assert "no assistant message" in found[6]
    assert "'wizard'" in found[7]
    assert "'image_url'" in found[8]
    assert "prompt" in found[9]


def test_a_line_that_is_nested_too_deep_is_a_bad_line(database: Database, tmp_path: Path, model: Path) -> None:
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    report = run_import(tmp_path, model, [deep, HELLO], "openai", status=1)
    assert (report["sessions"], [bad["reason"] for bad in report["bad"]]) == (1, ["its JSON is nested too deep"])
    lines = "[" * 100_000 + "]" * 100_000
    (tmp_path / "file.json").write_text(lines)
    refused = run_import(tmp_path, model, None, "openai", name="file.json", status=2)
    assert "nested too deep; write one object a line" in refused["error"]


def test_a_message_with_weight_0_is_only_part_of_the_prompt(database: Database, tmp_path: Path, model: Path) -> None:
    messages = [*HELLO["messages"], {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}]
    messages[1] = {**messages[1], "weight": 0}
    run_import(tmp_path, model, [{"messages": messages}], "openai")
    (record,) = records(database)
    (view,) = record.views()
    assert tokens.decode(view.turn.token_ids.tolist()) == "Ciao<|im_end|>"
    assert json.loads(exported(tmp_path, "openai")) == {"messages": messages}


PREFERENCE = {
    "input": {"messages": [{"role": "user", "content": "Hi"}]},
    "preferred_output": [{"role": "assistant", "content": "Hello!"}],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}
ROWS = {
    "TRL, conversational": {
        "prompt": PREFERENCE["input"]["messages"],
        "chosen": PREFERENCE["preferred_output"],
        "rejected": PREFERENCE["non_preferred_output"],
    },
    "TRL, implicit prompt": {
        "chosen": [*PREFERENCE["input"]["messages"], *PREFERENCE["preferred_output"]],
        "rejected": [*PREFERENCE["input"]["messages"], *PREFERENCE["non_preferred_output"]],
    },
    "plain text": {"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"},
    "the prompt twice": {
        "prompt": PREFERENCE["input"]["messages"],
        "chosen": [*PREFERENCE["input"]["messages"], *PREFERENCE["preferred_output"]],
        "rejected": [*PREFERENCE["input"]["messages"], *PREFERENCE["non_preferred_output"]],
    },
}


@pytest.mark.parametrize("row", [("openai", PREFERENCE), *(("hf", row) for row in ROWS.values())])
def test_a_preference_becomes_a_group_of_two(
    row: tuple[str, dict], database: Database, tmp_path: Path, model: Path
) -> None:
    format_name, document = row
    run_import(tmp_path, model, [document], format_name)
    chosen, rejected = records(database)
    assert (chosen.session.reward, rejected.session.reward) == (1.0, 0.0)
    assert chosen.session.group_id == rejected.session.group_id is not None
    assert tokens.decode(chosen.turns[0].token_ids.tolist()) == "Hello!<|im_end|>"
    assert tokens.decode(rejected.turns[0].token_ids.tolist()) == "What?<|im_end|>"
    assert chosen.turns[0].prompt_delta.tolist() == rejected.turns[0].prompt_delta.tolist()
    with database.read() as conn:
        assert claims.num_claimable(conn, with_imported=True) == 1


def test_a_parquet_chat_set_with_sharegpts_names_is_read(database: Database, tmp_path: Path, model: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "score": 0.5},
        {"conversations": [{"from": "human", "value": "Hi"}], "score": 1.0},
    ]
    (tmp_path / "set" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "data" / "train.parquet")
    report = run_import(tmp_path, model, None, "hf", name="set", status=1)
    assert [(bad["line"], bad["reason"]) for bad in report["bad"]] == [(2, "it has no assistant message")]
    (record,) = records(database)
    assert (record.session.reward, record.turns[0].response["content"]) == (0.5, "Hello")


def litellm_call(messages: list, reply: dict, **fields: Any) -> dict:
    response = {"choices": [{"message": {"role": "assistant", "provider_specific_fields": None, **reply}}]}
    return {"call_type": "acompletion", "model": "gpt", "messages": messages, "response": response, **fields}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_litellms_calls_of_one_trace_are_one_session(
    is_reversed: bool, database: Database, tmp_path: Path, model: Path
) -> None:
    parameters = {"model_parameters": {"tools": TOOLS}, "trace_id": "run 1", "endTime": 1767225600.0}
    lines = [
        litellm_call(CONVERSATION[:2], {"content": None, "tool_calls": [CALL]}, **parameters),
        litellm_call(HELLO["messages"][:1], {"content": "Hello"}),
        {"call_type": "aembedding", "trace_id": "run 1"},
        {"status": "failure", "call_type": "acompletion"},
        litellm_call(CONVERSATION[:4], {"content": "Lea is."}, **parameters),
    ]
    lines = lines[::-1] if is_reversed else lines
    report = run_import(tmp_path, model, lines, "litellm")
    assert report["skipped"] == {"a call of type aembedding": 1, "a failed call": 1}
    alone, traced = records(database)
    assert [turn.response["content"] for turn in alone.turns] == ["Hello"]
    assert [turn.parent_turn_id for turn in traced.turns] == [None, traced.turns[0].turn_id]
    assert traced.turns[0].created_at.isoformat() == "2026-01-01T00:00:00+00:00"
    assert traced.session.metadata["imported"]["session_id"] == "run 1"


def test_a_session_with_a_bad_line_is_not_stored_in_part(database: Database, tmp_path: Path, model: Path) -> None:
    good = litellm_call(CONVERSATION[:2], {"content": "Lea."}, trace_id="run 1")
    lines = [good, {**good, "response": None}, litellm_call(CONVERSATION[:2], {"content": "Lea."}, trace_id="run 2")]
    report = run_import(tmp_path, model, lines, "litellm", status=1)
    assert {bad["line"]: bad["reason"].partition(";")[0] for bad in report["bad"]} == {
        1: "line 2 of the same session is bad",
        2: "its response None has no message",
    }
    assert [record.session.metadata["imported"]["session_id"] for record in records(database)] == ["run 2"]


def test_a_session_that_grew_is_reported_and_not_changed(database: Database, tmp_path: Path, model: Path) -> None:
    first = litellm_call(CONVERSATION[:2], {"content": "Lea."}, trace_id="run 1")
    run_import(tmp_path, model, [first], "litellm")
    report = run_import(tmp_path, model, [first, first], "litellm", status=1)
    assert (report["sessions"], report["num_bad"]) == (0, 2)
    assert "turnwise forget --tenant default --session-id import-" in report["bad"][0]["reason"]


@pytest.mark.parametrize("spelling", ["camel", "snake"])
def test_scores_of_langfuse_traces_become_rewards(
    spelling: str, database: Database, tmp_path: Path, model: Path
) -> None:
    names = {"camel": ("traceId", "startTime", "sessionId"), "snake": ("trace_id", "start_time", "session_id")}
    trace_id, start, session_id = names[spelling]
    calls = [
        {"type": "GENERATION", trace_id: "a", start: "2026-01-01T00:00:02Z", "input": CONVERSATION[:4]}
        | {"output": json.dumps({"role": "assistant", "content": "Lea is."})},
        {"type": "GENERATION", trace_id: "a", start: "2026-01-01T00:00:01Z"}
        | {"input": {"messages": CONVERSATION[:2]}, "output": {"content": None, "tool_calls": [CALL]}},
        {"type": "SPAN", trace_id: "a", "input": None},
    ]
    scores = [{"name": "helpful", "value": 0.25}, {"name": "style", "value": "good"}, {"name": "right", "value": 1}]
    lines = [{"id": "a", session_id: "s", "observations": calls, "scores": scores}]
    run_import(tmp_path, model, lines, "langfuse")
    (record,) = records(database)
    assert [turn.parent_turn_id for turn in record.turns] == [None, record.turns[0].turn_id]
    assert {line.name: line.value for line in record.rewards} == {"helpful": 0.25, "right": 1.0}
    assert record.session.reward == 1.25


def test_openai_lines_are_exported_as_they_were_imported(database: Database, tmp_path: Path, model: Path) -> None:
    lines = [{"messages": CONVERSATION, "tools": TOOLS}, HELLO]
    run_import(tmp_path, model, lines, "openai")
    assert [json.loads(line) for line in exported(tmp_path, "openai").splitlines()] == lines


def test_a_trajectory_keeps_its_token_ids_through_a_round_trip(database: Database, tmp_path: Path, model: Path) -> None:
    """Export, import, export: the same steps with the same ids and times; only what names a stored turn differs."""
    run_import(tmp_path, model, [{"messages": CONVERSATION, "tools": TOOLS}], "openai")
    first = exported(tmp_path, "atif")
    run_import(tmp_path, model, [first], "atif", name="trajectories.jsonl")
    before, after = (json.loads(line) for line in exported(tmp_path, "atif").splitlines())
    assert before == json.loads(first)
    assert after["session_id"] != before["session_id"]
    assert [_without_names(step) for step in after["steps"]] == [_without_names(step) for step in before["steps"]]
    assert after["final_metrics"] == before["final_metrics"]
    assert after["extra"]["reward"] == before["extra"]["reward"] == 1.0


def _without_names(step: dict) -> dict:
    return {key: value for key, value in step.items() if key != "extra"}


def test_token_ids_of_another_tokenizer_are_refused(database: Database, tmp_path: Path, model: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "Hi"},
        {"step_id": 2, "source": "agent", "message": "Hello"}
        | {"metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": tokens.encode("Bye")}},
    ]
    report = run_import(tmp_path, model, [{"schema_version": "ATIF-v1.4", "steps": steps}], "atif", status=1)
    assert "not of this tokenizer" in report["bad"][0]["reason"]
    assert records(database) == []


def test_a_trajectory_of_another_harness_is_tokenised(database: Database, tmp_path: Path, model: Path) -> None:
    """Terminus' observations name no call: they are what the user says next."""
    steps = [
        {"step_id": 1, "source": "user", "message": "List the files."},
        {"step_id": 2, "source": "agent", "message": "ls", "observation": {"results": [{"content": "a.txt"}]}},
        {"step_id": 3, "source": "agent", "message": "done"},
    ]
    run_import(tmp_path, model, [{"schema_version": "ATIF-v1.6", "session_id": "x", "steps": steps}], "atif")
    (record,) = records(database)
    assert [turn.response["content"] for turn in record.turns] == ["ls", "done"]
    assert record.turns[1].messages == [{"role": "user", "content": "a.txt"}]


def test_a_dry_run_stores_nothing(database: Database, tmp_path: Path, model: Path) -> None:
    report = run_import(tmp_path, model, [HELLO], "openai", "--dry-run")
    assert report["sessions"] == 1
    command = ["import", str(tmp_path / "file.jsonl"), "--format", "openai", "--tokenizer", str(model), "--dry-run"]
    result = CliRunner().invoke(main, [*command, "--database", f"sqlite:///{tmp_path}/turnwise.db"])
    assert "would be stored" in result.stdout
    assert records(database) == []


def test_without_a_reward_a_session_waits_for_its_judge(database: Database, tmp_path: Path, model: Path) -> None:
    run_import(tmp_path, model, [HELLO], "openai", "--no-reward")
    (record,) = records(database)
    assert (record.session.status, record.session.reward) == ("ended", None)


def test_the_engines_own_tokens_are_compared(database: Database, tmp_path: Path, model: Path) -> None:
    with running_fake_engine() as engine:
        assert run_import(tmp_path, model, [HELLO], "openai", "--engine", engine.url)["sessions"] == 1
        other = tokens.write_tokenizer(tmp_path / "other")
        (other / "chat_template.jinja").write_text("{{ messages[-1].content }}")
        refused = run_import(tmp_path, other, [HELLO], "openai", "--engine", engine.url, status=1)
        assert "tokenises conversations differently" in refused["error"]
