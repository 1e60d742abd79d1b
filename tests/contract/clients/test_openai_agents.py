"""openai-agents through the proxy: tools, hand-offs, typed output and streaming, over both of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Callable

import agents
import httpx2
import openai
import pydantic
import pytest
from support.proxies import RunningProxy
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, ToolCall

pytestmark = pytest.mark.filterwarnings("default")
agents.set_tracing_disabled(disabled=True)

ROUTES = ["chat", "responses"]
MakeModel = Callable[[str, str], agents.Model]
"""Takes a route and a session."""


class City(pydantic.BaseModel):
    """A typed reply."""

    name: str
    size: int


@agents.function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def model(proxy: RunningProxy, async_http: httpx2.AsyncClient) -> MakeModel:
    return lambda route, session_id: _model(proxy, async_http, route, session_id)


def _model(proxy: RunningProxy, http: httpx2.AsyncClient, route: str, session_id: str) -> agents.Model:
    url = proxy.session_v1(session_id)
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, http_client=http)
    if route == "chat":
        return agents.OpenAIChatCompletionsModel("fake", client)
    return agents.OpenAIResponsesModel("fake", client)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_a_tool_is_one_exact_chain(
    proxy: RunningProxy, model: MakeModel, fake_engine: RunningFakeEngine, route: str, *, streamed: bool
) -> None:
    session_id = f"tool-{route}-{streamed}"
    calls = [ToolCall(name="weather", arguments={"city": city}) for city in ("Oslo", "Łódź")]
    fake_engine.answer(Rule(contains="Weather?", reply=Reply(reasoning="let me look", tool_calls=calls)))
    agent = agents.Agent("guide", instructions="Be kind.", tools=[weather], model=model(route, session_id))
    if streamed:
        running = agents.Runner.run_streamed(agent, "Weather?")
        kinds = {event.type async for event in running.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        items = running.new_items
    else:
        items = (await agents.Runner.run(agent, "Weather?")).new_items
    assert sorted(item.output for item in items if isinstance(item, agents.ToolCallOutputItem)) == [
        "rain in Oslo",
        "rain in Łódź",
    ]
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [turn.outcome for turn in turns] == ["exact", "exact"]
    assert len({turn.chain_id for turn in turns}) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_typed_reply_is_parsed(model: MakeModel, route: str) -> None:
    agent = agents.Agent("guide", output_type=City, model=model(route, f"typed-{route}"))
    assert isinstance((await agents.Runner.run(agent, "Which city?")).final_output, City)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_hand_off_starts_a_new_chain(
    proxy: RunningProxy, model: MakeModel, fake_engine: RunningFakeEngine, route: str
) -> None:
    session_id = f"handoff-{route}"
    expert = agents.Agent("expert", instructions="Know it.", model=model(route, session_id))
    clerk = agents.Agent("clerk", instructions="Ask.", handoffs=[expert], model=model(route, session_id))
    fake_engine.answer(Rule(contains="Help!", count=1, reply=Reply(tool_calls=[ToolCall(name="transfer_to_expert")])))
    done = await agents.Runner.run(clerk, "Help!")
    assert done.last_agent is expert
    assert [view.turn.reason for view in proxy.turns(session_id)] == [None, "system_changed"]


async def test_previous_responses_carry_a_conversation(proxy: RunningProxy, model: MakeModel) -> None:
    agent = agents.Agent("guide", instructions="Be kind.", model=model("responses", "carried"))
    first = await agents.Runner.run(agent, "one")
    second = await agents.Runner.run(agent, "two", previous_response_id=first.last_response_id)
    assert second.final_output == "two"
    turns = [view.turn for view in proxy.turns("carried")]
    assert [turn.parent_turn_id for turn in turns] == [None, first.last_response_id]
    assert turns[1].outcome == "exact"
