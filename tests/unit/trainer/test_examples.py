"""Replies to examples: sampled as an engine would sample them, read as text and calls, and judged by their checks."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from support.engine_sampling import processed_logits
from support.tiny_models import VOCABULARY, add_words, load_model, make_model

from trainer.features.examples.checks import Checks, ExampleRules, Reply, read_reply, right_of
from trainer.features.examples.gate import Compared, judge
from trainer.features.examples.playing import Answering, Asked, Player, of_model
from trainer.features.supports.turns import Vocabulary
from turnwise.features.examples import Example
from turnwise.features.statistics.pairs import Right

PROMPT = np.array([5, 9, 14, 3], np.int32)
NUM_DRAWN = 4000


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return add_words(make_model(tmp_path_factory.mktemp("words")))


@pytest.fixture(scope="module")
def loaded(words):
    return load_model(words)


@pytest.fixture(scope="module")
def player(words, loaded):
    return Player(of_model(loaded), Vocabulary(str(words)))


def asked(most_tokens: int = 12, **sampling) -> Asked:
    return Asked(prompt=PROMPT, sampling=sampling, most_tokens=most_tokens)


def test_a_greedy_reply_is_the_one_that_transformers_generates(player, loaded):
    generated = loaded.generate(torch.tensor(PROMPT[None].astype(np.int64)), max_new_tokens=12, do_sample=False)
    assert player.answers(asked(temperature=0), 2, "s") == [generated[0, len(PROMPT) :].tolist()] * 2


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"temperature": 1.3, "top_p": 0.6},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5, "logit_bias": {"7": 2.0}, "top_k": 20},
        {"allowed_token_ids": [3, 5, 9]},
        {"bad_words": ["w3"], "min_tokens": 2, "temperature": 2.0},
    ],
    ids=",".join,
)
def test_tokens_are_drawn_from_the_distribution_that_the_call_asked_for(player, loaded, sampling):
    """The first token of many answers beside one that is written token by token; five standard errors are allowed."""
    with torch.no_grad():
        logits = loaded(torch.tensor(PROMPT[None].astype(np.int64))).logits[0, -1]
    named = {"bad_words": [[3]] if "bad_words" in sampling else [], "ends": [0]}
    plain = {name: value for name, value in sampling.items() if name not in ("top_k", "top_p", "min_p")}
    p = _truncated(processed_logits(logits, PROMPT.tolist(), [], plain, **named).softmax(-1).numpy(), sampling)
    drawn = Counter(reply[0] for reply in player.answers(asked(1, **sampling), NUM_DRAWN, "s"))
    found = np.array([drawn[token] for token in range(VOCABULARY)]) / NUM_DRAWN
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(p))
    assert np.abs(found - p).max() <= 5 * np.sqrt(0.25 / NUM_DRAWN)


def _truncated(p: np.ndarray, sampling: dict) -> np.ndarray:
    order = np.argsort(-p)
    left = set(order.tolist())
    left &= {token for token in left if p[token] >= sampling.get("min_p", 0.0) * p.max()}
    left &= set(order[: sampling.get("top_k", len(p))].tolist())
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    left &= set(order[before < sampling.get("top_p", 1.1)].tolist())
    kept = np.where([token in left for token in range(len(p))], p, 0)
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("sampling", "length"),
    [
        ({"max_tokens": 3, "ignore_eos": True}, 3),
        ({"max_tokens": 30, "max_completion_tokens": 4, "ignore_eos": True}, 4),
        ({"ignore_eos": True}, 12),
        ({"allowed_token_ids": [0]}, 1),
        ({"allowed_token_ids": [8], "stop_token_ids": [8]}, 1),
        ({"allowed_token_ids": [8], "stop": ["w8 w8"]}, 2),
        ({"allowed_token_ids": [8], "stop": "w8"}, 1),
    ],
)
def test_a_reply_ends_where_the_call_s_would(player, sampling, length):
    assert {len(reply) for reply in player.answers(asked(**sampling), 3, "s")} == {length}


def test_a_prompt_that_the_model_cannot_compute_is_named_instead(player, loaded, tmp_path):
    for prompt, named in (([VOCABULARY], f"token {VOCABULARY}"), ([1] * 256, "fills the model's 256 positions")):
        wanted = Asked(prompt=np.array(prompt, np.int32), sampling={}, most_tokens=12)
        assert named in player.why_not(wanted)
    assert player.why_not(asked()) is None
    nearly = Asked(prompt=np.array([1] * 253, np.int32), sampling={"ignore_eos": True}, most_tokens=12)
    assert [len(reply) for reply in player.answers(nearly, 2, "s")] == [3, 3]
    assert "tokenizer cannot be loaded" in Player(of_model(loaded), Vocabulary(str(tmp_path))).why_not(asked())


def test_a_seed_names_the_answers_and_an_architecture_without_a_cache_gives_the_same_ones(player, words, loaded):
    class WithoutCache(Answering):
        def behind(self, tokens, _):
            return super().behind(tokens, None)[0], None

    with_cache = of_model(loaded)
    own = (getattr(with_cache, each.name) for each in dataclasses.fields(Answering))
    other = Player(WithoutCache(*own), Vocabulary(str(words)))
    first = player.answers(asked(temperature=1.0), 4, "a")
    assert player.answers(asked(temperature=1.0), 4, "a") == first == other.answers(asked(temperature=1.0), 4, "a")
    assert player.answers(asked(temperature=1.0), 4, "b") != first


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("Hello.", Reply("Hello.", [])),
        ('<think>a {"name": "x"}</think>\n\nHello.', Reply("Hello.", [])),
        (
            'Let me.\n<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>',
            Reply("Let me.", [("look", {"a": 1})]),
        ),
        ('{"name": "look", "parameters": {"a": [1]}}', Reply("", [("look", {"a": [1]})])),
        (
            '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": "{\\"c\\": 2}"}]',
            Reply("", [("a", {}), ("b", {"c": 2})]),
        ),
        (
            "<tool_call><function=look>\n<parameter=a>\n1\n</parameter>\n</function></tool_call>",
            Reply("", [("look", {"a": 1})]),
        ),
        ('It is {"name": "look"} or [1, {', Reply('It is {"name": "look"} or [1, {', [])),
    ],
)
def test_a_reply_is_read_as_its_text_and_its_calls(text, reply):
    assert read_reply(text, {}) == reply


EXAMPLE = Example(
    example_id="t",
    tenant="default",
    policy_id=0,
    criterion={"kind": "not_again"},
    prompt=PROMPT,
    reply=PROMPT,
    sampling={},
    messages=[{"role": "user", "content": "Question"}],
    tools=None,
    response={},
)
CALL = '<tool_call>{"name": "look", "arguments": {"a": 1, "b": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("criterion", "pinned", "text", "is_right"),
    [
        ({"kind": "not_again"}, "It is four.", "It is  four.\n", False),
        ({"kind": "not_again"}, "It is four.", "It is five.", True),
        ({"kind": "not_again"}, CALL, f"I look.{CALL}", False),
        ({"kind": "not_again"}, CALL, CALL.replace("1", "2"), True),
        ({"kind": "not_again"}, "It is four.", f"It is four.{CALL}", True),
        ({"kind": "text", "equals": "It is four."}, "", "It is\nfour.", True),
        ({"kind": "text", "equals": "It is four."}, "", "It is four. Or five.", False),
        ({"kind": "text", "contains": "four"}, "", "It is four. Or five.", True),
        ({"kind": "tool_call", "name": "look"}, "", CALL, True),
        ({"kind": "tool_call", "name": "look", "arguments": {"a": 1}}, "", CALL, True),
        ({"kind": "tool_call", "name": "look", "arguments": {"a": 2}}, "", CALL, False),
        ({"kind": "tool_call", "name": "look", "arguments": {"c": None}}, "", CALL, False),
        ({"kind": "tool_call", "name": "see"}, "", CALL, False),
    ],
)
def test_a_check_passes_what_it_says(tmp_path, criterion, pinned, text, is_right):
    checks, example = Checks(ExampleRules(), tmp_path / "log"), dataclasses.replace(EXAMPLE, criterion=criterion)
    assert right_of(checks, example, [text], pinned) == [is_right]


def test_without_its_setting_a_command_or_a_rubric_is_not_judged_and_the_reason_names_the_setting(tmp_path):
    checks = Checks(ExampleRules(), tmp_path / "log")
    for criterion, setting in (
        ({"kind": "command", "name": "run"}, "examples.commands"),
        ({"kind": "rubric", "rubric": "good"}, "`judge_url` is set in [reward]"),
    ):
        assert setting in checks.why_not_judged(dataclasses.replace(EXAMPLE, criterion=criterion))


def compared(*answers: tuple[int, int | None]) -> list[Compared]:
    return [
        Compared(f"e{number}", Right(now, 5), None if before is None else Right(before, 5))
        for number, (now, before) in enumerate(answers)
    ]


def test_a_version_that_answers_worse_fails_and_the_reason_names_what_it_lost_most():
    verdict = judge(compared((5, 5), (1, 5), (0, 5)), 7, look=1, must_mend=False)
    assert verdict.reason.startswith("it answers 2 of 3 pinned examples worse than version 7 did (p = ")
    assert verdict.reason.endswith("e2 (5 of 5, now 0 of 5), e1 (5 of 5, now 1 of 5)")


def test_each_further_version_beside_the_same_one_needs_more():
    """One of 252: below 0.05 / 2 for the first version beside another one, above 0.05 / 20 for the fourth."""
    lost = compared((0, 5), (5, 5))
    assert judge(lost, 7, look=1, must_mend=True).reason is not None
    assert judge(lost, 7, look=4, must_mend=True).reason is None


@pytest.mark.parametrize(
    ("answers", "fails"), [((0, 0), True), ((0, None), True), ((1, 0), False), ((5, None), False), ((0, 1), False)]
)
def test_an_example_that_nobody_answers_right_stops_a_version_only_where_it_must_mend(answers, fails):
    must, need_not = (judge(compared((5, 5), answers), 7, look=1, must_mend=must_mend) for must_mend in (True, False))
    assert (must.reason is not None, need_not.reason) == (fails, None)
    assert not fails or "still fails 1 of 2 pinned examples: e1 (" in must.reason
