"""rLLM's ready workflows: an agent counts down in an environment, over a proxy."""

import asyncio
import time

import pytest
from support.waiting import wait_until

from turnwise.client import AsyncClient
from turnwise.errors import InvalidRequest
from turnwise.workflows import (
    Action,
    AgentWorkflowEngine,
    BaseAgent,
    BaseEnv,
    CumulativeWorkflow,
    ModelOutput,
    MultiTurnWorkflow,
    SessionRolloutEngine,
    SingleTurnWorkflow,
    Step,
    TerminationReason,
    Trajectory,
)


class Countdown(BaseEnv):
    """Done after the task's number of actions; each action is worth its number."""

    def reset(self, task=None):
        self.left, self.actions = task["actions"], 0
        return f"{self.left} left", {}

    def step(self, action):
        self.left, self.actions = self.left - 1, self.actions + 1
        return f"{self.left} left", float(self.actions), self.left == 0, {}


class Counter(BaseAgent):
    def __init__(self, system="count"):
        self.system = system
        self.reset()

    def reset(self):
        self.messages = [{"role": "system", "content": self.system}]
        self._trajectory = Trajectory(name="counter")

    @property
    def chat_completions(self):
        return self.messages

    @property
    def trajectory(self):
        return self._trajectory

    def update_from_env(self, observation, reward, done, info, **kwargs):
        if self._trajectory.steps:
            self._trajectory.steps[-1].reward = reward
            self._trajectory.steps[-1].done = done
        self.messages.append({"role": "user", "content": observation})

    def update_from_model(self, response, **kwargs):
        self.messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(Step(chat_completions=list(self.messages), model_response=response))
        return Action(action=response)


def run(proxy, workflow_cls, task, **workflow_args):
    async def go():
        async with AsyncClient(proxy.url) as client:
            arguments = {"agent_cls": Counter, "env_cls": Countdown, **workflow_args}
            rollouts = SessionRolloutEngine(client, model="fake")
            engine = AgentWorkflowEngine(workflow_cls, arguments, rollouts, n_parallel_tasks=1)
            try:
                (episode,) = await engine.execute_tasks([task], ["t"])
                return episode
            finally:
                engine.shutdown()

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("workflow_cls", "actions", "arguments", "reason", "rewards"),
    [
        (SingleTurnWorkflow, 1, {}, TerminationReason.ENV_DONE, [1.0]),
        (SingleTurnWorkflow, 2, {}, TerminationReason.MAX_TURNS_EXCEEDED, [1.0]),
        (MultiTurnWorkflow, 3, {}, TerminationReason.ENV_DONE, [1.0, 2.0, 3.0]),
        (MultiTurnWorkflow, 9, {}, TerminationReason.MAX_TURNS_EXCEEDED, [1.0, 2.0, 3.0, 4.0, 5.0]),
        (MultiTurnWorkflow, 9, {"max_steps": 2}, TerminationReason.MAX_TURNS_EXCEEDED, [1.0, 2.0]),
        (CumulativeWorkflow, 3, {"max_response_length": 999}, TerminationReason.ENV_DONE, [1.0, 2.0, 3.0]),
    ],
)
def test_the_loop_ends_as_in_rllm_and_each_step_has_its_reward_and_its_turn(
    proxy, workflow_cls, actions, arguments, reason, rewards
):
    episode = run(proxy, workflow_cls, {"actions": actions}, **arguments)
    steps = episode.trajectories[0].steps
    assert (episode.termination_reason, [step.reward for step in steps]) == (reason, rewards)
    assert [step.model_output.turn_id for step in steps] == [view.turn.turn_id for view in proxy.turns()]


def test_a_reply_that_was_cut_off_ends_the_run():
    """The environment has answered its action; the reason is rLLM's."""

    class CutOff:
        async def get_model_response(self, messages, **kwargs):
            return ModelOutput(content="1", text="1", finish_reason="length", prompt_length=5, completion_length=1)

    workflow = MultiTurnWorkflow(rollout_engine=CutOff(), executor=None, agent_cls=Counter, env_cls=Countdown)
    episode = asyncio.run(workflow.run_with_termination_handling({"actions": 3}, "t:0"))
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert [step.reward for step in episode.trajectories[0].steps] == [1.0]


def test_a_growing_conversation_has_one_limit_after_its_first_prompt():
    """Limit 10: prompts of 5, 9 and 14 tokens with replies of 3. Used: 0, 3, 7, and then 12, over 10."""

    class Engine:
        max_response_length = 10

        def __init__(self):
            self.limits = []

        async def get_model_response(self, messages, *, max_tokens, **kwargs):
            self.limits.append(max_tokens)
            prompt = [5, 9, 14][len(self.limits) - 1]
            return ModelOutput(text="1", finish_reason="stop", prompt_length=prompt, completion_length=3)

    engine = Engine()
    workflow = CumulativeWorkflow(rollout_engine=engine, executor=None, agent_cls=Counter, env_cls=Countdown)
    episode = asyncio.run(workflow.run_with_termination_handling({"actions": 9}, "t:0"))
    assert engine.limits == [10, 7, 3]
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


def test_a_cumulative_workflow_without_a_limit_is_refused():
    with pytest.raises(InvalidRequest, match="max_response_length"):
        CumulativeWorkflow(rollout_engine=object(), executor=None, agent_cls=Counter, env_cls=Countdown)


def test_classes_may_be_import_paths():
    path = f"{__name__}:Counter"
    workflow = SingleTurnWorkflow(
        rollout_engine=None, executor=None, agent_cls=path, env_cls=Countdown, agent_args={"system": "two"}
    )
    assert workflow.agent.system == "two"
    with pytest.raises(InvalidRequest, match="'math_agent' names no class"):
        SingleTurnWorkflow(rollout_engine=None, executor=None, agent_cls="math_agent", env_cls=Countdown)


def test_a_slow_environment_does_not_block_the_event_loop(proxy):
    """While one environment waits for another run's environment, both make progress."""
    waiting: list[float] = []

    class Slow(Countdown):
        def step(self, action):
            waiting.append(time.monotonic())
            wait_until(lambda: len(waiting) >= 2, "both runs have reached their environment")
            return super().step(action)

    async def go():
        async with AsyncClient(proxy.url) as client:
            arguments = {"agent_cls": Counter, "env_cls": Slow}
            rollouts = SessionRolloutEngine(client, model="fake")
            engine = AgentWorkflowEngine(SingleTurnWorkflow, arguments, rollouts, n_parallel_tasks=2)
            try:
                return await engine.execute_tasks([{"actions": 1}] * 2)
            finally:
                engine.shutdown()

    assert {episode.termination_reason for episode in asyncio.run(go())} == {TerminationReason.ENV_DONE}
    assert len(waiting) == 2  # neither was tried again
