"""A version answers the pinned examples before it is published, and is judged beside the one that is served."""

import stat

import numpy as np
import pytest
from support.tiny_models import add_words, load_model, make_model
from support.trainer_ledger import Rollouts, settings_for, train

from trainer.features.examples.checks import Checks, ExampleRules
from turnwise.errors import GraderFailed
from turnwise.features import examples
from turnwise.features.examples import Example
from turnwise.store import versions
from turnwise.types import DEFAULT_POLICY

ANYTHING = {"kind": "text", "contains": "w"}
NOTHING = {"kind": "text", "contains": "never"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_words(make_model(tmp_path_factory.mktemp("words")))


def play_and_pin(ledger, model, *checks: dict) -> None:
    rollouts = Rollouts(ledger, load_model(model), sampling={"max_tokens": 2})
    rollouts.play("g", num_groups=6)
    with ledger.write() as conn:
        for number, check in enumerate(checks):
            examples.pin(conn, "default", f"g-{number}-0-t0", check)


def errors(ledger) -> dict[int, str | None]:
    with ledger.read() as conn:
        return {each.version: each.error for each in versions.list_versions(conn, limit=9, policy_ids=[0])[0]}


def answers(ledger) -> list[dict]:
    with ledger.read() as conn:
        return [each.answers for each in examples.of_policy(conn, DEFAULT_POLICY)]


def test_a_version_that_still_fails_a_pinned_example_is_failed_until_it_is_unpinned(tmp_path, model, ledger):
    play_and_pin(ledger, model, ANYTHING, NOTHING)
    settings = settings_for(tmp_path, model, total_batches=1, examples={"must_mend": True})
    state = train(settings)
    assert errors(ledger)[1] == (
        "refused by the publishing gate: it still fails 1 of 2 pinned examples: g-1-0-t0 (0 of 5, now 0 of 5)"
    )
    assert (state.metrics["examples_num"], state.metrics["examples_right"]) == (2, 0.5)
    assert answers(ledger) == [{"0": [5, 5], "1": [5, 5]}, {"0": [0, 5], "1": [0, 5]}]
    with ledger.write() as conn:
        examples.unpin(conn, "default", "g-1-0-t0")
    train(settings_for(tmp_path, model, total_batches=2))
    assert errors(ledger)[2] is None


def test_a_version_that_lost_what_the_one_before_it_answered_right_is_failed(tmp_path, model, ledger):
    """Two examples that version 0 answered right five times of five, as it is kept with them."""
    play_and_pin(ledger, model, NOTHING, NOTHING, ANYTHING)
    with ledger.write() as conn:
        for example in examples.of_policy(conn, DEFAULT_POLICY):
            examples.add_answers(conn, example, 0, 5, 5)
    train(settings_for(tmp_path, model, total_batches=1, examples={"must_mend": False}))
    assert errors(ledger)[1].startswith(
        "refused by the publishing gate: it answers 2 of 3 pinned examples worse than version 0 did (p = 1.6e-05)"
    )


def test_without_a_number_of_answers_nothing_is_played(tmp_path, model, ledger):
    play_and_pin(ledger, model, NOTHING)
    state = train(settings_for(tmp_path, model, total_batches=1, examples={"answers": 0}))
    assert errors(ledger)[1] is None
    assert ("examples_num" in state.metrics, answers(ledger)) == (False, [{}])


def test_an_example_that_cannot_be_judged_is_left_out_and_named(tmp_path, model, ledger, caplog):
    play_and_pin(ledger, model, ANYTHING, {"kind": "rubric", "rubric": "good"})
    state = train(settings_for(tmp_path, model, total_batches=1))
    assert (state.metrics["examples_num"], state.metrics["examples_left_out"]) == (1, 1)
    assert "leaves out example g-1-0-t0: no `judge_url` is set in [reward]" in caplog.text


def test_a_command_of_the_operator_s_directory_reads_the_conversation_and_decides(tmp_path):
    commands = tmp_path / "commands"
    commands.mkdir()
    program = commands / "says-four"
    program.write_text('#!/bin/sh\ncat >seen.json\ngrep -q \'"content": "four"\' seen.json\n')
    tokens = np.array([1], np.int32)
    example = Example(
        example_id="t",
        tenant="default",
        policy_id=0,
        prompt=tokens,
        reply=tokens,
        sampling={},
        messages=[{"role": "user", "content": "Question"}],
        tools=None,
        response={},
        criterion={"kind": "command", "name": "says-four"},
    )
    checks = Checks(ExampleRules(commands=str(commands)), tmp_path / "log")
    assert "no executable 'says-four'" in checks.why_not_judged(example)
    program.chmod(stat.S_IRWXU)
    assert checks.why_not_judged(example) is None
    assert checks.are_right(example, ["four", "five"]) == [True, False]
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(GraderFailed, match="exit status 3"):
        checks.are_right(example, ["four"])
