"""Trinity-RFT's workflows, rule by rule, over sessions of a proxy."""

import asyncio
import dataclasses
import threading

import numpy as np
import openai
import pytest
from support.waiting import WAIT_SECONDS

from turnwise.errors import InvalidRequest
from turnwise.workflows.trinity import (
    EID,
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    Experience,
    ModelWrapper,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
    Task,
    WorkflowRunner,
)


@pytest.fixture
def model(proxy):
    wrapper = ModelWrapper(proxy.url)
    yield wrapper
    wrapper.client.close()


def ask(client, text="x", **kwargs):
    return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **kwargs)


@dataclasses.dataclass
class Plan:
    """The script of a run: calls per step, its reward or rewards, when it stops, when it raises."""

    calls: tuple[int, ...] = (1, 2, 1)
    rewards: tuple[float, ...] = (0.5, 1.0, 2.0)
    steps: int = 3
    stop_after: int | None = None
    break_in_step: int | None = None
    break_in_reward: int | None = None


class Planned:
    @property
    def plan(self):
        return self.task.workflow_args["plan"]

    @property
    def max_step_num(self):
        return self.plan.steps

    def check(self, step_num):
        if step_num == self.plan.break_in_step:
            raise RuntimeError("the tool crashed")
        return step_num != self.plan.stop_after

    def judge(self, exps, step_num):
        self.seen = [*getattr(self, "seen", []), len(exps)]
        if step_num == self.plan.break_in_reward:
            raise RuntimeError("the judge crashed")
        return self.plan.rewards[step_num]


class Stepped(Planned, StepWiseRewardWorkflow):
    def step(self, step_num):
        for _ in range(self.plan.calls[step_num]):
            ask(self.client, str(step_num))
        return self.check(step_num)

    def reward(self, exps, step_num):
        return self.judge(exps, step_num)


class AsyncStepped(Planned, AsyncStepWiseRewardWorkflow):
    async def step_async(self, step_num):
        for _ in range(self.plan.calls[step_num]):
            await ask(self.client, str(step_num))
        return self.check(step_num)

    async def reward_async(self, exps, step_num):
        return self.judge(exps, step_num)


class Propagated(Planned, RewardPropagationWorkflow):
    step = Stepped.step

    def reward(self, exps):
        return self.judge(exps, 0)


class AsyncPropagated(Planned, AsyncRewardPropagationWorkflow):
    step_async = AsyncStepped.step_async

    async def reward_async(self, exps):
        return self.judge(exps, 0)


STEPPED = [Stepped, AsyncStepped]
PROPAGATED = [Propagated, AsyncPropagated]


def make(kind, model, **plan):
    return kind(task=Task(workflow=kind, workflow_args={"plan": Plan(**plan)}, task_id="t"), model=model)


def run(workflow):
    async def go():
        try:
            return await workflow.run_async()
        finally:
            await workflow.model.async_client.aclose()

    return asyncio.run(go()) if workflow.is_async else workflow.run()


def run_task(model, task, *, mode="sequential", **kwargs):
    async def go():
        try:
            return await WorkflowRunner(model, concurrent_mode=mode).run_task(task, **kwargs)
        finally:
            await model.async_client.aclose()

    return asyncio.run(go())


def last_session(proxy):
    return proxy.sessions()[-1]


@pytest.mark.parametrize("kind", STEPPED)
def test_every_experience_of_a_step_gets_its_reward_and_number_and_the_ledger_a_line_for_each_step(proxy, model, kind):
    """One, two and one calls: steps 0, 1, 1, 2 and rewards 0.5, 1, 1, 2; each reward sees its own step's calls.

    The lines and steps of the ledger equal those of a plain client with `X-Step` and `POST /v1/rewards`.
    """
    workflow = make(kind, model)
    assert [(exp.eid.step, exp.reward) for exp in run(workflow)] == [(0, 0.5), (1, 1.0), (1, 1.0), (2, 2.0)]
    assert workflow.seen == [1, 2, 1]
    session = last_session(proxy)
    assert [(line.step, line.value) for line in proxy.rewards()] == [(0, 0.5), (1, 1.0), (2, 2.0)]
    assert {line.session_id for line in proxy.rewards()} == {session.session_id}
    assert [view.turn.step for view in proxy.turns()] == [0, 1, 1, 2]
    ended = (session.credit, session.task_id, session.termination_reason)
    assert ended == ("step_wise", "t", "max_turns_exceeded")


