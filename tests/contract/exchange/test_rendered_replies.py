"""What a chat template makes of a reply, and of the messages before it: each part in order; else the line is bad."""

import json
from pathlib import Path

import pytest
from support.commands import invoke
from support.exchanged import CALL, HELLO, TOOLS, records, run_import
from turnwise_fake_engine import tokens

USER, REPLY = HELLO["messages"]
SAID = REPLY | {"content": "I lookup kim."}
"""A text in which the name of the call occurs."""


def with_template(directory: Path, template: str) -> Path:
    tokens.write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def published(name: str) -> str:
    """The template of a published model, without a token at the beginning, which the stand-in's tokenizer has not."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text().replace("bos_token", "''")


def row(reply: dict, **fields: object) -> dict:
    return {"messages": [USER, reply], "tools": TOOLS, **fields}


@pytest.mark.parametrize("name", ["cohere", "cohere2", "gemma", "gemma3", "llama3", "phi3", "phi3_5", "qwen2_5_vl"])
def test_a_call_that_the_template_leaves_out_is_missed_although_the_text_has_its_name(name, database, tmp_path):
    template = published(name)
    content = [{"type": "text", "text": SAID["content"]}] if "item['text']" in template else SAID["content"]
    lines = [row(SAID | {"content": content, "tool_calls": [CALL]}), row(REPLY)]
    report = run_import(tmp_path, with_template(tmp_path / "other", template), lines, "openai", status=1)
    assert [(bad["line"], "leaves 'lookup' out" in bad["reason"]) for bad in report["bad"]] == [(1, True)]
    assert [record.turns[0].response["content"] for record in records(database)] == ["Hello"]


ARGUMENTS = '{"names": ["kim", "lookup"], "of": {"lookup": "lookup"}, "depth": 2}'
TEXT = "{% if message.content %}{{- message.content }}{% endif %}"
RENDERED = "{{- call.name + ' ' + (call.arguments | tojson) }}"


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (TEXT + RENDERED, None),
        (TEXT + RENDERED + RENDERED, "'lookup' of the reply twice"),
        (RENDERED + TEXT, "another order"),
        (TEXT + "{{- call.name + ' ' + (call.arguments.values() | list | tojson) }}", "leaves 'names' out"),
        (TEXT + "{{- call.name }} {{ call.arguments.keys() | join(' ') }} kim", "leaves 'kim' out"),
        (RENDERED, "leaves 'I lookup kim.' out"),
    ],
)
def test_each_part_of_a_reply_is_rendered_once_and_in_order(reply, named, database, tmp_path):
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.tool_calls %}"
        "{% set call = message.tool_calls[0].function %}" + reply + "{% else %}" + TEXT + "{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = CALL | {"function": {"name": "lookup", "arguments": ARGUMENTS}}
    lines = [row(SAID | {"tool_calls": [call]})]
    model = with_template(tmp_path / "other", template)
    report = run_import(tmp_path, model, lines, "openai", status=0 if named is None else 1)
    assert [named in bad["reason"] for bad in report["bad"]] == ([] if named is None else [True])


def test_a_template_that_ends_a_conversation_after_its_reply_trains_one_end(database, tmp_path):
    """Phi's does: the model stops at the end of the turn, and the end of the text follows in no prompt."""
    template = published("phi3").replace("<|end|>", "<|im_end|>").replace("eos_token", "'<|endoftext|>'")
    model = with_template(tmp_path / "phi", template)
    ends = [tokens.SPECIAL_IDS["<|im_end|>"], tokens.SPECIAL_IDS["<|endoftext|>"]]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    report = run_import(tmp_path, model, [{"messages": [USER, REPLY, USER, SAID]}], "openai")
    (record,) = records(database)
    assert report["num_unended"] == 0
    assert [tokens.decode(turn.token_ids.tolist()) for turn in record.turns] == [
        "Hello<|im_end|>",
        "I lookup kim.<|im_end|>",
    ]
    assert record.turns[1].parent_turn_id == record.turns[0].turn_id


