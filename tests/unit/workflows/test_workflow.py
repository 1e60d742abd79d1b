"""rLLM's `Workflow`, rule by rule: the name of each test states one."""

import asyncio
import dataclasses

import pytest

from turnwise.errors import InvalidRequest
from turnwise.workflows import (
    Action,
    BaseAgent,
    BaseEnv,
    Episode,
    ModelOutput,
    RolloutEngine,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    Workflow,
)


class Agent(BaseAgent):
    def __init__(self, name="agent"):
        self.name = name
        self.reset()

    @property
    def trajectory(self):
        return self._trajectory

    def update_from_env(self, observation, reward, done, info, **kwargs):
        pass

    def update_from_model(self, response, **kwargs):
        pass

    def reset(self):
        self._trajectory = Trajectory(name=self.name)

    def take(self, *rewards):
        for reward in rewards:
            self._trajectory.steps.append(step(reward))


class Env(BaseEnv):
    safe = True

    def __init__(self):
        self.tasks = []

    def reset(self, task=None):
        self.tasks.append(task)
        return None, {}

    def step(self, action):
        return None, 0.0, True, {}

    @staticmethod
    def is_multithread_safe():
        return True


def step(reward=0.0, content="x"):
    return Step(chat_completions=[{"role": "assistant", "content": content}] if content else [], reward=reward)


class Scripted(Workflow):
    def __init__(self, *args, ending=None, rewards=(1.0,), **kwargs):
        super().__init__(*args, **kwargs)
        self.ending = ending
        self.rewards = rewards
        self.agent = Agent()

    async def run(self, task, uid, **kwargs):
        self.reset(task, uid)
        self.agent.take(*self.rewards)
        return await self.ending() if self.ending else None


def workflow(**kwargs):
    return Scripted(RolloutEngine(), None, **kwargs)


def run(made, task=None, uid="t:0"):
    return asyncio.run(made.run_with_termination_handling(task or {"q": 1}, uid))


def ending_in(error):
    async def end():
        raise error

    return end


def test_the_constructor_keeps_whole_seconds_and_ignores_unknown_keywords():
    made = Scripted(RolloutEngine(), None, timeout=2.9, unheard_of=1)
    assert made.timeout == 2
    assert (made.gamma, made.reward_bonus_coeff) == (0.0, 0.0)
    assert Scripted(RolloutEngine(), None).timeout == 1_000_000
    assert not hasattr(made, "uid")


def test_keywords_are_passed_to_run_and_the_time_limit_is_the_objects():
    """A keyword `timeout` belongs to the agent, as in rLLM: the limit is `self.timeout`."""
    received = {}

    class Receiving(Scripted):
        async def run(self, task, uid, **kwargs):
            received.update(kwargs)
            return await super().run(task, uid)

    made = Receiving(RolloutEngine(), None)
    episode = asyncio.run(made.run_with_termination_handling({}, "t:0", depth=2, timeout=0))
    assert received == {"depth": 2, "timeout": 0}
    assert episode.termination_reason is TerminationReason.UNKNOWN


@pytest.mark.parametrize("returned", [None, 3, "done", {"reward": 1.0}])
def test_a_return_value_that_is_not_an_episode_is_ignored(returned):
    async def end():
        return returned

    episode = run(workflow(ending=end))
    assert (episode.id, episode.task, episode.termination_reason) == ("t:0", {"q": 1}, TerminationReason.UNKNOWN)
    assert (len(episode.trajectories[0].steps), episode.trajectories[0].reward) == (1, 1.0)


def test_termination_reasons_have_their_wire_names():
    prompt, response = "max_prompt_length_exceeded", "max_response_length_exceeded"
    others = ["env_done", "max_turns_exceeded", "timeout", "unknown", "error"]
    assert [reason.value for reason in TerminationReason] == [prompt, response, *others]
    assert TerminationEvent().reason is TerminationReason.UNKNOWN


def test_an_episode_that_run_returns_is_not_touched():
    own = Episode(id="mine", trajectories=[Trajectory(steps=[step(5.0)])])

    async def end():
        return own

    episode = run(workflow(ending=end))
    assert episode is own
    assert (episode.id, episode.termination_reason, episode.metrics) == ("mine", None, {})
    assert episode.trajectories[0].reward == 0.0