@pytest.mark.parametrize("kind", [*STEPPED, *PROPAGATED])
def test_a_step_that_returns_false_is_the_last(proxy, model, kind):
    made = run(make(kind, model, stop_after=1))
    assert [exp.eid.step for exp in made] == [0, 1, 1]
    assert kind in STEPPED or [exp.metrics for exp in made] == [{"actual_env_steps": 2}] * 3
    assert last_session(proxy).termination_reason == "env_done"


@pytest.mark.parametrize("kind", STEPPED)
def test_a_step_without_calls_is_judged_and_gives_no_experience(proxy, model, kind):
    workflow = make(kind, model, calls=(1, 0, 1))
    assert [exp.eid.step for exp in run(workflow)] == [0, 2]
    assert workflow.seen == [1, 0, 1]
    assert [line.step for line in proxy.rewards()] == [0, 2]


@pytest.mark.parametrize("broken", [{"break_in_step": 1}, {"break_in_reward": 1}])
@pytest.mark.parametrize("kind", STEPPED)
def test_an_exception_loses_no_turn_and_no_earlier_reward(proxy, model, kind, broken):
    """Trinity loses the whole run. Here turns and earlier rewards are in the ledger and on the object."""
    workflow = make(kind, model, **broken)
    with pytest.raises(RuntimeError, match="crashed"):
        run(workflow)
    turns = [(view.turn.step, view.turn.outcome) for view in proxy.turns()]
    assert turns == [(0, "exact"), (1, "exact"), (1, "exact")]
    assert [(line.step, line.value) for line in proxy.rewards()] == [(0, 0.5)]
    assert (last_session(proxy).status, last_session(proxy).termination_reason) == ("ended", "error")
    assert [exp.reward for exp in workflow.experiences] == [0.5, None, None]


@pytest.mark.parametrize("kind", PROPAGATED)
def test_a_run_has_one_reward_and_counts_its_steps(proxy, model, kind):
    """All experiences get it, and `actual_env_steps`; the ledger gets one line for the session."""
    workflow = make(kind, model)
    made = run(workflow)
    assert [(exp.eid.step, exp.reward, exp.metrics) for exp in made] == [
        (step, 0.5, {"actual_env_steps": 3}) for step in (0, 1, 1, 2)
    ]
    assert workflow.seen == [4]
    session = last_session(proxy)
    assert [(line.session_id, line.step, line.value) for line in proxy.rewards()] == [(session.session_id, None, 0.5)]
    assert session.credit == "propagate"


@pytest.mark.parametrize("kind", PROPAGATED)
def test_a_run_without_any_call_is_judged_too(proxy, model, kind):
    """`reward` is called with an empty list; the session's line finishes it, so that its group need not wait."""
    workflow = make(kind, model, calls=(0, 0, 0))
    assert run(workflow) == []
    assert workflow.seen == [0]
    assert [line.value for line in proxy.rewards()] == [0.5]


@pytest.mark.parametrize("kind", PROPAGATED)
def test_after_an_exception_a_run_may_still_be_rewarded(proxy, model, kind):
    with pytest.raises(RuntimeError):
        run(make(kind, model, break_in_step=1))
    assert (len(proxy.turns()), proxy.rewards(), last_session(proxy).termination_reason) == (3, [], "error")


@pytest.mark.parametrize("kind", [Stepped, Propagated])
def test_history_is_required(proxy, kind):
    model = ModelWrapper(proxy.url, enable_history=False)
    with pytest.raises(InvalidRequest, match="enable_history=True"):
        make(kind, model)
    with pytest.raises(InvalidRequest, match="enable_history=True"):
        model.extract_experience_from_history()


