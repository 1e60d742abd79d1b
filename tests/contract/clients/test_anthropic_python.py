"""anthropic-python through the proxy: create, stream, tools, thinking, counting, errors, sync and async."""

from typing import Any

import anthropic
import pytest
from support.proxies import RunningProxy

USER: Any = {"role": "user", "content": "Hello there"}


@pytest.fixture
def client(proxy: RunningProxy) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=proxy.url, api_key="any", max_retries=0)


def test_the_tool_runner_runs_a_tool_to_the_end(client, proxy):
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
