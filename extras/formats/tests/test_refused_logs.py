"""Logs that cannot tell what was said: their lines are refused, and no reply is guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.exchanged import CALL, CONVERSATION, HELLO, TOOLS, records, run_import
from turnwise_fake_engine import tokens

from turnwise.store.database import Database

USER, REPLY = HELLO["messages"]
CUT = "Hel... (litellm_truncated 5000 chars) ...lo"
MEDIA = "See @@@langfuseMedia:type=image/png|id=a|source=base64@@@"


def litellm(messages: list, reply: dict, finish: str = "stop", **fields: object) -> dict:
    choice = {"message": {"role": "assistant", **reply}, "finish_reason": finish}
    return {"call_type": "acompletion", "messages": messages, "response": {"choices": [choice]}, **fields}


def langfuse(given: object, output: object, **fields: object) -> dict:
    return {"type": "GENERATION", "input": given, "output": output, **fields}


def atif(*steps: dict, **fields: object) -> dict:
    first = {"step_id": 1, "source": "user", "message": "Hi"}
    return {"schema_version": "ATIF-v1.5", "steps": [first, *steps], **fields}


def agent(**fields: object) -> dict:
    return {"source": "agent", "message": "Hello", **fields}


SCORES = [{"name": "a", "value": 1.0}, {"name": "a", "value": 0.0}]
REFUSED = {
    "a prompt that LiteLLM cut": ("litellm", litellm([{"role": "user", "content": CUT}], REPLY), "litellm_truncated"),
    "a reply that LiteLLM cut": ("litellm", litellm([USER], {"content": CUT}), "litellm_truncated"),
    "an argument that LiteLLM cut": (
        "litellm",
        litellm([USER], {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": CUT})}}]}),
        "litellm_truncated",
    ),
    "texts that LiteLLM took out": ("litellm", litellm([USER], {"content": "redacted-by-litellm"}), "redacted"),
    "a reply that ended at its limit": ("litellm", litellm([USER], REPLY, "length"), "cut off"),
    **{
        f"a reply that ended with {reason}": ("litellm", litellm([USER], REPLY, reason), "cut off")
        for reason in ("MAX_TOKENS", "model_length", "error", "abort", "SAFETY")
    },
    "a message that ended at its limit": ("langfuse", langfuse([USER], REPLY | {"finish_reason": "length"}), "cut off"),
    "a response that is incomplete": (
        "langfuse",
        langfuse([USER], REPLY | {"incomplete_details": {"reason": "max_output_tokens"}}),
        "cut off",
    ),
    "two choices": (
        "litellm",
        {"messages": [USER], "response": {"choices": [{"message": REPLY}, {"message": REPLY | {"content": "Ho"}}]}},
        "2 choices",
    ),
    "scores that are no list": ("langfuse", langfuse([USER], "Hello", scores={"a": 1}), "not a list"),
    "a score of one of two generations": (
        "langfuse",
        {
            "id": "t",
            "observations": [langfuse([USER], "Hello", id="1"), langfuse([USER], "Ho", id="2")],
            "scores": [{"name": "a", "value": 1.0, "observationId": "1"}],
        },
        "one of 2 generations",
    ),
    "a part of Messages": ("litellm", litellm([USER], {"content": [{"type": "tool_use", "name": "f"}]}), "tool_use"),
    "a response without choices": ("litellm", {"messages": [USER], "response": {"choices": [None]}}, "cannot be read"),
    "a text that Langfuse cut": (
        "langfuse",
        langfuse([USER], "<truncated due to size exceeding limit>"),
        "truncated due to size",
    ),
    "media of Langfuse": ("langfuse", langfuse([{"role": "user", "content": MEDIA}], "Nice."), "langfuseMedia"),
    "messages as JSON that was cut": ("langfuse", langfuse('[{"role": "user", "content": "H', "Hello"), "was it cut"),
    "scores of one name without times": ("langfuse", langfuse([USER], "Hello", scores=SCORES), "several scores 'a'"),
    "a score that is not finite": (
        "langfuse",
        json.dumps(langfuse([USER], "Hello", scores=[{"name": "a", "value": float("nan")}])) + "\n",
        "NaN is not a finite number",
    ),
    "a score in a text that is not finite": (
        "langfuse",
        langfuse([USER], "Hello", scores='[{"name": "a", "value": 1e999}]'),
        "1e999 is not a finite number",
    ),
    "the beginning of a reply to LiteLLM": (
        "litellm",
        litellm([USER, REPLY], {"content": " there"}, call_type="anthropic_messages"),
        "follows the assistant's message 2",
    ),
    "the beginning of a reply to Langfuse": ("langfuse", langfuse([USER, REPLY], " there"), "follows the assistant's"),
    "a step that goes on with the one before": ("atif", atif(agent(), agent()), "follows the assistant's message 2"),
    **{
        f"a call of LangChain in {place}": (
            "langfuse",
            langfuse([USER, *before, *([USER] if before else [])], output),
            "additional_kwargs",
        )
        for place, before, output in [
            ("a prompt", [REPLY | {"additional_kwargs": {"tool_calls": [CALL]}}], "Hello"),
            ("a reply", [], REPLY | {"additional_kwargs": {"tool_calls": [CALL]}}),
        ]
    },
    "an observation without content": (
        "atif",
        atif(agent(observation={"results": [{"subagent_trajectory_ref": [{}]}]}), agent()),
        "no content",
    ),
    "a reward of a trajectory that is text": ("atif", atif(agent(), extra={"reward": "good"}), "reward"),
    "ids that are no list": (
        "atif",
        atif(agent(metrics={"prompt_token_ids": "ab", "completion_token_ids": "cd"})),
        "token ids",
    ),
    "a logprob that is null": (
        "atif",
        atif(agent(metrics={"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [None]})),
        "logprob",
    ),
    "arguments that were never parsed": (
        "atif",
        atif(agent(tool_calls=[{"function_name": "f", "arguments": {"unparsed": '{"a": '}}])),
        "not JSON",
    ),
}


@pytest.mark.parametrize(("format_name", "line", "named"), REFUSED.values(), ids=REFUSED)
def test_a_log_that_does_not_tell_what_was_said_is_refused_and_the_next_line_is_stored(
    format_name: str, line: dict | str, named: str, database: Database, tmp_path: Path, model: Path
) -> None:
    good = {"litellm": litellm([USER], REPLY), "langfuse": langfuse([USER], "Hello"), "atif": atif(agent())}
    report = run_import(tmp_path, model, [line, good[format_name]], format_name, status=1)
    assert (report["sessions"], [bad["line"] for bad in report["bad"]]) == (1, [1])
    assert named in report["bad"][0]["reason"]


def test_a_category_is_no_reward_and_the_newest_number_is_by_its_time(
    database: Database, tmp_path: Path, model: Path
) -> None:
    """10:30+02:00 is 08:30 UTC, before 09:00 UTC, although it comes later as text."""
    scores = [
        {"name": "style", "value": 0, "stringValue": "good", "dataType": "CATEGORICAL"},
        {"name": "tone", "value": 0, "stringValue": "good"},
        {"name": "right", "value": 1, "stringValue": "True", "dataType": "BOOLEAN"},
        {"name": "quality", "value": 0.25, "dataType": "NUMERIC", "timestamp": "2026-01-01T10:30:00+02:00"},
        {"name": "quality", "value": 0.75, "dataType": "NUMERIC", "timestamp": "2026-01-01T09:00:00Z"},
    ]
    run_import(tmp_path, model, [langfuse([USER], "Hello", scores=scores)], "langfuse")
    (record,) = records(database)
    assert {line.name: line.value for line in record.rewards} == {"right": 1.0, "quality": 0.75}


def test_a_score_of_a_trace_counts_beside_that_of_a_span(database: Database, tmp_path: Path, model: Path) -> None:
    calls = [langfuse([USER], "Hello", id="1"), {"type": "SPAN", "id": "2"}, langfuse([USER], "Ho", id="3")]
    scores = [{"name": "right", "value": 1}, {"name": "right", "value": 0, "observationId": "2"}]
    run_import(tmp_path, model, [{"id": "a", "observations": calls, "scores": scores}], "langfuse")
    assert [line.value for line in records(database)[0].rewards] == [1.0]


@pytest.mark.parametrize(
    "ended",
    [
        *({"finish_reason": "stop", "stop_reason": given} for given in (128009, "\n\nUser:")),
        *({"finish_reason": given} for given in ("eos_token", "COMPLETE", "TOOL_CALL", "STOP")),
        {"stop_reason": "end_turn"},
    ],
)
def test_a_reply_that_the_model_ended_is_imported_in_the_words_of_each_server(
    ended: dict, database: Database, tmp_path: Path, model: Path
) -> None:
    """Beside `finish_reason`, vLLM's `stop_reason` is the stop string or the further end token, whichever came."""
    line = {"messages": [USER], "response": {"choices": [{"message": REPLY, **ended}]}}
    assert run_import(tmp_path, model, [line], "litellm")["sessions"] == 1


