"""A function agent of LlamaIndex, streamed."""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, bash

llm = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=API_KEY, is_chat_model=True, is_function_calling_model=True)


async def main() -> None:
    print(await FunctionAgent(tools=[bash], llm=llm, system_prompt=INSTRUCTIONS).run(PROMPT))


asyncio.run(main())
