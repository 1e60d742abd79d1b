"""Trinity-RFT's `ModelWrapper` on a real proxy: its history for each way of sampling.

Where the original records less, or refuses, the docstring describes both.
"""

import asyncio

import openai
import pydantic
import pytest
from support.waiting import wait_until
from turnwise_fake_engine import Fault, FaultKind, Reply, Rule, ToolCall, tokens

from turnwise.workflows import StepWiseRewardWorkflow, Task
from turnwise.workflows.trinity import ModelWrapper

USER = {"role": "user", "content": "Hello there"}
LONG = "one two three four five six seven eight"
PROMPTS = ["Once upon a time", "In the beginning"]


class City(pydantic.BaseModel):
    name: str


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def fake_engine(shared_engine):
    shared_engine.calls.clear()
    return shared_engine


@pytest.fixture
def model(proxy):
    wrapper = ModelWrapper(proxy.url, model="fake")
    yield wrapper
    wrapper.client.close()


def sampled(fake_engine):
    return [[*call.prompt_token_ids, *ids] for call in fake_engine.calls for ids in call.token_ids]


def in_one_loop(model, go):
    async def closing():
        try:
            return await go()
        finally:
            await model.async_client.aclose()

    return asyncio.run(closing())


def ask(client, **kwargs):
    return client.chat.completions.create(model="fake", messages=[USER], **kwargs)


def generated(model, is_async, prompts, **kwargs):
    if not is_async:
        return model.generate(prompts, **kwargs), model.extract_experience_from_history()

    async def go():
        made = await model.generate_async(prompts, **kwargs)
        return made, await model.extract_experience_from_history_async()

    return in_one_loop(model, go)


@pytest.mark.parametrize("is_async", [False, True])
def test_generate_returns_the_replies_to_each_prompt_and_history_has_them(model, fake_engine, is_async):
    """Two prompts by two choices: both replies to the first, then to the second; the same four are history."""
    made, history = generated(model, is_async, PROMPTS, n=2, max_tokens=4)
    assert [exp.turn_id for exp in history] == [exp.turn_id for exp in made]
    (call,) = fake_engine.calls
    prompts = [tokens.encode(prompt) for prompt in PROMPTS for _ in range(2)]
    assert [exp.tokens.tolist() for exp in made] == [
        [*prompt, *reply] for prompt, reply in zip(prompts, call.token_ids, strict=True)
    ]
    assert [exp.prompt_length for exp in made] == [len(prompt) for prompt in prompts]
    assert all(len(exp.logprobs) == len(exp.tokens) - exp.prompt_length for exp in made)


def test_chat_and_generate_use_the_wrappers_generate_kwargs(proxy, fake_engine):
    """`generate_kwargs` apply where the call itself sets no other value."""
    model = ModelWrapper(proxy.url, model="fake", generate_kwargs={"temperature": 0.5, "max_tokens": 3})
    model.chat([USER])
    model.generate(PROMPTS[:1], max_tokens=2)
    asked = [(call.body["temperature"], call.body["max_tokens"]) for call in fake_engine.calls]
    assert asked == [(0.5, 3), (0.5, 2)]
    model.client.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_chat_returns_one_experience_for_each_choice_and_history_has_them(model, fake_engine, is_async):
    if is_async:

        async def go():
            return await model.chat_async([USER], n=2), await model.extract_experience_from_history_async()

        made, history = in_one_loop(model, go)
    else:
        made, history = model.chat([USER], n=2), model.extract_experience_from_history()
    assert [exp.tokens.tolist() for exp in made] == sampled(fake_engine)
    assert [exp.turn_id for exp in history] == [exp.turn_id for exp in made]


def test_the_client_is_openais_own_and_the_reply_has_only_the_requested_fields(model, fake_engine):
    """The original patches `create` to ask for logprobs and token ids; here the call is unchanged, both are stored."""
    client = model.get_openai_client()
    assert type(client) is openai.OpenAI
    assert "create" not in vars(client.chat.completions)
    reply = ask(client)
    assert reply.choices[0].logprobs is None
    (made,) = model.extract_experience_from_history()
    assert made.tokens.tolist() == sampled(fake_engine)[0]
    assert len(made.logprobs) == len(made.tokens) - made.prompt_length