@pytest.mark.parametrize("said", ["Hello<|im_end|>", "Hello<|im_end|>\n<|im_start|>user\nBye"])
def test_a_text_with_the_models_end_token_is_no_reply(said, database, tmp_path, model):
    report = run_import(tmp_path, model, [row(REPLY | {"content": said})], "openai", status=1)
    assert "'<|im_end|>', which ends a reply" in report["bad"][0]["reason"]


def test_texts_that_look_alike_and_blank_ones_are_imported(database, tmp_path, model):
    """Equal texts in several places, arguments that are empty, and white space that a template leaves out."""
    calls = [CALL | {"function": {"name": "lookup", "arguments": text}} for text in ('{"lookup": "lookup"}', "{}", "")]
    said = row({"role": "assistant", "content": "lookup", "reasoning": "lookup", "tool_calls": calls})
    run_import(tmp_path, model, [said, row(REPLY | {"reasoning": " \n", "content": " Hello "})], "openai")
    assert len(records(database)) == 2


LATER = [
    {"role": "system", "content": "Be brief."},
    USER,
    SAID | {"tool_calls": [CALL], "weight": 0},
    {"role": "tool", "tool_call_id": "call_1", "content": "lea"},
    {"role": "user", "content": "Thanks, and who is lea?"},
    REPLY,
]
START, STOP = "<|im_start|>{{ message.role }}\n", "<|im_end|>\n{% endfor %}"
CALLS = "{% for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOLD = "{{ tools | tojson }}"


def of_messages(shown: str, messages: str = "messages") -> str:
    return "{% for message in " + messages + " %}" + START + shown + STOP + ASKED


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (TOLD + of_messages(TEXT + CALLS), None),
        (
            TOLD + of_messages("{% if message.role != 'system' %}" + TEXT + CALLS + "{% endif %}"),
            "'Be brief.' of message 1",
        ),
        (TOLD + of_messages(TEXT + CALLS, "[messages[0]] + messages[2:]"), "'Hi' of message 2"),
        (
            TOLD + of_messages("{% if message.tool_calls %}" + CALLS + "{% else %}" + TEXT + "{% endif %}"),
            "of message 3",
        ),
        (TOLD + of_messages(TEXT), "'lookup' of message 3"),
        (TOLD + of_messages(TEXT + CALLS, "messages[2:4] + messages[:2] + messages[4:]"), "moves message 2"),
    ],
)
def test_a_prompt_has_each_message_before_the_reply_in_order(template, named, database, tmp_path):
    model = with_template(tmp_path / "other", template)
    lines = [{"messages": LATER, "tools": TOOLS}]
    report = run_import(tmp_path, model, lines, "openai", status=0 if named is None else 1)
    assert [named in bad["reason"] for bad in report["bad"]] == ([] if named is None else [True])
    assert report["num_without_tools"] == 0


@pytest.mark.parametrize(
    ("template", "number"),
    [
        (TOLD + of_messages(TEXT + CALLS), 0),
        (TOLD + of_messages("{% if message.role != 'tool' %}" + TEXT + CALLS + "{% endif %}"), 1),
        (of_messages(TEXT + CALLS), 1),
        ("{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + of_messages(TEXT + CALLS), 1),
        (TOLD + of_messages(TEXT + CALLS, "messages[1:2] + messages[:1] + messages[2:]"), 0),
    ],
    ids=["all", "no results", "no schemas", "no parameters", "a system text behind the user's"],
)
def test_replies_whose_prompt_lacks_what_tools_say_are_counted_and_warned_of(template, number, database, tmp_path):
    model = with_template(tmp_path / "other", template)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": schema}}]
    lines = [{"messages": LATER, "tools": tools}]
    assert run_import(tmp_path, model, lines, "openai")["num_without_tools"] == number
    command = ["import", str(tmp_path / "file.jsonl"), "--format", "openai", "--tokenizer", str(model), "--tenant", "b"]
    shown = invoke(*command, "--database", f"sqlite:///{tmp_path}/turnwise.db")
    assert ("without all results and schemas" in shown.stderr) is bool(number)
