"""Two agents of the OpenAI Agents SDK, streamed, on the Responses API; one is a tool of the other."""

import asyncio

from agents import Agent, Runner, function_tool, set_tracing_disabled
from shell import INSTRUCTIONS, MODEL, PROMPT, SUB_INSTRUCTIONS, bash

set_tracing_disabled(True)
expert = Agent(name="Expert", instructions=SUB_INSTRUCTIONS, model=MODEL)
delegate = expert.as_tool("delegate", "Give a task to another agent.")
agent = Agent(name="Agent", instructions=INSTRUCTIONS, model=MODEL, tools=[function_tool(bash), delegate])


async def main() -> None:
    result = Runner.run_streamed(agent, PROMPT)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
