"""Episodes as rows of tokens in verl's format, without verl."""

import pytest
from turnwise_verl.rows import in_batch_order, is_kept, rows_of, task_of

from turnwise.workflows import Episode, ModelOutput, Step, TerminationReason, Trajectory


def output(prompt, sampled):
    return ModelOutput(prompt_ids=prompt, completion_ids=sampled, logprobs=[-float(t) for t in sampled])


def episode(*outputs, rewards=None, name="solver"):
    rewards = rewards or [1.0] * len(outputs)
    steps = [Step(model_output=one, reward=reward) for one, reward in zip(outputs, rewards, strict=True)]
    trajectory = Trajectory(name=name, steps=steps, reward=sum(rewards))
    return Episode(id="t:0", trajectories=[trajectory], termination_reason=TerminationReason.ENV_DONE)


GROWING = (output([1, 2], [3]), output([1, 2, 3, 4, 5], [6, 7]))


def test_one_row_for_a_trajectory_joins_the_steps_that_extend_one_another():
    """Prompt 1 2, then 3 sampled, 4 5 from the tool, 6 7 sampled: mask 1 0 0 1 1."""
    (row,) = rows_of(episode(*GROWING), "t", stepwise=False)
    assert (row.tokens.prompt, row.tokens.response, row.tokens.mask) == ([1, 2], [3, 4, 5, 6, 7], [1, 0, 0, 1, 1])
    assert row.tokens.logprobs == [-3.0, 0.0, 0.0, -6.0, -7.0]
    assert (row.trajectory_id, row.step_id, row.step_num, row.is_last_step) == ("t_solver", "t_solver", 1, True)
    assert (row.step_reward, row.trajectory_reward) == (2.0, 2.0)


def test_one_row_for_each_step_has_its_own_reward_and_number():
    rows = rows_of(episode(*GROWING, rewards=[0.5, 2.0]), "t", stepwise=True)
    assert [(row.step_id, row.step_reward, row.is_last_step) for row in rows] == [
        ("t_solver_step0", 0.5, False),
        ("t_solver_step1", 2.0, True),
    ]
    assert [row.tokens.prompt for row in rows] == [[1, 2], [1, 2, 3, 4, 5]]
    assert {row.step_num for row in rows} == {2}
    assert {row.trajectory_reward for row in rows} == {2.5}


def test_a_trajectory_that_is_not_cumulative_keeps_its_last_conversation(caplog):
    """rLLM tokenises the last conversation; here it is the steps at the end that extend one another, and a warning."""
    (row,) = rows_of(episode(output([9], [9]), *GROWING), "t", stepwise=False)
    assert row.tokens.response == [3, 4, 5, 6, 7]
    assert "not cumulative" in caplog.text


def test_steps_without_captured_tokens_are_skipped_with_a_warning(caplog):
    """Text is never tokenised again: a step that no model sampled has no tokens to train."""
    rows = rows_of(episode(None, GROWING[0], rewards=[0.0, 1.0]), "t", stepwise=True)
    assert [row.step_id for row in rows] == ["t_solver_step1"]
    assert "no captured tokens" in caplog.text


def test_a_missing_episode_and_an_empty_trajectory_give_no_row():
    """The other trajectories of the episode still give their rows."""
    assert rows_of(None, "t", stepwise=False) == []
    assert rows_of(Episode(trajectories=[Trajectory(), Trajectory()]), "t", stepwise=True) == []
    full = episode(GROWING[0])
    full.trajectories.insert(0, Trajectory(name="judge"))
    assert [row.trajectory_id for row in rows_of(full, "t", stepwise=False)] == ["t_solver"]


@pytest.mark.parametrize("reason", list(TerminationReason))
def test_compact_filtering_masks_the_configured_reasons(reason):
    """A flag for each reason, and one for all of it; the row itself stays in the batch."""
    ended = episode(GROWING[0])
    ended.termination_reason = reason
    (row,) = rows_of(ended, "t", stepwise=False)
    assert not is_kept(row, {"enable": True, f"mask_{reason.value}": True})
    assert is_kept(row, {"enable": False, f"mask_{reason.value}": True})
    assert is_kept(row, {"enable": True})


def test_an_episode_belongs_to_the_task_in_its_id():
    """rLLM matches by position, which fails when equal ids are not adjacent; here only unknown ids do so."""
    assert task_of(Episode(id="b:1"), 0, ["a", "b"]) == "b"
    assert task_of(Episode(id="unheard of"), 0, ["a", "b"]) == "a"


def test_results_are_returned_in_the_order_of_the_batch():
    """Ids a b a are returned as a a b; verl repeats its rows by position."""
    back = in_batch_order([Episode(id="a:0"), Episode(id="a:1"), Episode(id="b:0")], ["a", "b", "a"])
    assert [one.id for one in back] == ["a:0", "b:0", "a:1"]
