"""Learning from corrections: what a teacher is asked, and what is trained of its replies, by hand."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from support.experience_factory import experience

from trainer.algorithms.correction import Correction, corrected_turn, hinted_prompt, with_reply
from trainer.algorithms.teachers import Teacher
from trainer.batch.batch import build
from trainer.batch.selection import Selection, SelectionRule, offer
from trainer.update import Updates
from trainer.world import World
from turnwise.errors import BatchRefused
from turnwise.features.feedback import HINTS


def corrected(**fields):
    """Return a chain of two turns: prompt 1, reply 2 3, prompt 4, reply 5 6; the second turn has a correction."""
    one = experience(turns=2, **fields)
    hint = {"turn_id": one.turn_ids[1], "kept": 3, "token_ids": [7, 8]}
    return dataclasses.replace(one, parts={HINTS: {hint["turn_id"]: hint}})


def algorithm(monkeypatch, *replies):
    """Return the algorithm with a teacher that gives these replies, and the prompts that it gets."""
    made, asked = Correction(Correction.Settings(teacher=Teacher(url="http://teacher/v1", model="v0"))), []

    def reply(prompts, max_tokens):
        asked.extend(prompt.tolist() for prompt in prompts)
        return [np.array(each, np.int32) for each in replies], {"too_long": 1}

    monkeypatch.setitem(vars(made), "_teachers", SimpleNamespace(replies=reply))
    return made, asked


def test_the_reply_to_the_prompt_with_the_correction_is_trained_after_the_prompt_without_it(monkeypatch):
    """The second session's reply was cut, so nothing of it is trained."""
    one, asked = algorithm(monkeypatch, [9, 9, 6], [])
    batch = build([corrected(), corrected(session_id="b")], [np.array([0.0, 1.0])] * 2, policy_version=0)
    taught, gauges = one.credit(batch, [0, 1], SimpleNamespace(world=World()))
    assert asked == [[1, 2, 3, 7, 8]] * 2
    first = taught.experiences[0]
    assert first.tokens.tolist() == [1, 2, 3, 4, 9, 9, 6]
    assert taught.table.target.tolist() == [9, 9, 6]
    assert taught.table.place.tolist() == [4, 5, 6]
    assert taught.table.advantages.tolist() == [1, 1, 1]
    assert taught.table.experience.tolist() == [0, 0, 0]
    assert gauges == {"num_corrected": 1, "teacher_tokens": 3, "num_teacher_too_long": 1}


def test_a_reply_in_tokens_that_the_model_does_not_have_drops_its_group_alone(monkeypatch):
    """The teacher's vocabulary may be larger than the student's, here of 10 tokens."""
    one, _ = algorithm(monkeypatch, [9, 6], [10, 6])
    found, advantages = [corrected(group_id="a"), corrected(group_id="b")], [np.array([0.0, 1.0])] * 2
    student = SimpleNamespace(
        algorithm=one,
        world=World(),
        policy=SimpleNamespace(why_unfit=lambda each: "other_model" if each.tokens.max() >= 10 else None),
    )
    updates = Updates(None, student, ())
    chosen = Selection(experiences=found, advantages=advantages)
    updates.with_token_credit(build(found, advantages, policy_version=0), chosen)
    assert chosen.refused == {("default", "b"): "other_model"}
    assert [each.group_id for each in chosen.trained()] == ["a"]


def test_a_teacher_that_gives_no_reply_trains_nothing(monkeypatch):
    one, _ = algorithm(monkeypatch, [])
    batch = build([corrected()], [np.array([0.0, 1.0])], policy_version=0)
    with pytest.raises(BatchRefused, match="gave no reply"):
        one.credit(batch, [0], SimpleNamespace(world=World()))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_only_corrected_sessions_are_trained_whatever_sampled_them(monkeypatch, temperature):
    """A greedy reply has no importance ratio, and the reply of the teacher needs none."""
    one, _ = algorithm(monkeypatch)
    first = corrected(group_id="a", sampling=[{"temperature": temperature}] * 2)
    chosen = [first, experience(session_id="b", group_id="b")]
    found = one.choose(offer(chosen, [each.group_key for each in chosen], SelectionRule(), (), lambda *_: None))
    assert [each.session_id for each in found.experiences] == ["s"]
    assert found.refused == {("default", "b"): "no_correction"}
    taught = build([with_reply(first, np.array([9], np.int32))], found.advantages, policy_version=0)
    assert taught.table.temperature.tolist() == [1.0]
    assert taught.table.advantages.tolist() == [1.0]


def test_a_correction_of_a_turn_that_a_chain_does_not_train_is_left_out():
    one = corrected()
    elsewhere = dataclasses.replace(one, turn_index=np.where(one.turn_index == 1, -1, one.turn_index))
    assert (corrected_turn(one), corrected_turn(elsewhere), corrected_turn(experience())) == (1, None, None)
    assert hinted_prompt(one).tolist() == [1, 2, 3, 7, 8]
