"""The continuation over public chat templates from TRL's wheel: exact, or refused with a reason.

For every template and conversation, a reply is sampled in tokens that no tokenizer would choose, and the next turn is
requested. Outside of the sampled tokens, prompt + reply + continuation must equal the template's own rendering of the
whole conversation, or the continuation must refuse with a reason.
"""

import copy
import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from turnwise_fake_engine import tokens

from proxy.features.page.turns import scaffold_flags
from proxy.sessions.conversation import CALL_IDS, NAME
from proxy.sessions.template import ChatTemplate, Continued, Unsafe, fields_read
from turnwise.default_models.small_model import SmallModelSpec, train_tokenizer

TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
FAMILIES = {
    # template → the tokens that end a turn in that family
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "gemma": ["<end_of_turn>"],
    "gemma3": ["<end_of_turn>"],
    "gemma4": ["<turn|>"],
    "glm4moe": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "lfm2_2_5": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"],
    "llama3_2": ["<|eot_id|>", "<|eom_id|>"],
    "nemotron_3_nano": ["<|im_end|>"],
    "nemotron_3_super": ["<|im_end|>"],
    "phi3": ["<|end|>"],
    "phi3_5": ["<|end|>"],
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_end|>"],
}
SPECIAL = re.compile(
    r"<[|｜][^|｜<>\s]+[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|</?(?:start_of_turn|end_of_turn|bos|eos|think|tool_call)>|</?s>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look somebody up.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Who is Žofie — 誰?"}
NEXT = {"role": "user", "content": "And then?"}


def call(name: str, number: int) -> dict:
    arguments = json.dumps({"name": name}, ensure_ascii=False)
    return {"id": f"call_{number}", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def result(number: int) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": "look_up", "content": '{"boss": "Kim"}'}


TEXT = {"role": "assistant", "content": "Žofie is the boss — 社長."}
THOUGHT = {"role": "assistant", "content": "She leads.", "reasoning": "I recall the chart."}
ONE = {"role": "assistant", "content": "", "tool_calls": [call("Žofie", 0)]}
TWO = {"role": "assistant", "content": "", "tool_calls": [call("Ben", 0), call("Cleo", 1)]}
CASES = {
    # name → (messages before, the reply, messages after it, tools, whether the reply was cut by length)
    "system": ([SYSTEM, USER], TEXT, [NEXT], None, False),
    "plain": ([USER], TEXT, [NEXT], None, False),
    "cut": ([USER], TEXT, [NEXT], None, True),
    "later": ([USER, TEXT, NEXT], {"role": "assistant", "content": "Kim."}, [USER], None, False),
    "thinking": ([USER], THOUGHT, [NEXT], None, False),
    "tool": ([USER], ONE, [result(0)], TOOLS, False),
    "parallel": ([USER], TWO, [result(0), result(1)], TOOLS, False),
    "no call": ([USER], TEXT, [NEXT], TOOLS, False),
    "after tool": ([USER, ONE, result(0)], TEXT, [NEXT], TOOLS, False),
    "think+tool": ([USER], {**ONE, "reasoning": "Look first."}, [result(0)], TOOLS, False),
}


@functools.cache
def template_of(family: str) -> ChatTemplate:
    source = (TEMPLATES / f"{family}.jinja").read_text()
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = source
    specials = sorted({*SPECIAL.findall(source), *FAMILIES[family], "<s>", "</s>"})
    tokenizer.add_special_tokens(
        {"additional_special_tokens": specials, "bos_token": "<s>", "eos_token": FAMILIES[family][0]}
    )
    return ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in FAMILIES[family]], "string")


@functools.cache
def small_tokenizer():
    return train_tokenizer(SmallModelSpec())


def tokenise_by_character(template: ChatTemplate, text: str) -> list[int]:
    """Tokenise one character at a time, special tokens whole: a sampler may do this, a tokenizer would not."""
    pieces = re.split(f"({SPECIAL.pattern})", text)
    return [
        token
        for piece in pieces
        for part in ([piece] if SPECIAL.fullmatch(piece) else piece)
        for token in template.tokenise(part)
    ]


