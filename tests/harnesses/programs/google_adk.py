"""An agent of Google's ADK on Gemini's API, with a second agent as a tool."""

import asyncio

from google.adk.agents import Agent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai import types
from shell import INSTRUCTIONS, MODEL, PROMPT, SUB_INSTRUCTIONS, bash

model = Gemini(model=MODEL, retry_options=types.HttpRetryOptions(attempts=3))
delegate = Agent(name="delegate", model=model, instruction=SUB_INSTRUCTIONS, description="Takes a part of a task.")
agent = Agent(name="checker", model=model, instruction=INSTRUCTIONS, tools=[bash, AgentTool(delegate)])


async def main() -> None:
    for event in await InMemoryRunner(agent=agent).run_debug(PROMPT, quiet=True):
        if event.is_final_response():
            print(event.content.parts[0].text)


asyncio.run(main())
