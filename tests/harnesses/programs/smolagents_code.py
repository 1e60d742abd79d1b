"""An agent of smolagents that writes code."""

from shell import API_KEY, BASE_URL, MODEL, PROMPT, bash
from smolagents import CodeAgent, OpenAIModel, tool

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=API_KEY)
agent = CodeAgent(tools=[tool(bash)], model=model)
print(agent.run(PROMPT))
