"""An agent of LangChain that summarises its conversation, streamed."""

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_openai import ChatOpenAI
from shell import INSTRUCTIONS, MODEL, PROMPT, bash

model = ChatOpenAI(model=MODEL, streaming=True)
middleware = SummarizationMiddleware(model, trigger=("messages", 6), keep=("messages", 2))
agent = create_agent(model, [bash], system_prompt=INSTRUCTIONS, middleware=[middleware])
print(agent.invoke({"messages": [("user", PROMPT)]})["messages"][-1].content)
