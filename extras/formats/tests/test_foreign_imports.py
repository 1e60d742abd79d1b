"""Logs and trajectories of other tools as sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.exchanged import CALL, CONVERSATION, HELLO, TOOLS, export, records, run_import
from turnwise_fake_engine import tokens

from turnwise.store.database import Database


def _without_names(step: dict) -> dict:
    return {key: value for key, value in step.items() if key != "extra"}


def exported(tmp_path: Path, format_name: str) -> str:
    return export(tmp_path, "--format", format_name)


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


@pytest.mark.parametrize("spelling", ["camel", "snake"])
def test_scores_of_langfuse_traces_become_rewards(
    spelling: str, database: Database, tmp_path: Path, model: Path
) -> None:
    names = {"camel": ("traceId", "startTime", "sessionId"), "snake": ("trace_id", "start_time", "session_id")}
    trace_id, start, session_id = names[spelling]
    given = {"type": "GENERATION", trace_id: "a", "modelParameters": {"tools": TOOLS}}
    calls = [
        given
        | {start: "2026-01-01T00:00:02Z", "input": CONVERSATION[:4]}
        | {"output": json.dumps({"role": "assistant", "content": "Lea is."})},
        given
        | {start: "2026-01-01T00:00:01Z"}
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