def spell(template: ChatTemplate, ids) -> str:
    return template.tokenizer.decode(ids, skip_special_tokens=False)


def rendered_reply(template: ChatTemplate, prompt: str, whole: str, reply: dict) -> tuple[str, str]:
    """Return what a model that follows the template samples: the reply up to its end, and the token that ends it."""
    text = whole[len(prompt) :] if whole.startswith(prompt) else reply["content"]
    ends = [(text.find(end), end) for end in template.ends.values() if end in text]
    if ends:
        return text[: min(ends)[0]], min(ends)[1]
    return text[: text.find(reply["content"]) + len(reply["content"])], next(iter(template.ends.values()))


def verdict(family: str, case: str, *, keep_thinking: bool) -> str:
    template, (before, reply, after, tools, cut) = template_of(family), CASES[case]
    try:
        whole = template.render([*before, reply, *after], tools, {}, generate=True)
        prompt = template.render(before, tools, {}, generate=True)
    except Unsafe:
        return "refused by the template"
    thinking = reply.get("reasoning", "")
    written, end = rendered_reply(template, prompt, whole, reply)
    if thinking and thinking not in written:
        written = f"<think>\n{thinking}\n</think>\n\n{written}"
    if cut:
        written = written[: written.index(reply["content"]) + len(reply["content"])]
    sampled = tokenise_by_character(template, written + ("" if cut else end))
    last = sampled[-1]
    try:
        between = template.next_ids(
            Continued([*before, reply, *after], len(before), last, thinking, tools, {}, keep_thinking)
        )
    except Unsafe as unsafe:
        return unsafe.reason
    spelled = spell(template, [*template.tokenise(prompt), *sampled, *between])
    tail = ("" if cut else end) + spell(template, between)
    if keep_thinking and (thinking not in whole or not whole.startswith(prompt)):
        # The thinking, or the empty block from the generation prompt, stays in the tokens; the template drops it.
        assert whole.endswith(tail), (whole, spelled)
        history = prompt if whole.startswith(prompt) else template.render(before, tools, {}, generate=False)
        assert whole.startswith(history), (whole, spelled)
        return "exact, thinking kept"
    assert spelled == whole, f"{family}, {case}: silently different\n{spelled!r}\n{whole!r}"
    assert np.asarray(between).dtype == np.int32
    return "exact"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep_thinking", [False, True], ids=["template", "keep"])
def test_next_turn_is_exact_or_starts_a_chain_with_a_reason(family, keep_thinking):
    verdicts = {case: verdict(family, case, keep_thinking=keep_thinking) for case in CASES}
    print(family, verdicts)
    exact, reasons = {"exact", "exact, thinking kept"}, {"template_unsafe", "thinking_stripped", "tokenizer_differs"}
    assert set(verdicts.values()) <= exact | reasons | {"refused by the template"}


def test_the_templates_of_widely_used_families_are_continued_exactly():
    for family in ("qwen2_5", "qwen3_instruct_2507", "llama3", "gemma", "phi3", "cohere", "glm4moe", "lfm2"):
        assert verdict(family, "plain", keep_thinking=False) == "exact", family
        assert verdict(family, "cut", keep_thinking=False) == "exact", family
    for family in ("qwen2_5", "qwen3_instruct_2507"):
        assert verdict(family, "tool", keep_thinking=False) == "exact", family
        assert verdict(family, "parallel", keep_thinking=False) == "exact", family
    assert verdict("qwen3", "thinking", keep_thinking=False) == "thinking_stripped"
    assert verdict("qwen3", "thinking", keep_thinking=True) == "exact, thinking kept"
    assert verdict("qwen3", "think+tool", keep_thinking=False) == "exact"


