"""A chat of Semantic Kernel that summarises its history between questions."""

import asyncio

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import ChatHistorySummarizationReducer
from semantic_kernel.functions import kernel_function
from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, bash


class Shell:
    bash = staticmethod(kernel_function(name="bash")(bash))


async def main() -> None:
    service = OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
    agent = ChatCompletionAgent(service=service, name="checker", instructions=INSTRUCTIONS, plugins=[Shell()])
    history = ChatHistorySummarizationReducer(service=service, target_count=2, threshold_count=1)
    thread = ChatHistoryAgentThread(history)
    for _ in range(4):
        print(await agent.get_response(messages=PROMPT, thread=thread))
        await thread.reduce()


asyncio.run(main())
