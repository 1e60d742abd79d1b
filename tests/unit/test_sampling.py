"""What is said, before a batch, of calls whose sampling parameters keep them from being trained."""

import pytest

from turnwise.sampling import SUPPORT, count_not_trained, left_out_by, why_not_trained, with_numbers

GUIDANCE = "grammar_backend", "grammar_backend guidance"


@pytest.mark.parametrize(
    ("sampling", "name", "words"),
    [
        ({}, None, None),
        ({"temperature": 0.2, "top_p": 1.0, "top_k": -1, "tool_choice": "auto"}, None, None),
        ({"temperature": 0, "top_p": 0.9}, "greedy", "temperature 0"),
        ({"top_p": 0.9}, "top_p", "top_p 0.9"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, None, None),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice required"),
        ({"tool_choice": "required", "tool_grammar": {"type": "array"}}, None, None),
        ({"tool_grammar": True}, "tool_grammar", "strict tools"),
        ({"response_format": {"type": "json_object"}, "grammar_backend": "xgrammar"}, None, None),
        ({"response_format": {"type": "json_object"}, "grammar_backend": "guidance"}, *GUIDANCE),
        ({"tool_choice": "auto", "grammar_backend": "guidance"}, None, None),
        ({"top_p": "0.9"}, "top_p", "top_p 0.9"),
        ({"temperature": "warm"}, "temperature", "temperature warm"),
        ({"min_tokens": {}}, "min_tokens", "min_tokens"),
        ({"thinking_token_budget": [5]}, "thinking_token_budget", "thinking_token_budget"),
        ({"top_p": True, "top_k": False}, None, None),
    ],
)
def test_a_parameter_that_the_trainer_cannot_reproduce_is_named(sampling, name, words):
    assert (left_out_by(sampling, ()), why_not_trained(sampling, ())) == (name, words)


def test_a_truncated_turn_is_trained_where_its_support_is_stored():
    assert left_out_by({"top_p": 0.9}, [SUPPORT]) is None
    assert left_out_by({"top_p": 0.9, "temperature": 0}, [SUPPORT]) == "greedy"


def test_the_texts_of_numbers_become_numbers_and_nothing_else_changes():
    texts = {"temperature": "0", "top_p": " 0.9 ", "top_k": "5.0", "min_tokens": "2", "thinking_token_budget": "-1"}
    read = with_numbers(texts)
    assert read == {"temperature": 0, "top_p": 0.9, "top_k": 5, "min_tokens": 2, "thinking_token_budget": -1}
    assert isinstance(read["top_k"], int)
    others = {"top_p": "nan", "min_p": "much", "top_k": [1], "temperature": None, "user": "7"}
    assert with_numbers(others) == others


def test_the_turns_that_are_left_out_are_counted_by_reason():
    greedy, truncated, plain = ({"temperature": 0}, ()), ({"top_p": 0.5}, ()), ({}, ())
    assert count_not_trained([plain, ({"top_p": 0.5}, [SUPPORT])]) is None
    assert count_not_trained([greedy] * 2) == "2 of 2 turns are not trained: temperature 0."
    mixed = "3 of 4 turns are not trained: temperature 0 (2), top_p 0.5 (1)."
    assert count_not_trained([greedy, truncated, greedy, plain]) == mixed
