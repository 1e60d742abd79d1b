"""An assistant of AutoGen that sends only the last messages of its conversation."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from shell import INSTRUCTIONS, MODEL, PROMPT, bash

info = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")
agent = AssistantAgent(
    "checker",
    OpenAIChatCompletionClient(model=MODEL, model_info=info),
    tools=[bash],
    system_message=INSTRUCTIONS,
    max_tool_iterations=20,
    model_context=BufferedChatCompletionContext(buffer_size=5),
)
print(asyncio.run(agent.run(task=PROMPT)).messages[-1].content)
