"""Follow a trail of people with one tool, by pydantic-ai with streamed replies, called for one task.

turnwise run --tasks tasks.jsonl --call examples.pydantic_ai.trail:play
"""

import json
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext, UsageLimits
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

# One client for all runs, so that they share its connections; each run sets its own address and key.
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1:8100/v1", api_key="none")

# A call that cannot be parsed ends the run with the reward 0: pydantic-ai would send it back with other arguments.
agent = Agent(deps_type=dict, instructions='Look people up, then reply: The answer is "CITY".', retries=0)


@agent.tool
def lookup(context: RunContext[dict], name: str) -> str:
    """Look a person up."""
    return json.dumps(context.deps.get(name, {"error": "nobody"}))


async def play(task: dict, run: Any) -> float:
    """Play one task; return 1 for the right answer, otherwise 0."""
    client = CLIENT.with_options(base_url=run.base_url, api_key=run.api_key)
    # Sampling explores in training; held-out tasks are measured with the most probable tokens.
    settings = {"temperature": 0.0 if run.split == "eval" else 1.0, "max_tokens": 64}
    try:
        async with agent.run_stream(
            task["question"],
            deps=task["records"],
            model=OpenAIChatModel(run.model, provider=OpenAIProvider(openai_client=client)),
            model_settings=settings,
            usage_limits=UsageLimits(request_limit=task["max_lookups"] + 1),
        ) as result:
            answer = await result.get_output()
    except AgentRunError:  # too many requests, a call that cannot be parsed, or of a tool that does not exist
        return 0.0
    return float(answer.strip() == f'The answer is "{task["answer"]}".')
