"""Sessions as ATIF trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.exchanged import captured, export, lines_of

from turnwise.store.database import Database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = captured(tmp_path)
    yield database
    database.close()


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
    from turnwise_formats.atif import _tool_call

    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": '}}
    assert _tool_call(call)["arguments"] == {"unparsed": '{"a": '}
