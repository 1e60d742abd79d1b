"""Answer a question with a tool, by a graph of two nodes."""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It rains in {city}, at 7 degrees."


model = ChatOpenAI(model="gpt-4.1-mini", base_url="http://127.0.0.1:8100/v1")
model_with_tools = model.bind_tools([get_weather])


def call_model(state: MessagesState) -> dict:
    system = SystemMessage("You are a helpful agent. Look the weather up before you answer.")
    return {"messages": [model_with_tools.invoke([system, *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("call_model", call_model)
graph.add_node("tools", ToolNode([get_weather]))
graph.add_edge(START, "call_model")
graph.add_conditional_edges("call_model", tools_condition)
graph.add_edge("tools", "call_model")
agent = graph.compile()

result = agent.invoke({"messages": [HumanMessage("Do I need an umbrella in Oslo?")]})
print(result["messages"][-1].content)