def test_a_timeout_keeps_the_steps():
    async def end():
        await asyncio.sleep(60)

    made = workflow(ending=end)
    made.timeout = 0.01
    episode = run(made)
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert len(episode.trajectories[0].steps) == 1


def test_a_timeout_error_of_the_users_own_code_counts_as_timeout():
    """The builtin `TimeoutError` is not distinguished from the limit's, as in rLLM."""
    assert run(workflow(ending=ending_in(TimeoutError()))).termination_reason is TerminationReason.TIMEOUT


def test_any_other_exception_is_an_outcome_with_its_traceback():
    episode = run(workflow(ending=ending_in(ValueError("broken tool"))))
    assert episode.termination_reason is TerminationReason.ERROR
    error = episode.info["error"]
    assert (error["error_message"], error["error_type"]) == ("broken tool", "ValueError")
    assert "broken tool" in error["traceback"]
    assert len(episode.trajectories[0].steps) == 1


def test_a_cancellation_is_raised():
    async def go():
        task = asyncio.ensure_future(
            workflow(ending=lambda: asyncio.sleep(60)).run_with_termination_handling({}, "t:0")
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())


def test_commit_copies_names_and_resets():
    made = workflow()
    made.reset({}, "t:0")
    made.agent.take(1.0)
    original = made.agent.trajectory
    made.commit(name="solver", agent=made.agent, reset=True)
    original.steps[0].reward = 9.0
    kept = made.collect_trajectories().trajectories
    assert [(one.name, one.steps[0].reward) for one in kept] == [("solver", 1.0)]
    assert original.name == "solver"
    assert made.agent.trajectory.steps == []


def test_commit_without_steps_adds_nothing_and_two_commits_add_two():
    made = workflow()
    made.reset({}, "t:0")
    made.commit(trajectory=Trajectory())
    filled = Trajectory(steps=[step()])
    made.commit(trajectory=filled)
    made.commit(trajectory=filled)
    assert len(made.collect_trajectories().trajectories) == 2


def test_commit_takes_exactly_one_of_agent_and_trajectory():
    made = workflow()
    for arguments in [{}, {"agent": made.agent, "trajectory": Trajectory()}]:
        with pytest.raises(InvalidRequest, match="exactly one"):
            made.commit(**arguments)


def test_commit_resets_an_agent_and_names_a_trajectory():
    made = workflow()
    made.reset({}, "t:0")
    given = Trajectory(steps=[step(1.0)])
    made.commit(name="judge", trajectory=given, reset=True)
    made.agent.take(2.0)
    made.commit(agent=made.agent)
    assert given.name == "judge"
    assert len(given.steps) == len(made.agent.trajectory.steps) == 1
    assert [one.name for one in made.collect_trajectories().trajectories] == ["judge", "agent"]


def test_collecting_takes_committed_ones_first_then_public_agents_by_name():
    """Attributes in alphabetical order; private agents and those in lists are not found, committed ones not again."""
    made = workflow()
    made.reset({}, "t:0")
    made.zeta, made.beta, made.committed = Agent("zeta"), Agent("beta"), Agent("committed")
    made._hidden, made.listed = Agent("hidden"), [Agent("listed")]
    for agent in (made.zeta, made.beta, made.committed, made._hidden, made.listed[0]):
        agent.take(1.0)
    made.commit(agent=made.committed)
    episode = made.collect_trajectories()
    assert [one.name for one in episode.trajectories] == ["committed", "beta", "zeta"]
    assert episode.trajectories[1].steps[0] is not made.beta.trajectory.steps[0]


@pytest.mark.parametrize(
    ("gamma", "bonus", "expected"),
    [
        # bonus: 1, 2 + 0.5 * (2 - 1), 4 + 0.5 * (4 - 2); then G_2 = 5, G_1 = 2.5 + 0.9 * 5 = 7, G_0 = 1 + 0.9 * 7 = 7.3
        (0.9, 0.5, [7.3, 7.0, 5.0]),
        (0.0, 0.0, [1.0, 2.0, 4.0]),
    ],
)
def test_step_rewards_get_their_bonus_and_then_their_discount(gamma, bonus, expected):
    """Bonuses come from raw rewards; the trajectory's reward stays the undiscounted sum of raw rewards, 7."""
    episode = run(workflow(rewards=(1.0, 2.0, 4.0), gamma=gamma, reward_bonus_coeff=bonus))
    (trajectory,) = episode.trajectories
    assert [one.reward for one in trajectory.steps] == pytest.approx(expected)
    assert trajectory.reward == 7.0
    assert [one.mc_return for one in trajectory.steps] == [0.0, 0.0, 0.0]


