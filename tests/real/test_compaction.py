"""Compaction on the wire in front of a real vLLM: what it sampled is stored, and the next request goes on from it."""

from typing import Any

import anthropic
import openai
import pytest

from turnwise.types import Outcome, Role

pytestmark = pytest.mark.engine


def test_both_sdks_go_on_from_summaries_that_a_real_engine_has_sampled(served):
    """The model is a tiny one that says anything: its words stand in the next prompt as it said them."""
    openai_client = openai.OpenAI(base_url=served.session_v1("openai"), api_key="any", max_retries=0)
    asked: dict[str, Any] = {"model": "any", "max_output_tokens": 24}
    first = openai_client.responses.create(input="Where is the key?", **asked)
    trigger: Any = [{"type": "compaction_trigger"}]
    with openai_client.responses.stream(input=trigger, previous_response_id=first.id, **asked) as events:
        made = list(events)[-1].response
    window = [{"role": "user", "content": "Where is the key?"}, made.output[0].to_dict()]
    openai_client.responses.create(input=[*window, {"role": "user", "content": "Go on."}], **asked)

    client = anthropic.Anthropic(base_url=f"{served.url}/sessions/anthropic", api_key="any", max_retries=0)
    beta: Any = client.beta.messages
    said: list[Any] = [{"role": "user", "content": "Where is the key?"}]
    reply = beta.create(model="any", max_tokens=24, messages=said)
    said += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "And now?"}]
    summed = beta.create(model="any", max_tokens=24, messages=said, compaction={"type": "summarize"})
    on: list[Any] = [{"role": "assistant", "content": summed.content}, {"role": "user", "content": "Go on."}]
    beta.create(model="any", max_tokens=24, messages=on)

    for session_id in ("openai", "anthropic"):
        views = served.turns(session_id)
        own, summary, after = (view.turn for view in views)
        assert [turn.outcome for turn in (own, summary, after)] == [Outcome.EXACT] * 3
        assert (summary.parent_turn_id, summary.role) == (own.turn_id, Role.SUMMARY)
        assert len(summary.token_ids) == len(summary.logprobs) > 0
        assert after.parent_turn_id is None
        assert summary.response["content"].strip() in str(views[2].messages[-2:][0]["content"])
        assert after.role == own.role
