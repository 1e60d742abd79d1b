"""Imports: each format becomes sessions with the template's tokens, once, and never as sampled ones."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.commands import invoke
from support.exchanged import CONVERSATION, HELLO, TOOLS, export, install_format, records, run_import
from support.ledger_samples import add_finished
from turnwise_fake_engine import running_fake_engine, tokens

from turnwise.chains import is_imported, is_trainable
from turnwise.exchange import plugins
from turnwise.features import pace, policies
from turnwise.store import claims, experiences, sessions
from turnwise.store.experiences import Shape
from turnwise.store.selection import SessionFilter


def test_replies_have_the_templates_tokens_and_extend_one_another(database, tmp_path, model):
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


def test_an_imported_reply_is_never_counted_as_sampled(database, tmp_path, model):
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


def test_only_a_claim_for_imported_groups_gets_them(database, tmp_path, model):
    """A trainer of another loss leaves them where they are, instead of dropping them."""
    run_import(tmp_path, model, [HELLO], "openai")
    add_finished(database, "sampled")
    with database.read() as conn:
        assert claims.num_claimable(conn) == (0, 1)
        assert claims.num_claimable(conn, with_imported=True) == (1, 1)
        assert pace.oldest_version_in_flight(conn, records(database)[0].session.created_at) is None
    claim = claims.claim(database, "rl", max_groups=9, lease_seconds=60)
    assert [group.group_id for group in claim.groups] == ["sampled"]
    claim = claims.claim(database, "sft", max_groups=9, lease_seconds=60, with_imported=True)
    with database.read() as conn:
        (experience,) = experiences.experiences_of_groups(
            conn, claim.group_pks, Shape(merge="chain", with_imported=True)
        )
    trained = experience.tokens[experience.loss_mask]
    assert trained.tolist() == tokens.encode("Hello<|im_end|>")
    assert np.isfinite(experience.logprobs).all()
    assert not experience.info["single"], "it fills the place of a group, not of one live session"


def test_a_second_import_adds_nothing_and_equal_lines_are_as_many_sessions(database, tmp_path, model):
    first = run_import(tmp_path, model, [HELLO, HELLO], "openai")
    assert (first["sessions"], first["already_there"]) == (2, 0)
    again = run_import(tmp_path, model, [HELLO, HELLO, {"messages": CONVERSATION, "tools": TOOLS}], "openai")
    assert (again["sessions"], again["already_there"]) == (1, 2)
    assert len(records(database)) == 3


@pytest.mark.parametrize("own", ["by hand", None, {}])
def test_a_session_with_other_metadata_under_imported_is_no_earlier_import(own, database, tmp_path, model):
    run_import(tmp_path, model, [HELLO], "openai")
    (record,) = records(database)
    with database.write() as conn:
        sessions.change_session(conn, dataclasses.replace(record.session, metadata={"imported": own}), {"metadata"})
    (bad,) = run_import(tmp_path, model, [HELLO], "openai", status=1)["bad"]
    assert f"was not imported, but there is {record.session.session_id!r}" in bad["reason"]


def test_a_message_with_weight_0_is_only_part_of_the_prompt(database, tmp_path, model):
    messages = [*HELLO["messages"], {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}]
    messages[1] = {**messages[1], "weight": 0}
    run_import(tmp_path, model, [{"messages": messages}], "openai")
    (record,) = records(database)
    (view,) = record.views()
    assert tokens.decode(view.turn.token_ids.tolist()) == "Ciao<|im_end|>"
    assert json.loads(export(tmp_path, "--format", "openai")) == {"messages": messages}


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
    "plain text": {"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"},
}


@pytest.mark.parametrize("row", [("openai", PREFERENCE), *(("hf", row) for row in ROWS.values())])
def test_a_preference_becomes_a_group_of_two(row, database, tmp_path, model):
    format_name, document = row
    run_import(tmp_path, model, [document], format_name)
    chosen, rejected = records(database)
    assert (chosen.session.reward, rejected.session.reward) == (1.0, 0.0)
    assert chosen.session.group_id == rejected.session.group_id is not None
    assert tokens.decode(chosen.turns[0].token_ids.tolist()) == "Hello!<|im_end|>"
    assert tokens.decode(rejected.turns[0].token_ids.tolist()) == "What?<|im_end|>"
    assert chosen.turns[0].prompt_delta.tolist() == rejected.turns[0].prompt_delta.tolist()
    with database.read() as conn:
        assert claims.num_claimable(conn, with_imported=True) == (1, 0)


def test_a_parquet_chat_set_is_read(database, tmp_path, model):
    import pyarrow
    import pyarrow.parquet

    rows = [
        HELLO | {"score": 0.5},
        {"messages": HELLO["messages"][:1], "score": 1.0},
    ]
    (tmp_path / "set" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "data" / "train.parquet")
    report = run_import(tmp_path, model, None, "hf", name="set", status=1)
    assert [(bad["line"], bad["reason"]) for bad in report["bad"]] == [(2, "it has no assistant message")]
    (record,) = records(database)
    assert (record.session.reward, record.turns[0].response["content"]) == (0.5, "Hello")


RUNS = """
from turnwise.errors import BadLine, SkippedLine

