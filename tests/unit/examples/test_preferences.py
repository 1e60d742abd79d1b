"""Contradictory preferences for the same replies."""

from __future__ import annotations

from examples.policies import tasks as preferences


def test_each_answer_is_right_for_one_preference_alone():
    for index in range(20):
        task = preferences.make_task("eval", index, 0)
        for preference, answer in task.answers.items():
            rewards = {one: preferences.reward(task, f'The answer is "{answer}".', one) for one in task.answers}
            assert rewards == {one: float(one == preference) for one in task.answers}
