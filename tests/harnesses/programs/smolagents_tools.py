"""An agent of smolagents that calls tools, with a managed agent."""

from shell import API_KEY, BASE_URL, MODEL, PROMPT, bash
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=API_KEY)
expert = ToolCallingAgent(tools=[], model=model, name="expert", description="Looks at one part of a task.")
agent = ToolCallingAgent(tools=[tool(bash)], model=model, managed_agents=[expert])
print(agent.run(PROMPT))
