"""rLLM's `AgentWorkflowEngine`, rule by rule, over sessions of a proxy."""

import asyncio
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from turnwise.client import AsyncClient
from turnwise.errors import InvalidRequest, RolloutFailed
from turnwise.workflows import (
    AgentWorkflowEngine,
    BaseEnv,
    ModelOutput,
    RolloutEngine,
    SessionRolloutEngine,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    Workflow,
)

PUBLISHED = 1
"""The version that samples."""
LONGEST_PROMPT = 32768
"""Tokens of the engine's context; a character is one."""


class Chat(Workflow):
    """Makes the task's number of calls; each reply is a step with the task's reward."""

    attempts: ClassVar[dict[str, int]] = {}
    lock = threading.Lock()

    async def run(self, task, uid, **kwargs):
        self.reset(task, uid)
        with self.lock:
            self.attempts[uid] = self.attempts.get(uid, 0) + 1
        trajectory = Trajectory(name="solver")
        messages = []
        for reward in task.get("rewards", [1.0]):
            messages.append({"role": "user", "content": str(task["q"])})
            output = await self.rollout_engine.get_model_response(list(messages))
            messages.append({"role": "assistant", "content": output.content})
            trajectory.steps.append(Step(chat_completions=list(messages), model_output=output, reward=reward))
        self.commit(trajectory=trajectory)
        if self.attempts[uid] <= task.get("crashes", 0):
            raise RuntimeError("the tool crashed")
        raise TerminationEvent(task.get("reason", TerminationReason.ENV_DONE))


@pytest.fixture(autouse=True)
def no_attempts_yet():
    Chat.attempts = {}


def config(*, stepwise=False, filtering=None):
    return SimpleNamespace(
        data=SimpleNamespace(max_prompt_length=8, max_response_length=8),
        rllm=SimpleNamespace(
            stepwise_advantage=SimpleNamespace(enable=stepwise), compact_filtering=filtering or {"enable": False}
        ),
    )


def execute(proxy, tasks, task_ids=None, *, workflow=Chat, model=None, engine_args=None, validate=False):
    async def go():
        async with AsyncClient(proxy.url) as client:
            rollouts = SessionRolloutEngine(client, model=model)
            rollouts.validate = validate
            return await execute_on(
                rollouts, tasks, task_ids, workflow, **{"n_parallel_tasks": 4, **(engine_args or {})}
            )

    return asyncio.run(go())


async def execute_on(rollouts, tasks, task_ids=None, workflow=Chat, **engine_args):
    engine = AgentWorkflowEngine(workflow, {}, rollouts, **engine_args)
    try:
        return await engine.execute_tasks(tasks, task_ids)
    finally:
        engine.shutdown()


def test_defaults_are_those_of_the_original():
    """128 at a time, 3 attempts, a run that fails on all of them ends the batch."""
    engine = AgentWorkflowEngine(Chat, None, RolloutEngine())
    assert (engine.n_parallel_tasks, engine.retry_limit, engine.raise_on_error) == (128, 3, True)
    assert (engine.workflow_args, engine.config) == ({}, None)
    engine.shutdown()
    assert engine.executor is None


def test_a_workflow_that_is_not_multithread_safe_is_refused():
    """An environment that is not thread-safe cannot be used in a pool."""

    class Unsafe(BaseEnv):
        def reset(self, task=None):
            return None, {}

        def step(self, action):
            return None, 0.0, True, {}

        @staticmethod
        def is_multithread_safe():
            return False

    class Holder(Chat):
        _env = Unsafe()

    engine = AgentWorkflowEngine(Holder, {}, RolloutEngine(), n_parallel_tasks=1)
    with pytest.raises(InvalidRequest, match="multithread-safe"):
        asyncio.run(engine.initialize_pool())
    engine.shutdown()


def test_episodes_are_returned_by_first_appearance_of_their_task(proxy):
    """Ids a, b, a: both of a's rollouts first, numbered 0 and 1 by occurrence, then b's."""
    episodes = execute(proxy, [{"q": 1}, {"q": 2}, {"q": 1}], ["a", "b", "a"])
    assert sorted(episode.id for episode in episodes[:2]) == ["a:0", "a:1"]
    assert episodes[2].id == "b:0"


def test_the_episodes_of_a_task_are_returned_in_order_of_completion(proxy):
    """The first rollout needs three calls, the second one: the second comes first."""
    tasks = [{"q": 1, "rewards": [0.0] * 20}, {"q": 1, "rewards": [1.0]}]
    assert [episode.id for episode in execute(proxy, tasks, ["a", "a"])] == ["a:1", "a:0"]


def test_an_error_is_retried_up_to_the_limit_under_the_same_id(proxy):
    """Two crashes, then success: three attempts, one id."""
    (episode,) = execute(proxy, [{"q": 1, "crashes": 2}], ["a"])
    assert (episode.id, episode.termination_reason) == ("a:0", TerminationReason.ENV_DONE)
    assert Chat.attempts == {"a:0": 3}


