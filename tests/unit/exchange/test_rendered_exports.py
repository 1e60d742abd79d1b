"""What the libraries of other trainers make of an export: with the model's template, the stored tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.exchanged import CALL, TOOLS, export, run_import
from support.migrated import new_database
from transformers import AutoTokenizer
from turnwise_fake_engine import tokens

from turnwise.store.database import Database

LINE_BREAK = tokens.encode("\n")
"""The template's, after a reply: an engine never samples it."""


def conversation(asked: str, said: str, arguments: dict | str = '{"name": "kim"}') -> list[dict]:
    function = {"name": "lookup", "arguments": arguments}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who is"}, {"type": "text", "text": "kim's boss?"}]},
        {"role": "assistant", "reasoning": "look it up", "tool_calls": [CALL | {"function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "lea"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": f"{said} again", "reasoning": "as before"},
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template of `reasoning_content`, the name that templates of models have."""
    directory = tokens.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    template = tokens.CHAT_TEMPLATE.replace("message.reasoning", "message.reasoning_content")
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = new_database(tmp_path / "turnwise.db")
    yield database
    database.close()


def store(tmp_path: Path, model: Path, *rows: dict) -> list[list[int]]:
    """Import rows of a data set; return the tokens of each stored conversation."""
    run_import(tmp_path, model, list(rows), "hf")
    views = [json.loads(line)["turns"][-1] for line in export(tmp_path, "--format", "sessions").splitlines()]
    return [view["prompt_token_ids"] + view["token_ids"] for view in views]


def loaded(tmp_path: Path, format_name: str) -> list[Any]:
    """Return the rows as TRL's users load them."""
    datasets = pytest.importorskip("datasets")
    export(tmp_path, "--format", format_name, "--output", str(tmp_path / f"{format_name}.jsonl"))
    files = str(tmp_path / f"{format_name}.jsonl")
    return list(datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache")))


def rendered_by_trl(row: dict, model: Path) -> dict[str, list[int]]:
    apply = pytest.importorskip("trl.data_utils").apply_chat_template
    fields = {name: row[name] for name in ("prompt", "completion", "chosen", "rejected") if name in row}
    texts = apply(fields, AutoTokenizer.from_pretrained(model), tools=row["tools"])
    return {name: tokens.encode(text) for name, text in texts.items()}


def test_trl_renders_prompt_and_completion_as_the_stored_tokens(database, tmp_path, model):
    """Calls with different arguments in one file too: none gets those of the others as nulls."""
    rows = [
        {"messages": conversation("And tom's?", "Lea.", arguments), "tools": TOOLS}
        for arguments in ('{"name": "kim"}', '{"names": ["kim", null], "depth": 2}', "{}")
    ]
    stored = store(tmp_path, model, *rows)
    for row, ids in zip(loaded(tmp_path, "trl"), stored, strict=True):
        rendered = rendered_by_trl(row, model)
        assert rendered["prompt"] + rendered["completion"] == ids + LINE_BREAK
        assert rendered["prompt"] == tokens.encode(tokens.render(row["prompt"], TOOLS))


def test_trl_renders_a_pair_as_the_stored_tokens_from_the_reply_where_it_parts(database, tmp_path, model):
    better, worse = conversation("And tom's?", "Lea."), conversation("And tom's?", "Lea.")
    worse[-1] = {"role": "assistant", "content": "No."}
    pair = {"prompt": better[:2], "chosen": better[2:], "rejected": worse[2:], "tools": TOOLS}
    stored = store(tmp_path, model, pair)
    (row,) = loaded(tmp_path, "trl-pairs")
    rendered = rendered_by_trl(row, model)
    for name, ids in zip(("chosen", "rejected"), stored, strict=True):
        assert rendered["prompt"] + rendered[name] == ids + LINE_BREAK
    assert [message["role"] for message in row["chosen"]] == ["assistant"]