def test_the_client_is_synchronous_or_asynchronous_as_the_workflow_is(model):
    """Trinity hands asynchronous workflows the synchronous client; here each gets its own, or none."""
    assert type(make(Stepped, model).client) is openai.OpenAI
    assert type(make(AsyncStepped, model).client) is openai.AsyncOpenAI
    task = Task(workflow_args={"plan": Plan()})
    assert Stepped(task=task, model=model, use_openai_client=False).client is None


def test_the_flags_of_each_workflow_are_the_originals_also_under_their_old_names(model):
    """Neither is repeatable or resettable; only the asynchronous variants are asynchronous."""
    for kind, is_async in [(Stepped, False), (AsyncStepped, True), (Propagated, False), (AsyncPropagated, True)]:
        workflow = make(kind, model)
        assert (workflow.repeatable, workflow.resettable, workflow.asynchronous) == (False, False, is_async)
        assert (kind.can_repeat, kind.can_reset, kind.is_async) == (False, False, is_async)


def test_a_second_run_of_one_object_is_a_second_session(proxy, model):
    """The agent keeps one client, which samples in the session of the current run."""
    workflow = make(Stepped, model)
    run(workflow)
    run(workflow)
    assert [session.num_turns for session in proxy.sessions()] == [4, 4]


def test_the_ids_of_an_experience_omit_the_narrower_parts():
    """Group, run and step ids omit the narrower parts; the suffix is six hex digits."""
    eid = EID(batch=1, task=2, run=3, step=4, suffix="abc")
    assert (eid.uid, eid.tid, eid.rid, eid.sid, str(eid)) == ("1/2/3/4/abc", "1/2", "1/2/3", "1/2/4", "1/2/3/4/abc")
    assert len(EID().suffix) == 6
    assert EID(**eid.to_dict()) == eid


def test_the_type_of_an_experience_follows_from_its_fields():
    """A mask makes it multi-turn, a pair makes it dpo, else it is a single turn that must have a response."""
    assert Experience(tokens=[1, 2, 3], action_mask=[True, False]).experience_type == "multi_turn"
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4])
    assert (pair.experience_type, pair.prompt_length) == ("dpo", 2)
    single = Experience(tokens=[1, 2, 3], prompt_length=1)
    assert (single.experience_type, single.action_mask.tolist(), single.tokens.dtype) == (
        "single_turn",
        [True, True],
        np.int32,
    )
    with pytest.raises(InvalidRequest, match="needs a response"):
        Experience(tokens=[1, 2], prompt_length=2)
    with pytest.raises(InvalidRequest, match="above 0"):
        Experience(tokens=[1, 2], prompt_length=0)
    cut = Experience(tokens=[1], prompt_length=1, truncate_status="prompt_truncated", logprobs=[-1.0])
    assert cut.action_mask.tolist() == [False]
    assert Experience(eid={"task": "t"}, tokens=[1, 2]).eid.task == "t"


def test_a_task_makes_its_workflow_and_reads_its_sample(model):
    task = Task(workflow=Stepped, raw_task={"prompt": "q", "response": "a"}, workflow_args={"plan": Plan()})
    workflow = task.to_workflow(model, auxiliary_models=[model])
    assert (type(workflow), workflow.task) == (Stepped, task)
    assert (task.task_desc, task.truth, task.to_dict()) == ("q", "a", {"prompt": "q", "response": "a"})
    assert type(workflow.auxiliary_models[0]) is openai.OpenAI
    assert workflow.auxiliary_model_wrappers == [model]
    with pytest.raises(ValueError, match="names no workflow"):
        Task().to_workflow(model)


FIELDS = {
    Experience: "eid tokens prompt_length logprobs reward token_level_reward advantages returns truncate_status info "
    "metrics response_text prompt_text action_mask messages tools chosen rejected chosen_messages rejected_messages "
    "multi_modal_inputs teacher_logprobs routed_experts custom_fields experience_type",
    Task: "workflow repeat_times format_args rollout_args workflow_args reward_fn_args is_eval reward_fn raw_task "
    "batch_id task_id index",
    EID: "batch task run step suffix",
}