@pytest.mark.parametrize("reason", [reason for reason in TerminationReason if reason is not TerminationReason.ERROR])
def test_any_other_reason_is_final(proxy, reason):
    (episode,) = execute(proxy, [{"q": 1, "reason": reason}], ["a"])
    assert episode.termination_reason is reason
    assert Chat.attempts == {"a:0": 1}


def test_a_run_that_fails_on_every_attempt_ends_the_batch(proxy):
    """With `raise_on_error`, the default."""
    with pytest.raises(RolloutFailed, match=r"a:0.*3 attempts.*the tool crashed"):
        execute(proxy, [{"q": 1, "crashes": 9}], ["a"])


def test_without_raise_on_error_the_last_error_is_returned_and_other_episodes_are_intact(proxy):
    tasks = [{"q": 1}, {"q": 2, "crashes": 9}, {"q": 3}]
    episodes = execute(proxy, tasks, ["a", "b", "c"], engine_args={"raise_on_error": False})
    reasons = [episode.termination_reason for episode in episodes]
    assert reasons == [TerminationReason.ENV_DONE, TerminationReason.ERROR, TerminationReason.ENV_DONE]
    assert Chat.attempts["b:0"] == 3


def test_each_run_is_a_session_and_equal_ids_are_a_group(proxy):
    """The ledger stores task, run, group and size, and ends each session with the episode's reason and reward."""
    execute(proxy, [{"q": 1}, {"q": 1}, {"q": 2}], ["a", "a", "b"])
    sessions = sorted(proxy.sessions(), key=lambda session: (session.task_id, session.run))
    assert [(s.task_id, s.run, s.group_size, s.split) for s in sessions] == [
        ("a", 0, 2, "train"),
        ("a", 1, 2, "train"),
        ("b", 0, 1, "train"),
    ]
    assert sessions[0].group_id == sessions[1].group_id != sessions[2].group_id
    assert {(s.status, s.termination_reason) for s in sessions} == {("ended", "env_done")}
    assert sorted((line.session_id, line.value) for line in proxy.rewards()) == sorted(
        (s.session_id, 1.0) for s in sessions
    )


def test_the_ledger_holds_exactly_the_turns_of_the_episodes(proxy):
    episodes = execute(proxy, [{"q": k, "rewards": [0.0, 1.0]} for k in range(6)])
    outputs = [step.model_output for episode in episodes for t in episode.trajectories for step in t.steps]
    captured = {view.turn.turn_id: view for view in proxy.turns()}
    assert {output.turn_id for output in outputs} == set(captured)
    for output in outputs:
        view = captured[output.turn_id]
        assert output.prompt_ids == view.prompt_token_ids.tolist()
        assert output.completion_ids == view.turn.token_ids.tolist()
        assert np.float32(output.logprobs).tolist() == view.turn.logprobs.tolist()
        assert output.finish_reason == view.turn.finish_reason
        assert output.weight_version == view.turn.policy_version_first == PUBLISHED


def test_a_failed_attempt_is_a_session_of_its_own_without_a_reward(proxy):
    """Without a reward it is never trained; the group waits for the attempt that counts."""
    execute(proxy, [{"q": 1, "crashes": 1}], ["a"])
    first, second = proxy.sessions()
    assert (first.termination_reason, second.termination_reason) == ("retried", "env_done")
    assert [line.session_id for line in proxy.rewards()] == [second.session_id]
    assert first.num_turns == second.num_turns == 1


def rewards_by_seq(proxy):
    """Return the reward of each turn, in their order; every line is for one turn."""
    value_of = {line.turn_id: line.value for line in proxy.rewards()}
    return [value_of.pop(view.turn.turn_id) for view in proxy.turns()] + list(value_of)


def test_step_rewards_go_to_the_turns_they_belong_to(proxy):
    """With stepwise advantage each turn gets its step's own reward, already shaped; the session discounts nothing."""
    args = {"config": config(stepwise=True), "workflow_args": {}}
    execute(proxy, [{"q": 1, "rewards": [0.5, 2.0]}], ["a"], engine_args={"config": args["config"]})
    (session,) = proxy.sessions()
    assert (session.credit, session.gamma) == ("step_wise", 0.0)
    assert rewards_by_seq(proxy) == [0.5, 2.0]


class TwoAgents(Chat):
    async def run(self, task, uid, **kwargs):
        self.reset(task, uid)
        for name, reward in (("solver", 1.0), ("judge", -0.5)):
            messages = [{"role": "user", "content": f"{name} {task['q']}"}]
            output = await self.rollout_engine.get_model_response(messages)
            step = Step(chat_completions=messages, model_output=output, reward=reward)
            self.commit(trajectory=Trajectory(name=name, steps=[step]))
        raise TerminationEvent(TerminationReason.ENV_DONE)


def test_several_trajectories_keep_their_own_rewards_without_stepwise_advantage(proxy):
    """The solver's turn gets 1 and the judge's -0.5, not their sum 0.5; the session's credit says that turns differ."""
    execute(proxy, [{"q": 1}], ["a"], workflow=TwoAgents)
    (session,) = proxy.sessions()
    assert (session.credit, session.task_id) == ("step_wise", "a")
    assert rewards_by_seq(proxy) == [1.0, -0.5]


