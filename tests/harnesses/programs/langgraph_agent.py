"""A graph of LangGraph, streamed, with a second agent as a tool."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from shell import INSTRUCTIONS, MODEL, PROMPT, SUB_INSTRUCTIONS, bash

model = ChatOpenAI(model=MODEL, streaming=True)


@tool
def delegate(task: str) -> str:
    """Give a task to another agent."""
    expert = create_react_agent(model, [bash], prompt=SUB_INSTRUCTIONS)
    return expert.invoke({"messages": [("user", task)]})["messages"][-1].content


agent = create_react_agent(model, [bash, delegate], prompt=INSTRUCTIONS)
print(agent.invoke({"messages": [("user", PROMPT)]})["messages"][-1].content)
