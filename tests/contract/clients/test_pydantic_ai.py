"""pydantic-ai through the proxy: tools, typed output, history and streaming, over each route that it speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pydantic
import pytest
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from support.proxies import RunningProxy
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, ToolCall

pytestmark = pytest.mark.filterwarnings("default")

ROUTES = ["chat", "responses", "messages"]
MakeModel = Callable[[str, str], Model[Any]]
"""Takes a route and a session."""


class City(pydantic.BaseModel):
    """A typed reply."""

    name: str
    size: int


@pytest.fixture
def model(proxy: RunningProxy, async_http: httpx2.AsyncClient) -> MakeModel:
    return lambda route, session_id: _model(proxy, async_http, route, session_id)


def _model(proxy: RunningProxy, http: httpx2.AsyncClient, route: str, session_id: str) -> Model[Any]:
    if route == "messages":
        url = f"{proxy.url}/sessions/{session_id}"
        return AnthropicModel("fake", provider=AnthropicProvider(api_key="any", base_url=url, http_client=http))
    provider = OpenAIProvider(base_url=proxy.session_v1(session_id), api_key="any", http_client=http)
    return (OpenAIChatModel if route == "chat" else OpenAIResponsesModel)("fake", provider=provider)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_a_tool_and_a_history_is_one_exact_chain(
    proxy: RunningProxy, model: MakeModel, fake_engine: RunningFakeEngine, route: str, *, streamed: bool
) -> None:
    session_id = f"tool-{route}-{streamed}"
    call = ToolCall(name="weather", arguments={"city": "Łódź"})
    fake_engine.answer(Rule(contains="Weather?", reply=Reply(reasoning="let me look", tool_calls=[call])))
    agent = Agent(model(route, session_id), instructions="Be kind.")
    fake_engine.answer(Rule(contains="tomorrow", reply=Reply(text="Sun.")))
    asked: list[str] = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return f"rain in {city}"

    if streamed:
        async with agent.run_stream("Weather?") as running:
            await running.get_output()
            history = running.all_messages()
    else:
        history = (await agent.run("Weather?")).all_messages()
    assert asked == ["Łódź"]
    await agent.run("And tomorrow?", message_history=history)
    turns = [view.turn for view in proxy.turns(session_id)]
    assert len(turns) == 3
    assert {turn.outcome for turn in turns} == {"exact"}
    assert len({turn.chain_id for turn in turns}) == 1


@pytest.mark.parametrize("route", ROUTES)
async def test_a_typed_reply_is_parsed(model: MakeModel, route: str) -> None:
    agent = Agent(model(route, f"typed-{route}"), output_type=City)
    assert isinstance((await agent.run("Which city?")).output, City)


@pytest.mark.parametrize("route", ROUTES)
async def test_text_is_streamed_piece_by_piece(model: MakeModel, route: str) -> None:
    agent = Agent(model(route, f"streamed-{route}"))
    async with agent.run_stream("one two three four") as running:
        pieces = [piece async for piece in running.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "".join(pieces) == "one two three four"
