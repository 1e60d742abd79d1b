"""What a file cannot mean: a bad line is refused with its number, and no reply is guessed."""

import json
from pathlib import Path

import pytest
from support.commands import invoke
from support.exchanged import CALL, CONVERSATION, HELLO, TOOLS, install_format, records, run_import
from turnwise_fake_engine import tokens

from turnwise.exchange import plugins
from turnwise.store.database import Database

USER, REPLY = HELLO["messages"]
LOOK = [{"type": "function", "function": {"name": "look"}}]
HALF = "\ud83d"
"""Half of a surrogate pair: JSON has it as an escape, UTF-8 and tokenizers have not."""


def reply(**fields: object) -> dict:
    return {"messages": [USER, {"role": "assistant", **fields}]}


def called(**function: object) -> dict:
    return reply(tool_calls=[{"id": "c", "type": "function", "function": {"name": "look", **function}}])


def after(*messages: dict) -> dict:
    return {"messages": [USER, *messages, REPLY]}


def nested(depth: int) -> dict:
    return {"a": nested(depth - 1)} if depth else {}


BAD_OPENAI = {
    "a line that was cut": ("{broken\n", "not JSON"),
    "a line that is no object": ("[1]\n", "not a JSON object"),
    "no message": ({"messages": []}, "not a list of messages"),
    "no reply": ({"messages": [USER]}, "no assistant message"),
    "an unknown role": (after({"role": "wizard", "content": "Hi"}), "'wizard'"),
    "a picture": (after({"role": "user", "content": [{"type": "image_url"}]}), "'image_url'"),
    "a column of another trainer": (HELLO | {"tool_defs": "[]", "tools": None}, "the column 'tool_defs' beside"),
    "a pair with a column of its own": (
        {"input": {"messages": [USER], "system": "x"}, "preferred_output": [REPLY], "non_preferred_output": [REPLY]},
        "the column 'system' beside messages",
    ),
    "another format": ({"prompt": "x"}, "prompt"),
    "half of a surrogate pair in a reply": (reply(content=HALF), "cannot be read"),
    "half of a surrogate pair in a prompt": (
        {"messages": [{"role": "user", "content": HALF}, REPLY]},
        "cannot be read",
    ),
    "a tool that is nested too deep to be stored": (HELLO | {"tools": [{"name": "f", "parameters": nested(300)}]}, ""),
    "an unknown part": (reply(content=[{"type": "tool_use", "name": "f", "input": {}}]), "'tool_use'"),
    "a result among the parts": (
        after({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}),
        "result",
    ),
    "a part without text": (reply(content=[{"type": "text", "text": None}]), "'text'"),
    "arguments as Python writes them": (called(arguments="{'a': 1}"), "not JSON"),
    "arguments that were cut": (called(arguments='{"a": "b'), "not JSON"),
    "arguments that are a list": (called(arguments=[1]), "not a JSON object"),
    "arguments encoded twice": (called(arguments=json.dumps('{"a": 1}')), "not a JSON object"),
    "arguments under another name": (called(input={"a": 1}), "without arguments"),
    **{
        f"arguments of {text}": (called(arguments=text) | {"tools": LOOK}, named)
        for text, named in {
            '{"x": NaN}': "NaN is not",
            '{"x": [-Infinity]}': "-Infinity is not",
            '{"x": 1e999}': "1e999 is not",
            '{"x": 1, "x": 2}': "the name 'x' twice",
            '{"x": {"y": 1, "y": 1}}': "the name 'y' twice",
        }.items()
    },
    "a number of its arguments as an object": (
        json.dumps(called(arguments={"x": float("nan")}) | {"tools": LOOK}) + "\n",
        "NaN is not",
    ),
    "a number of a tool that is not finite": (HELLO | {"tools": '[{"name": "f", "x": 1e999}]'}, "1e999"),
    "a line with a name twice": ('{"messages": [], "messages": []}\n', "the name 'messages' twice"),
    "a tool that is no function": (HELLO | {"tools": [{"type": "custom", "name": "f"}]}, "not a function"),
    **{
        f"calls as {field} of {role}": (after({"role": role, "content": "x", field: value}), field)
        for role, field, value in [
            ("assistant", "additional_kwargs", {"tool_calls": [CALL]}),
            ("assistant", "additional_kwargs", {"function_call": CALL["function"]}),
            ("user", "additional_kwargs", "tool_calls"),
            ("assistant", "invalid_tool_calls", [{"name": "look", "args": "{"}]),
            ("assistant", "toolCalls", [CALL]),
            ("assistant", "tool_call", CALL),
            ("user", "tool_calls", [CALL]),
        ]
    },
    "an empty reply": (reply(content=""), "empty reply"),
    "a function call as text": (reply(content="I look.", function_call='look({"a": 1})'), "function_call"),
    "a function call beside tool calls": (
        reply(function_call={"name": "f", "arguments": "{}"}, tool_calls=[CALL]),
        "function_call",
    ),
    "two reasonings": (reply(content="x", reasoning="a", thinking="b"), "two reasonings"),
    "a content and another value": (reply(content="x", value="y"), "value"),
    "a refusal alone": (reply(content=None, refusal="No."), "empty reply"),
    "a tool message without content": (after({"role": "tool", "tool_call_id": "c", "result": "x"}), "no content"),
    "reasoning that is no text": (reply(content="x", reasoning={"summary": "y"}), "reasoning"),
    "pictures beside the text": ({"messages": [USER | {"images": ["a.png"]}, REPLY]}, "images"),
    "a weight of its own kind": ({"messages": [USER, REPLY | {"weight": 0.5}]}, "weight"),
    "a weight that is no number": ({"messages": [USER, REPLY | {"weight": "no"}]}, "weight"),
    "a tool of another API": (HELLO | {"tools": [{"name": "f", "input_schema": {}}]}, "a tool is"),
    "a tool without a name": (HELLO | {"tools": [{"type": "web_search"}]}, "a tool is"),
    "a tool whose parameters are no object": (HELLO | {"tools": [{"name": "f", "parameters": "[1]"}]}, "a tool is"),
    "a tool whose parameters are free text": (HELLO | {"tools": [{"name": "f", "parameters": "x"}]}, "not JSON"),
    "tools and functions": (HELLO | {"tools": [{"name": "f"}], "functions": [{"name": "g"}]}, "tools and functions"),
    **{
        f"reasoning as {field}": (reply(content="x", **{field: value}), f"reasoning as {field}")
        for field, value in {
            "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
            "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
            "thought": "hm",
        }.items()
    },
    **{
        f"a mark {field}": (reply(content="x", **{field: value}), field)
        for field, value in {"mask": True, "train_detail": [{"begin_offset": 0, "train": False}]}.items()
    },
    "a sender that is a list": ({"messages": [USER | {"from": ["gpt"]}, REPLY]}, "is from ['gpt']"),
    "a call without a tool": (called(arguments="{}"), "calls 'look', which its tools do not offer: none"),
    "a call of another tool": (called(arguments="{}") | {"tools": TOOLS}, "do not offer: lookup"),
    "the beginning of a reply": (after(REPLY), "follows the assistant's message 2"),
    "a role and another sender": ({"messages": [USER | {"from": "gpt"}, REPLY]}, "is from 'gpt'"),
}
BAD_ROWS = {
    **{f"a score of {value}": (HELLO | {"score": value}, "score") for value in ("good", "1_0", "", [1], 10**400, 2e6)},
    "two rewards": (HELLO | {"reward": 1, "score": 0.5}, "each of them is a reward"),
    "a label and a score that says something else": (HELLO | {"label": False, "score": "1.0"}, "each of them"),
    "a score that is not a number": ('{"messages": [], "score": NaN}\n', "NaN is not a finite number"),
    "an infinite reward": (json.dumps(HELLO | {"reward": float("inf")}) + "\n", "Infinity is not"),
    "the class of a row as its label": (HELLO | {"label": 3}, "a label that is a reward is 0 or 1"),
    **{
        f"a row with {column}": (row | {column: "x"}, f"the column {column!r} beside")
        for column, row in {
            "conversations": HELLO,
            "prompt": HELLO,
            "system": HELLO,
            "tool_defs": HELLO | {"tools": None},
            "functions": HELLO,
            "history": {"prompt": "Hi", "completion": "Ho"},
            "score": {"prompt": "Hi", "chosen": "a", "rejected": "b"},
            "completion_mask": HELLO,
            "images": HELLO,
            "chat_template_kwargs": HELLO,
        }.items()
    },
    "a pair without its prompt": ({"chosen": [USER, REPLY], "rejected": [USER, REPLY]}, "none of the forms"),
    "columns of Alpaca": ({"instruction": "a", "input": "b", "output": "c"}, "none of the forms"),
    "a conversation of another form": ({"messages": [{"input": "Hi", "output": "Hello"}]}, "the role None"),
    "a completion with its prompt": ({"prompt": "Hi", "completion": [USER, REPLY]}, "not where its prompt ends"),
    "a pair with its prompt twice": (
        {"prompt": "Hi", "chosen": [USER, REPLY], "rejected": "No"}, "not where its prompt ends",
    ),
    "a prompt that begins the reply": (
        {"prompt": [USER, REPLY], "completion": [REPLY | {"content": " there"}]}, "follows the assistant's message 2",
    ),
    "a prompt that begins both replies": (
        {"prompt": [USER, REPLY], "chosen": [REPLY], "rejected": [REPLY | {"content": "No"}]}, "follows the",
    ),
    "equal outputs": ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "no assistant message is left"),
}  # fmt: skip
CASES = [("openai", *case) for case in BAD_OPENAI.values()] + [("hf", *case) for case in BAD_ROWS.values()]