def test_generations_of_a_trace_are_in_the_order_of_their_times(
    database: Database, tmp_path: Path, model: Path
) -> None:
    given = {"modelParameters": {"tools": TOOLS}}
    calls = [
        langfuse(CONVERSATION[:4], {"content": "Lea is."}, startTime="2026-01-01T09:00:00Z", **given),
        langfuse(
            CONVERSATION[:2], {"content": None, "tool_calls": [CALL]}, startTime="2026-01-01T10:30:00+02:00", **given
        ),
    ]
    run_import(tmp_path, model, [{"id": "a", "observations": calls}], "langfuse")
    (record,) = records(database)
    assert [turn.parent_turn_id for turn in record.turns] == [None, record.turns[0].turn_id]


def test_a_system_prompt_beside_the_messages_of_a_log_is_part_of_the_prompt(
    database: Database, tmp_path: Path, model: Path
) -> None:
    """Anthropic's requests have it there; LiteLLM writes `messages` as an empty object where it stores the request."""
    body = {"system": [{"type": "text", "text": "Be brief."}], "messages": [USER]}
    request = {"proxy_server_request": {"body": body}, "messages": "{}"}
    lines = [litellm([], REPLY, call_type="anthropic_messages") | request]
    run_import(tmp_path, model, lines, "litellm")
    run_import(tmp_path, model, [langfuse(body, "Hello")], "langfuse", name="langfuse.jsonl")
    expected = tokens.encode(tokens.render([{"role": "system", "content": "Be brief."}, USER], None))
    assert [view.prompt_token_ids.tolist() for record in records(database) for view in record.views()] == [expected] * 2


def test_steps_that_were_copied_from_another_trajectory_are_only_part_of_the_prompt(
    database: Database, tmp_path: Path, model: Path
) -> None:
    steps = [agent(message="One", is_copied_context=True), {"source": "user", "message": "More"}, agent(message="Two")]
    run_import(tmp_path, model, [atif(*steps)], "atif")
    assert [turn.response["content"] for turn in records(database)[0].turns] == ["Two"]
