"""anthropic-python through the proxy: create, stream, tools, thinking, counting, errors, sync and async."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from support.proxies import RunningProxy
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine

USER: Any = {"role": "user", "content": "Hello there"}


@pytest.fixture
def client(proxy: RunningProxy) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=proxy.url, api_key="any", max_retries=0)


def test_the_stream_helper_gives_text_thinking_and_the_final_message(
    client: anthropic.Anthropic, fake_engine: RunningFakeEngine
) -> None:
    fake_engine.answer(Rule(reply=Reply(reasoning="hm, hm", text="So."), contains="think"))
    asked: Any = [{"role": "user", "content": "think"}]
    with client.messages.stream(
        model="fake", max_tokens=200, messages=asked, thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        events = list(stream)
    thoughts = "".join(event.thinking for event in events if event.type == "thinking")
    texts = "".join(event.text for event in events if event.type == "text")
    assert (thoughts, texts) == ("hm, hm", "So.")
    assert events[-1].type == "message_stop"
    with client.messages.stream(model="fake", max_tokens=50, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == "Hello there"


def test_the_tool_runner_runs_a_tool_to_the_end(client: anthropic.Anthropic, proxy: RunningProxy) -> None:
    looked: list[str] = []

    @anthropic.beta_tool
    def look(key: str) -> str:
        """Look a key up.

        Args:
            key: what to look up.
        """
        looked.append(key)
        return "found"

    runner = client.beta.messages.tool_runner(
        model="fake", max_tokens=200, tools=[look], messages=[{"role": "user", "content": "a loop"}]
    )
    last = runner.until_done()
    assert looked
    turn = next(view.turn for view in proxy.turns() if view.turn.turn_id == last.id)
    assert turn.parent_turn_id is not None
    assert turn.outcome == "exact"