def test_thinking_is_switched_for_every_call_of_the_session(proxy, fake_engine):
    """The original forces `enable_thinking` on each `create`; here the session pins it, for `parse` and all too."""
    pinned = {"chat_template_kwargs": {"enable_thinking": False}}
    model = ModelWrapper(proxy.url, model="fake", session={"sampling": pinned})
    model.open()
    client = model.get_openai_client()
    ask(client)
    client.chat.completions.parse(model="fake", messages=[USER], response_format=City)
    assert [call.body["chat_template_kwargs"] for call in fake_engine.calls] == [{"enable_thinking": False}] * 2
    model.client.close()


def exhausted(client):
    for _ in ask(client, stream=True):
        pass


def with_helper(client):
    with client.chat.completions.stream(model="fake", messages=[USER]) as stream:
        stream.get_final_completion()


def raw(client):
    client.chat.completions.with_raw_response.create(model="fake", messages=[USER])


def parsed(client):
    client.chat.completions.parse(model="fake", messages=[USER], response_format=City)


def responses(client):
    client.responses.create(model="fake", input="Hello there")


@pytest.mark.parametrize("way", [ask, exhausted, with_helper, raw, parsed, responses])
def test_history_has_every_way_of_sampling(model, fake_engine, way):
    """The original records only `create` and its streams, not `stream`, raw replies, `parse` or responses."""
    way(model.get_openai_client())
    assert [exp.tokens.tolist() for exp in model.extract_experience_from_history()] == sampled(fake_engine)


@pytest.mark.parametrize("streamed", [False, True])
def test_history_has_tool_calls_and_thinking(model, fake_engine, streamed):
    """The original keeps only a stream's text; here the experience is the sampled tokens, whatever they encode."""
    call = ToolCall(name="weather", arguments={"city": "Łódź"})
    fake_engine.answer(Rule(reply=Reply(reasoning="let me look", tool_calls=[call])))
    reply = ask(model.get_openai_client(), tools=[WEATHER], stream=streamed)
    if streamed:
        list(reply)
    (made,) = model.extract_experience_from_history()
    assert [made.tokens.tolist()] == sampled(fake_engine)
    assert made.tools == [WEATHER]


def test_a_stream_that_is_closed_early_is_kept_as_aborted(model, proxy, fake_engine):
    """The original records the part that was read, and nothing of a stream that is dropped; here neither is trained on.

    Its sampled tokens are in the ledger, with its outcome.
    """
    fake_engine.answer(Rule(reply=Reply(text=LONG)))
    fake_engine.fail_next(Fault(kind=FaultKind.HANG_STREAM, after_chunks=5))
    with ask(model.get_openai_client(), stream=True) as stream:
        for _ in range(4):
            next(stream)
    turn = wait_for_turn(proxy, model.session_id)
    assert (turn.outcome, model.extract_experience_from_history()) == ("aborted", [])
    assert 0 < len(turn.token_ids) < len(tokens.encode(LONG))


def wait_for_turn(proxy, session_id):
    """Return the session's first turn; a dropped stream is stored as soon as the proxy notices."""
    wait_until(lambda: proxy.turns(session_id), "the closed stream is stored")
    return proxy.turns(session_id)[0].turn


def test_extracting_returns_and_clears(model, fake_engine):
    client = model.get_openai_client()
    ask(client)
    ask(client)
    assert len(model.extract_experience_from_history(clear_history=False)) == 2
    assert len(model.extract_experience_from_history()) == 2
    assert model.extract_experience_from_history() == []


def test_each_clone_has_its_own_history(model):
    """A clone records no calls of another clone, and the original wrapper none of either."""
    one, two = model.clone_with_isolated_history(), model.clone_with_isolated_history()
    ask(one.get_openai_client())
    two.generate(PROMPTS, max_tokens=2)
    assert [len(each.extract_experience_from_history()) for each in (one, two, model)] == [1, 2, 0]


def test_a_truncated_reply_is_marked_and_the_run_continues(proxy, fake_engine):
    """Over the OpenAI API the original marks nothing; as in its 0.6, a truncated reply does not end the run."""
    fake_engine.answer(Rule(reply=Reply(text="cut", finish_reason="length")))

    class Cut(StepWiseRewardWorkflow):
        max_step_num = 2

        def step(self, step_num):
            ask(self.client)
            return True

        def reward(self, exps, step_num):
            return 1.0

    model = ModelWrapper(proxy.url, model="fake")
    made = Cut(task=Task(), model=model).run()
    model.client.close()
    assert [exp.truncate_status for exp in made] == ["response_truncated"] * 2
