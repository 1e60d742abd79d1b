"""An agent of Strands, streamed, with a second agent as a tool."""

from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, SUB_INSTRUCTIONS, bash
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"base_url": BASE_URL, "api_key": API_KEY}, model_id=MODEL)


@tool
def delegate(task: str) -> str:
    """Give a task to another agent."""
    # An agent without tools would send `tools: []`, which OpenAI and vLLM refuse.
    return str(Agent(model=model, system_prompt=SUB_INSTRUCTIONS, tools=[tool(bash)], callback_handler=None)(task))


agent = Agent(model=model, system_prompt=INSTRUCTIONS, tools=[tool(bash), delegate], callback_handler=None)
print(agent(PROMPT))
