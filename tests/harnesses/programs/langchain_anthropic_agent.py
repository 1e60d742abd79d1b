"""LangChain's agent with Anthropic's wire format, streamed; each reply must count the tokens of its prompt."""

import os

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from shell import INSTRUCTIONS, MODEL, PROMPT, bash

model = ChatAnthropic(
    model=MODEL, base_url=os.environ["ANTHROPIC_BASE_URL"], api_key="any", max_tokens=4096, streaming=True
)
said = create_agent(model, [bash], system_prompt=INSTRUCTIONS).invoke({"messages": [("user", PROMPT)]})["messages"]
for message in said:
    if message.type == "ai" and not (
        message.usage_metadata["input_tokens"] and message.usage_metadata["output_tokens"]
    ):
        raise SystemExit(f"no tokens are counted: {message.usage_metadata}")
print(said[-1].content)
