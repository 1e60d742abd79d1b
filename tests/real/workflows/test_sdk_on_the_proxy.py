"""One agent as a subclass, with the client and over HTTP leaves the same credit in the ledger of a real proxy."""

import json

import httpx2
import pytest

from turnwise.client import Client
from turnwise.workflows import (
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
    Task,
)
from turnwise.workflows.trinity import ModelWrapper


@pytest.fixture
def client(proxy):
    with Client(proxy.url) as made:
        made.wait_until_ready(30.0)
        yield made


def ask(openai_client, text="hi", **kwargs):
    return openai_client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **kwargs)


CALLS = ((0, "first"), (1, "second"), (1, "third"))
STEP_REWARDS = ((0, 0.5), (1, 2.0))
RUN_REWARD = 0.75
DISCOUNTED = {"step_wise": {"credit": "step_wise", "gamma": 0.5}, "propagate": {"credit": "propagate"}}


class Stepped(StepWiseRewardWorkflow):
    max_step_num = 2

    def step(self, step_num):
        for step, text in CALLS:
            if step == step_num:
                ask(self.client, text)
        return step_num < 1

    def reward(self, exps, step_num):
        return dict(STEP_REWARDS)[step_num]


class Propagated(RewardPropagationWorkflow):
    max_step_num = 2
    step = Stepped.step

    def reward(self, exps):
        return RUN_REWARD


def by_subclass(proxy, credit):
    kind = Stepped if credit == "step_wise" else Propagated
    gamma = {name: value for name, value in DISCOUNTED[credit].items() if name == "gamma"}
    model = ModelWrapper(proxy.url, session={"session_id": f"subclass-{credit}", **gamma})
    kind(task=Task(), model=model).run()
    model.client.close()


def by_client(proxy, credit):
    with Client(proxy.url) as client:
        session = client.create_session(session_id=f"client-{credit}", **DISCOUNTED[credit])
        for step, text in CALLS:
            ask(session.openai(step=step), text)
        if credit == "step_wise":
            for step, value in STEP_REWARDS:
                session.reward(value, step=step)
        else:
            session.reward(RUN_REWARD)
        session.end()


def by_http(proxy, credit):
    session_id = f"http-{credit}"
    with httpx2.Client(base_url=proxy.url) as http:

        def post(path, body, **headers):
            http.post(path, json=body, headers=headers).raise_for_status()

        post("/v1/sessions", {"session_id": session_id, **DISCOUNTED[credit]})
        for step, text in CALLS:
            body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
            post(f"/sessions/{session_id}/v1/chat/completions", body, **{"X-Step": str(step)})
        if credit == "step_wise":
            for step, value in STEP_REWARDS:
                post("/v1/rewards", {"session_id": session_id, "step": step, "value": value})
        else:
            post("/v1/rewards", {"session_id": session_id, "value": RUN_REWARD})
        post(f"/v1/sessions/{session_id}/end", {})


def credit_of(ways, client, proxy, credit):
    left = {}
    for way, leave in ways.items():
        leave(proxy, credit)
        lines = client.experiences(session_id=f"{way}-{credit}")
        names = ("tokens", "prompt_length", "loss_mask", "turn_steps", "turn_rewards", "return", "reward")
        left[way] = [json.dumps({name: line[name] for name in names}) for line in lines]
    return left


@pytest.mark.parametrize("credit", ["step_wise", "propagate"])
def test_three_python_implementations_of_one_agent_give_the_same_credit(client, proxy, credit):
    """Discounted by 0.5, the first step returns 0.5 + 0.5 · 2 = 1.5; the reward of a run is not discounted."""
    left = credit_of({"subclass": by_subclass, "client": by_client, "http": by_http}, client, proxy, credit)
    assert len(set(map(tuple, left.values()))) == 1
    rewards = [json.loads(line)["turn_rewards"] for line in left["http"]]
    assert rewards == ([[0.5], [2.0], [2.0]] if credit == "step_wise" else [[0.75]] * 3)
    assert [json.loads(line)["turn_steps"] for line in left["http"]] == [[0], [1], [1]]
    returns = [json.loads(line)["return"] for line in left["http"]]
    assert returns == ([[1.5], [2.0], [2.0]] if credit == "step_wise" else [[0.75]] * 3)