@pytest.mark.parametrize(("format_name", "line", "named"), CASES, ids=[*BAD_OPENAI, *BAD_ROWS])
def test_one_bad_line_is_reported_with_its_number_and_the_lines_beside_it_are_stored(
    format_name, line, named, database, tmp_path, model
):
    """A dry run reports the same. An empty line is left out and counted."""
    other = {"messages": [USER, REPLY | {"content": "Ho"}]}
    dry, stored = (
        run_import(tmp_path, model, [HELLO, "\n", line, other], format_name, *options, status=1)
        for options in (["--dry-run"], [])
    )
    assert dry == stored
    assert (stored["sessions"], [bad["line"] for bad in stored["bad"]]) == (2, [3])
    assert named in stored["bad"][0]["reason"]
    assert [record.turns[0].response["content"] for record in records(database)] == ["Hello", "Ho"]


RUNS = """
def key_of(document):
    return document["run"]

def drafts_of(document):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    ids = {"prompt_token_ids": [72], "token_ids": [72, 111], "logprobs": [-1.0, -2.0]} | document.get("ids", {})
    return [{"conversations": [{"messages": messages, "sampled": {1: ids}}], "rewards": document.get("rewards", {})}]
"""


@pytest.mark.parametrize(
    ("document", "named"),
    [
        *(({"ids": {"logprobs": given}}, "logprob") for given in ([None, -1.0], [1.0, -1.0], [-1.0], "ab")),
        *(({"ids": {"token_ids": given}}, "token ids") for given in ("Ho", [72, 1.5], [72, True], None, [], [-1, 72])),
        ({"ids": {"prompt_token_ids": [2**40]}}, "token ids"),
        ({"ids": {"prompt_token_ids": [tokens.VOCABULARY_SIZE]}}, "token ids"),
        *(({"rewards": {"r": given}}, "reward 'r'") for given in (10**400, 2e6, "good", [1])),
        ({"rewards": {"r": float("nan")}}, "NaN is not a finite number"),
        ({"run": {}}, "cannot be read"),
        ({"ids": {"strange": 1}}, "cannot be read"),
    ],
)
def test_a_bad_value_of_another_packages_format_is_a_bad_line(
    document: dict, named: str, database: Database, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    install_format(tmp_path / "site", plugins.IMPORTS, "odd", RUNS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    plugins.installed.cache_clear()
    lines = [{"run": "a"}, {"run": "b"} | document, {"run": "c"}]
    dry, stored = (run_import(tmp_path, model, lines, "odd", *options, status=1) for options in (["--dry-run"], []))
    plugins.installed.cache_clear()
    assert dry == stored
    assert (stored["sessions"], [bad["line"] for bad in stored["bad"]]) == (2, [2])
    assert named in stored["bad"][0]["reason"]


@pytest.mark.parametrize(
    ("value", "reward"),
    [("0.0", 0.0), ("1", 1.0), (" 0.25 ", 0.25), (True, 1.0), (False, 0.0), ("false", 0.0), (0, 0.0)],
)
def test_a_score_may_be_written_as_text(value, reward, database, tmp_path, model):
    run_import(tmp_path, model, [HELLO | {"score": value}], "hf")
    assert [record.session.reward for record in records(database)] == [reward]


@pytest.mark.parametrize(
    "mark",
    [
        *({"weight": "0"}, {"weight": 0.0}, {"weight": False}, {"train": "false"}, {"loss": False}),
        *({"training": False}, {"trainable": 0}, {"loss_mask": 0}, {"step_loss_mask": "0"}),
    ],
)
@pytest.mark.parametrize("shape", ["openai", "openai pair", "hf", "hf completion", "hf pair"])
def test_a_reply_that_is_marked_as_not_trained_is_not_trained(mark, shape, database, tmp_path, model):
    said = [REPLY | mark, {**USER, "content": "Bye"}, {"role": "assistant", "content": "Ciao"}]
    other = [{**REPLY, "content": "Ho"}, {**USER, "content": "Bye"}, {"role": "assistant", "content": "Go"}]
    row = {
        "openai": {"messages": [USER, *said]},
        "openai pair": {"input": {"messages": [USER]}, "preferred_output": said, "non_preferred_output": other},
        "hf": {"messages": [USER, *said]},
        "hf completion": {"prompt": [USER], "completion": said},
        "hf pair": {"prompt": "Hi", "chosen": said, "rejected": other},
    }[shape]
    run_import(tmp_path, model, [row], shape.partition(" ")[0])
    replies = [[turn.response["content"] for turn in record.turns] for record in records(database)]
    assert replies == ([["Ciao"], ["Ho", "Go"]] if "pair" in shape else [["Ciao"]])


FIRST = {"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}


def test_of_a_pair_that_parts_at_an_earlier_turn_everything_after_it_is_trained(database, tmp_path, model):
    """Both begin with the same question and reply; the outputs differ from the second question on."""
    chosen, rejected = (
        [*FIRST, {"role": "user", "content": asked}, {"role": "assistant", "content": said}, USER, REPLY]
        for asked, said in (("Two?", "2"), ("Three?", "4"))
    )
    openai = {"input": {"messages": [FIRST[0]]}, "preferred_output": chosen[1:], "non_preferred_output": rejected[1:]}
    for format_name, row in (
        ("hf", {"prompt": [FIRST[0]], "chosen": chosen[1:], "rejected": rejected[1:]}),
        ("openai", openai),
    ):
        run_import(tmp_path, model, [row], format_name, name=f"{format_name}.jsonl")
    said = [[turn.response["content"] for turn in record.turns] for record in records(database)]
    assert said == [["2", "Hello"], ["4", "Hello"]] * 2


TOOL = {"name": "f", "parameters": {"type": "object"}}
UNAMBIGUOUS = {
    "a null sender beside a role": ({"messages": [USER | {"from": None}, REPLY | {"from": "Alice"}]}, 1),
    "a null role beside a sender": ({"messages": [{"role": None, "from": "human", "value": "Hi"}, REPLY]}, 1),
    **{
        f"a result from {name}": ({"messages": [USER, {"from": name, "value": "{}"}, REPLY]}, 1)
        for name in ("function", "function_response", "observation")
    },
    "columns without a value": (HELLO | {"system": "", "images": [], "prompt": None, "metadata": {}}, 1),
    "a prompt and two texts": ({"prompt": "Hi", "chosen": "Hello", "rejected": "Ho"}, 2),
    "a result after the prompt": (
        {"prompt": [USER, {"role": "assistant", "tool_calls": [CALL]}],
         "completion": [{"role": "tool", "content": "x"}, REPLY]}, 1,
    ),
    "parameters as text and as an empty list": (
        HELLO | {"tools": [TOOL | {"parameters": '{"type": "object"}'}, TOOL | {"parameters": []}]}, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "number"), UNAMBIGUOUS.values(), ids=UNAMBIGUOUS)
def test_what_can_be_read_in_one_way_only_is_imported(row, number, database, tmp_path, model):
    run_import(tmp_path, model, [row], "hf")
    assert [record.turns[-1].response["content"] for record in records(database)] == ["Hello", "Ho"][:number]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_may_begin_with_a_byte_order_mark(encoding, indent, database, tmp_path, model):
    (tmp_path / "file.json").write_text(json.dumps([HELLO, HELLO], indent=indent), encoding=encoding)
    report = run_import(tmp_path, model, None, "openai", name="file.json")
    assert (report["lines"], report["sessions"]) == (2, 2)


def test_a_json_file_may_be_one_object_over_several_lines_or_one_a_line(database, tmp_path, model):
    (tmp_path / "one.json").write_text(json.dumps(HELLO, indent=2))
    assert run_import(tmp_path, model, None, "openai", name="one.json")["sessions"] == 1
    (tmp_path / "lines.json").write_text(json.dumps(HELLO) + "\n{broken\n")
    report = run_import(tmp_path, model, None, "openai", name="lines.json", status=1)
    assert (report["lines"], report["already_there"], report["num_bad"]) == (2, 1, 1)


def test_a_row_whose_reward_is_null_is_not_imitated_beside_scored_ones(database, tmp_path, model):
    """It gets none, and is counted, in each column and form; a row without such a column gets the default."""
    given = ({"reward": None}, {"score": None, "label": None}, {"reward": 0.5, "score": None}, {})
    forms = (
        lambda text: {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]},
        lambda text: {"prompt": "Hi", "completion": text},
    )
    lines = [form(f"{n}{m}") | each for n, form in enumerate(forms) for m, each in enumerate(given)]
    report = run_import(tmp_path, model, lines, "hf")
    assert (report["sessions"], report["num_unscored"]) == (8, 4)
    found = {record.turns[0].response["content"]: record.session.reward for record in records(database)}
    assert found == {f"{n}{m}": reward for n in range(2) for m, reward in enumerate((None, None, 0.5, 1.0))}


def test_a_parquet_row_with_a_value_that_python_cannot_read_is_a_bad_line(database, tmp_path, model):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"Hi", b"\xff", b"Hi"]).cast(pyarrow.binary()).view(pyarrow.string())
    columns = {"prompt": texts, "completion": ["Hello"] * 3, "score": [0.5, 0.5, float("nan")]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    report = run_import(tmp_path, model, None, "hf", name="rows.parquet", status=1)
    assert (report["sessions"], [bad["line"] for bad in report["bad"]]) == (1, [2, 3])


def test_a_template_that_ends_a_turn_without_the_models_end_token_is_warned_of(database, tmp_path):
    """The reply is trained up to the template's last character, a line break that an engine never samples."""
    other = tokens.write_tokenizer(tmp_path / "other")
    template = tokens.CHAT_TEMPLATE.replace("'<|im_end|>\\n'", "'</tool_response>\\n'")
    (other / "chat_template.jinja").write_text(template)
    report = run_import(tmp_path, other, [HELLO, {"messages": CONVERSATION, "tools": TOOLS}], "openai")
    assert report["num_unended"] == 3
    command = ["import", str(tmp_path / "file.jsonl"), "--format", "openai", "--tokenizer", str(other), "--tenant", "b"]
    shown = invoke(*command, "--database", f"sqlite:///{tmp_path}/turnwise.db")
    assert "without an end token of the model" in shown.stderr


def test_what_the_template_leaves_out_of_a_reply_makes_a_bad_line(database, tmp_path):
    other = tokens.write_tokenizer(tmp_path / "other")
    template = tokens.CHAT_TEMPLATE.replace("message.reasoning %}", "false %}").replace("message.tool_calls or", "")
    (other / "chat_template.jinja").write_text(template)
    lines = [reply(content="x", reasoning="because"), reply(content="x", tool_calls=[CALL]), HELLO]
    report = run_import(tmp_path, other, lines, "openai", status=1)
    assert [(bad["line"], "leaves 'because'" in bad["reason"]) for bad in report["bad"]] == [(1, True), (2, False)]


@pytest.mark.parametrize("value", ["nan", "inf", "1e9"])
def test_a_reward_on_the_command_line_is_a_number_of_the_ledger(value, database, tmp_path, model):
    assert "--reward" in run_import(tmp_path, model, [HELLO], "openai", "--reward", value, status=2)["error"]