@pytest.mark.parametrize("record", FIELDS)
def test_records_have_the_fields_of_the_original(record):
    assert set(FIELDS[record].split()) <= {field.name for field in dataclasses.fields(record)}


def task_of(kind, **fields):
    plan = fields.pop("plan", Plan())
    return Task(**{"workflow": kind, "workflow_args": {"plan": plan}, "batch_id": "b", "task_id": "t", **fields})


@pytest.mark.parametrize(
    ("kind", "mode"), [(Stepped, "sequential"), (AsyncStepped, "asynchronous"), (Propagated, "multi-threading")]
)
def test_the_runner_numbers_runs_and_fills_in_the_rest(proxy, model, kind, mode):
    """Runs count from the base on; batch and task are filled in; each run is a session of the task's group."""
    task = task_of(kind, repeat_times=3, index={"i": 1})
    status, made = run_task(model, task, mode=mode, repeat_times=3, run_id_base=5)
    assert (status.ok, status.completed_runs, status.message) == (True, 3, None)
    assert [exp.eid.rid for exp in made] == [f"b/t/{run}" for run in (5, 6, 7) for _ in range(4)]
    assert made[0].info["use_count"] == 0
    assert made[0].info["task_index"] == {"i": 1}
    assert (made[0].info["model_version"], made[0].info["model_version_drift"]) == (1, 0)
    assert {(session.group_id, session.group_size) for session in proxy.sessions()} == {("b/t", 3)}
    assert sorted(session.run for session in proxy.sessions()) == [5, 6, 7]
    assert "time/run_execution" in status.metrics[0]


def test_a_synchronous_run_does_not_block_an_asynchronous_runner(model):
    """Two runs meet at a barrier inside their synchronous `run`: one that blocked the event loop would wait alone."""
    meeting = threading.Barrier(2, timeout=WAIT_SECONDS)

    class Meeting(Stepped):
        def run(self):
            meeting.wait()
            return []

    status, _ = run_task(model, task_of(Meeting), mode="asynchronous", repeat_times=2)
    assert (status.ok, status.completed_runs) == (True, 2)


def test_the_runner_keeps_a_task_that_the_workflow_set_and_averages_metrics(proxy, model):
    """`eid.task` is filled in only where it is unset; a run's metrics are means over its experiences.

    Four experiences with 1, 1, 1 and 3 make 1.5.
    """

    class Naming(Stepped):
        def run(self):
            made = super().run()
            for exp in made:
                exp.metrics["tries"] = 3.0 if exp is made[-1] else 1.0
            made[0].eid.task = "mine"
            return made

    status, made = run_task(model, task_of(Naming))
    assert [exp.eid.task for exp in made] == ["mine", "t", "t", "t"]
    assert status.metrics[0]["tries"] == 1.5


def test_a_failed_run_is_excluded_and_the_others_are_kept(proxy, model):
    """Two of three are returned; the first traceback is the message; the ledger has the third too."""
    broken = iter([False, True, False])

    class Fragile(Stepped):
        def check(self, step_num):
            if step_num == 0 and next(broken):
                raise RuntimeError("the tool crashed")
            return False

    status, made = run_task(model, task_of(Fragile), repeat_times=3)
    assert (status.ok, status.completed_runs, status.total_runs) == (False, 2, 3)
    assert "the tool crashed" in status.message
    assert [exp.eid.run for exp in made] == [0, 2]
    assert len(proxy.turns()) == 3


def test_without_partial_runs_the_first_failure_is_the_last_run(proxy, model):
    task = task_of(Stepped, plan=Plan(break_in_step=0))
    status, _ = run_task(model, task, repeat_times=3, collect_partial_runs=False)
    assert (status.completed_runs, len(proxy.sessions())) == (0, 1)


def test_experiences_of_an_evaluation_are_not_returned(proxy, model):
    status, made = run_task(model, task_of(Stepped, is_eval=True))
    assert (status.ok, made) == (True, [])
    assert last_session(proxy).split == "eval"