def key_of(document):
    return document.get("run")

def drafts_of(document):
    if document.get("messages") is None:
        raise BadLine("it has no messages")
    if not document["messages"]:
        raise SkippedLine("an empty call")
    conversation = {name: document.get(name) for name in ("messages", "trained", "tools")}
    return [{"conversations": [conversation], "task_id": "x"}]
"""
"""A format whose lines may be of one session."""


@pytest.fixture
def runs_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    site.mkdir()
    install_format(site, plugins.IMPORTS, "runs", RUNS)
    monkeypatch.syspath_prepend(site)
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()


def test_a_format_of_another_package_is_found_by_its_entry_point(runs_format, database, tmp_path, model):
    """Two calls of one run are one session; of the second call only the last reply is trained."""
    lines = [
        {"run": "1", "messages": CONVERSATION[:3], "tools": TOOLS},
        {"run": "1", "messages": CONVERSATION, "trained": [4], "tools": TOOLS},
        {"run": "2", "messages": []},
    ]
    report = run_import(tmp_path, model, lines, "runs")
    assert (report["sessions"], report["turns"], report["skipped"]) == (1, 2, {"an empty call": 1})
    assert records(database)[0].session.task_id == "x"


def test_a_session_with_a_bad_line_is_not_stored_in_part(runs_format, database, tmp_path, model):
    good = {"run": "1", "messages": HELLO["messages"]}
    report = run_import(tmp_path, model, [good, {"run": "1"}, {**good, "run": "2"}], "runs", status=1)
    assert [(bad["line"], "same session" in bad["reason"]) for bad in report["bad"]] == [(2, False), (1, True)]
    assert report["sessions"] == 1


FLAT = {"type": "function", **TOOLS[0]["function"]}


@pytest.mark.parametrize(
    "tool",
    [
        FLAT,
        FLAT | {"function": None},
        {"type": "function", "function": FLAT},
        {"function": FLAT | {"function": None}},
        {"type": "function", "function": TOOLS[0]},
        {"type": "function", "function": {"type": "function", "function": FLAT}},
    ],
    ids=["flat", "an empty function", "flat in a function", "neither", "nested twice", "flat in two functions"],
)
def test_a_flat_or_nested_tool_of_responses_is_the_same_as_one_of_chat_completions(tool, database, tmp_path, model):
    run_import(tmp_path, model, [{"messages": CONVERSATION, "tools": [tool]}], "openai")
    (record,) = records(database)
    assert record.turns[0].tools == TOOLS


def test_fields_of_langchain_that_are_empty_are_no_calls(database, tmp_path, model):
    empty = {"additional_kwargs": {"refusal": None}, "invalid_tool_calls": [], "tool_call_chunks": None}
    messages = [message | empty for message in CONVERSATION]
    run_import(tmp_path, model, [{"messages": messages, "tools": TOOLS}], "openai")
    assert len(records(database)) == 1


def test_openai_lines_are_exported_as_they_were_imported(database, tmp_path, model):
    lines = [{"messages": CONVERSATION, "tools": TOOLS}, HELLO]
    run_import(tmp_path, model, lines, "openai")
    assert [json.loads(line) for line in export(tmp_path, "--format", "openai").splitlines()] == lines


def test_imported_sessions_are_of_the_policy_that_is_named(database, tmp_path, model):
    """A policy of another tenant is not found."""
    with database.write() as conn:
        policy, _ = policies.create_policy(conn, "default", "support")
    refused = run_import(tmp_path, model, [HELLO], "openai", "--policy", "support", "--tenant", "other", status=2)
    assert "no policy 'support'" in refused["error"]
    run_import(tmp_path, model, [HELLO], "openai", "--policy", "support")
    assert [record.session.policy_id for record in records(database)] == [policy.policy_id]


def test_a_dry_run_stores_nothing(database, tmp_path, model):
    report = run_import(tmp_path, model, [HELLO], "openai", "--dry-run")
    assert report["sessions"] == 1
    command = ["import", str(tmp_path / "file.jsonl"), "--format", "openai", "--tokenizer", str(model), "--dry-run"]
    result = invoke(*command, "--database", f"sqlite:///{tmp_path}/turnwise.db")
    assert "would be stored" in result.stdout
    assert records(database) == []
    result = invoke(*command, "--database", f"sqlite:///{tmp_path}/none.db")
    assert "would be stored" in result.stdout
    assert not (tmp_path / "none.db").exists()


def test_the_engines_own_tokens_are_compared(database, tmp_path, model):
    with running_fake_engine() as engine:
        assert run_import(tmp_path, model, [HELLO], "openai", "--engine", engine.url)["sessions"] == 1
        other = tokens.write_tokenizer(tmp_path / "other")
        (other / "chat_template.jinja").write_text("{{ messages[-1].content }}")
        refused = run_import(tmp_path, other, [HELLO], "openai", "--engine", engine.url, status=1)
        assert "tokenises conversations differently" in refused["error"]