def test_an_empty_episode_has_reward_zero_and_is_not_correct():
    made = workflow()
    made.reset({}, "t:0")
    episode = made.postprocess_episode(Episode(trajectories=[Trajectory()]))
    assert (episode.trajectories[0].reward, episode.is_correct) == (0.0, False)
    assert episode.termination_reason is TerminationReason.UNKNOWN


def test_a_last_step_without_a_reply_is_dropped_before_rewards_are_summed():
    made = workflow()
    made.reset({}, "t:0")
    trajectory = Trajectory(steps=[step(1.0), step(5.0, content="")])
    made.postprocess_episode(Episode(trajectories=[trajectory]))
    assert (len(trajectory.steps), trajectory.reward) == (1, 1.0)


def test_an_earlier_reward_of_a_trajectory_is_overwritten():
    trajectory = Trajectory(steps=[step(1.0), step(2.0)], reward=99.0)
    workflow().compute_trajectory_reward(trajectory)
    assert trajectory.reward == 3.0


def test_an_episode_is_correct_when_its_rewards_add_up_to_more_than_zero():
    made = workflow()
    for rewards, correct in [((1.0, -0.5), True), ((1.0, -1.0), False), ((None, 0.5), True)]:
        episode = Episode(trajectories=[Trajectory(reward=reward) for reward in rewards])
        made.assign_episode_correctness(episode)
        assert episode.is_correct is correct


def test_metrics_are_mean_rewards_by_name():
    """Two solvers with 1 and 0 make solver_acc 0.5."""
    episode = Episode(
        trajectories=[
            Trajectory(name="solver", reward=1.0),
            Trajectory(name="solver"),
            Trajectory(name="judge", reward=2.0),
        ]
    )
    workflow().collect_metrics(episode)
    assert episode.metrics == {"solver_acc": 0.5, "judge_acc": 2.0}


def test_reset_clears_commits_resets_agents_and_passes_the_task_to_environments():
    made = workflow()
    made.env, made._env = Env(), Env()
    made.reset({"q": 1}, "t:0")
    made.agent.take(1.0)
    made.commit(agent=made.agent)
    made.reset({"q": 2}, "t:1")
    assert (made.uid, made.task) == ("t:1", {"q": 2})
    assert made.collect_trajectories().trajectories == []
    assert made.agent.trajectory.task == {"q": 2}
    assert made.env.tasks == [{"q": 1}, {"q": 2}]
    assert made._env.tasks == []


def test_a_trajectory_is_cumulative_when_each_conversation_begins_with_the_one_before():
    content = [{"role": "user", "content": str(k)} for k in range(3)]
    grows = Trajectory(steps=[Step(chat_completions=content[:1]), Step(chat_completions=content)])
    jumps = Trajectory(steps=[Step(chat_completions=content[:1]), Step(chat_completions=content[1:])])
    assert (grows.is_cumulative(), jumps.is_cumulative()) == (True, False)


def test_an_episode_id_splits_into_task_and_rollout():
    assert (Episode(id="a:b:3").task_id, Episode(id="a:b:3").rollout_idx) == ("a:b", "3")


def test_records_have_the_defaults_of_the_original():
    assert (Trajectory().name, Trajectory().reward, Step().reward, Step().done, Step().mc_return) == (
        "agent",
        0.0,
        0.0,
        False,
        0.0,
    )
    assert Trajectory().uid != Trajectory().uid


FIELDS = {
    Step: "chat_completions observation thought action model_response model_output info reward done mc_return",
    Action: "action",
    Trajectory: "uid name task steps reward info",
    Episode: "id task termination_reason is_correct trajectories metrics info",
    ModelOutput: "text content reasoning tool_calls prompt_ids completion_ids multi_modal_inputs logprobs "
    "prompt_logprobs routing_matrices prompt_length completion_length finish_reason weight_version metrics",
}


@pytest.mark.parametrize("record", FIELDS)
def test_records_have_the_fields_of_the_original(record):
    made = record()
    assert set(FIELDS[record].split()) <= {field.name for field in dataclasses.fields(made)}