PRINTS_NAMES = "{% for m in messages %}<{{ m.name if m.name else m.role }}>{{ m.content }}{% endfor %}"
PRINTS_IDS = """{% for m in messages %}{% if m.role == "system" %}{{ raise_exception("no system") }}{% endif %}
{%- for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception("bad id") }}{% endif %}{{ c.id }}
{%- endfor %}{{ m.content }}{{ m.tool_call_id if m.role == "tool" }}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", set()),
        (PRINTS_NAMES, {NAME}),
        (PRINTS_IDS, {CALL_IDS}),
    ],
)
def test_the_fields_that_a_template_prints_are_detected_by_rendering(source, read):
    """Also for a template that refuses some conversations, or ids that are not nine characters long."""
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = source
    assert fields_read(ChatTemplate(tokenizer, [tokenizer.eos_token_id or 0], "string")) == read


def test_no_public_template_prints_names_or_ids():
    assert {family: fields_read(template_of(family)) for family in FAMILIES} == dict.fromkeys(FAMILIES, frozenset())


SPECIAL_IDS = frozenset(tokens.SPECIAL_IDS)


def shown(prompt: str, messages: list[dict]) -> list[str]:
    """Return the parts of a prompt that are told to be texts of messages; one token is one byte."""
    ids = tokens.encode(prompt)
    pieces = {each: tokens.decode([each]) for each in ids}
    flags = scaffold_flags(ids, messages, pieces, SPECIAL_IDS, tokens.decode)
    assert len(flags) == len(ids)
    grouped = itertools.groupby(zip(ids, flags, strict=True), key=lambda pair: pair[1])
    return [tokens.decode([each for each, _ in pairs]) for flag, pairs in grouped if not flag]


@pytest.mark.parametrize(
    ("prompt", "messages", "expected"),
    [
        (
            "<|im_start|>user\nWho is Žofie — 誰?<|im_end|>\n<|im_start|>assistant\n",
            [{"role": "user", "content": "Who is Žofie — 誰?"}],
            ["Who is Žofie — 誰?"],
        ),
        (
            "<|im_end|>\n<|im_start|>tool\nKim<|im_end|>\n<|im_start|>user\nAnd\n\nthen?<|im_end|>\n",
            [
                {"role": "tool", "content": " Kim\n"},
                {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
            ],
            ["Kim", "And\n\nthen?"],
        ),
        (
            "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n",
            [{"role": "assistant", "content": "Yes.", "reasoning": "Hm."}],
            ["Hm.", "Yes."],
        ),
        # The template has changed the text: only special tokens are told apart.
        (
            "<|im_start|>user\nCHANGED<|im_end|>\n",
            [{"role": "user", "content": "changed"}],
            ["user\nCHANGED", "\n"],
        ),
        ("<|im_start|>assistant\n", [{"role": "assistant", "content": None}], []),
        ("<|im_start|>user\n誰", [{"role": "user", "content": "誰"}], ["誰"]),
    ],
)
def test_the_texts_of_messages_are_distinguished_from_the_scaffold(prompt, messages, expected):
    assert shown(prompt, messages) == expected


class Characters:
    """A tokenizer that finds no special token in a text: each character is a token, and the end of a turn is five."""

    chat_template = ""
    all_special_tokens: list[str] = []  # noqa: RUF012  as the protocol has it

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, **_: object
    ) -> str:
        said_so_far = "".join(f"<{message['role']}>{message['content']}<end>" for message in conversation)
        return said_so_far + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("<end>" if token == END else chr(token) for token in token_ids)


END = 1000
"""What the engine samples at the end of a turn."""


def test_a_tokenizer_that_splits_the_end_of_a_turn_extends_only_a_reply_without_one():
    template = ChatTemplate(Characters(), [END], "string")
    messages = [{"role": role, "content": text} for role, text in (("user", "U"), ("assistant", "A"), ("user", "V"))]
    cut_at_a_length = Continued(
        messages=messages, replied=1, last_token=ord("A"), reasoning="", tools=None, arguments={}, keep_thinking=False
    )
    between = template.next_ids(cut_at_a_length)
    assert "".join(map(chr, between)) == "<end><user>V<end><assistant>"
    with pytest.raises(Unsafe) as refused:
        template.next_ids(cut_at_a_length._replace(last_token=END))
    assert refused.value.reason == "tokenizer_differs"