class Foreign:
    """An engine with only rLLM's interface: it has no runs, and its own methods are synchronous."""

    def __init__(self):
        self.seen = []

    async def get_model_response(self, messages, **kwargs):
        self.seen.append(messages[-1]["content"])
        return ModelOutput(content="fine", prompt_ids=[1], completion_ids=[2], prompt_length=1, completion_length=1)

    def wake_up(self):
        self.seen.append("awake")


def test_any_object_with_a_get_model_response_is_an_engine():
    """A retry after an error works too; nothing is written to a ledger."""
    foreign = Foreign()
    (episode,) = asyncio.run(execute_on(foreign, [{"q": 7, "crashes": 1}], ["a"], n_parallel_tasks=1))
    assert (episode.id, episode.termination_reason) == ("a:0", TerminationReason.ENV_DONE)
    assert foreign.seen == ["7", "7"]


def test_a_reply_needs_no_second_request(proxy, gateway):
    """Tokens, logprobs and version come with the reply: one POST for the session, one a call, two at the end."""
    (episode,) = execute(proxy, [{"q": 1, "rewards": [0.0, 1.0]}], ["a"])
    methods = [(request.method, request.url.path.rpartition("/")[2]) for request in gateway.requests]
    assert methods == [
        ("POST", "sessions"),
        ("GET", "models"),
        ("POST", "completions"),
        ("POST", "completions"),
        ("POST", "rewards"),
        ("POST", "end"),
    ]
    outputs = [step.model_output for step in episode.trajectories[0].steps]
    assert [np.float32(output.logprobs).tolist() for output in outputs] == [
        view.turn.logprobs.tolist() for view in proxy.turns()
    ]


def test_a_reply_without_logprobs_is_completed_from_the_ledger(proxy, gateway):
    """The caller's own parameters have priority; the stored turn has what the reply lacks."""

    async def go():
        async with AsyncClient(proxy.url) as client:
            engine = SessionRolloutEngine(client, model="fake", sampling_params={"logprobs": False})
            return await engine.get_model_response([{"role": "user", "content": "x"}], application_id="mine")

    output = asyncio.run(go())
    (view,) = proxy.turns()
    assert (output.completion_ids, len(output.completion_ids)) == (view.turn.token_ids.tolist(), 2)
    assert np.float32(output.logprobs).tolist() == view.turn.logprobs.tolist()
    assert gateway.requests[-1].url.path == f"/v1/turns/{view.turn.turn_id}"


def test_validation_runs_are_never_trained_on(proxy):
    execute(proxy, [{"q": 1}], validate=True)
    assert [session.split for session in proxy.sessions()] == ["eval"]


async def test_a_failed_batch_leaves_no_run_active(proxy):
    """rLLM leaves the other runs active; here they have ended before the error reaches the caller."""

    class Slow(Chat):
        running = 0

        async def run(self, task, uid, **kwargs):
            self.reset(task, uid)
            if task["q"] == 0:
                raise RuntimeError("the tool crashed")
            Slow.running += 1
            try:
                await asyncio.sleep(60)
            finally:
                Slow.running -= 1

    engine = AgentWorkflowEngine(Slow, {}, RolloutEngine(), n_parallel_tasks=3)
    with pytest.raises(RolloutFailed):
        await engine.execute_tasks([{"q": 0}, {"q": 1}, {"q": 2}])
    assert Slow.running == 0
    engine.shutdown()


def test_a_reply_is_stamped_with_the_version_before_the_await():
    """A change of weights while a reply is sampled does not change its version."""

    class Reloading(RolloutEngine):
        weight_version = 4

        async def _get_model_response(self, messages, **kwargs):
            self.weight_version = 5
            return ModelOutput()

    engine = Reloading()
    assert asyncio.run(engine.get_model_response([])).weight_version == 4


def test_sampling_outside_a_run_needs_a_name_for_its_session(proxy):
    """Without an engine's session, rLLM's `application_id` names one."""

    async def go():
        async with AsyncClient(proxy.url) as client:
            engine = SessionRolloutEngine(client, sampling_params={"temperature": 0.5})
            with pytest.raises(InvalidRequest, match="application_id"):
                await engine.get_model_response([{"role": "user", "content": "x"}])
            return await engine.get_model_response([{"role": "user", "content": "x"}], application_id="mine")

    output = asyncio.run(go())
    (view,) = proxy.turns()
    assert view.turn.session_id == "mine"
    assert (output.completion_ids, output.completion_length) == (view.turn.token_ids.tolist(), 2)


def test_a_prompt_over_the_models_length_ends_the_episode_by_name(proxy):
    """The engine's refusal becomes rLLM's termination reason for it, and is not retried."""

    class Long(Chat):
        async def run(self, task, uid, **kwargs):
            self.reset(task, uid)
            await self.rollout_engine.get_model_response([{"role": "user", "content": "x" * LONGEST_PROMPT}])

    (episode,) = execute(proxy, [{"q": 1}], workflow=Long)
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
