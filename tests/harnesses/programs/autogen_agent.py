"""An assistant of AutoGen, streamed."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from shell import INSTRUCTIONS, MODEL, PROMPT, bash

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}
client = OpenAIChatCompletionClient(model=MODEL, model_info=INFO)
agent = AssistantAgent(
    "checker",
    client,
    tools=[bash],
    system_message=INSTRUCTIONS,
    max_tool_iterations=5,
    model_client_stream=True,
)
print(asyncio.run(agent.run(task=PROMPT)).messages[-1].content)
