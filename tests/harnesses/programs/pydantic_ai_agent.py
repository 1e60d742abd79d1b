"""Two agents of pydantic-ai; one calls the other in a tool."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from shell import INSTRUCTIONS, MODEL, PROMPT, SUB_INSTRUCTIONS, bash

model = OpenAIChatModel(MODEL)
expert = Agent(model, instructions=SUB_INSTRUCTIONS)
agent = Agent(model, instructions=INSTRUCTIONS)
agent.tool_plain(bash)


@agent.tool_plain
async def delegate(task: str) -> str:
    """Give a task to another agent."""
    return (await expert.run(task)).output


print(agent.run_sync(PROMPT).output)
