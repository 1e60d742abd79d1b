"""An agent of Agno, streamed."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, bash

model = OpenAILike(id=MODEL, base_url=BASE_URL, api_key=API_KEY)
agent = Agent(model=model, instructions=INSTRUCTIONS, tools=[bash], telemetry=False)
print("".join(event.content or "" for event in agent.run(PROMPT, stream=True)))
