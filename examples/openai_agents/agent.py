"""Answer a question with a tool, by the OpenAI Agents SDK."""

from agents import Agent, Runner, function_tool, set_default_openai_client
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url="http://127.0.0.1:8100/v1"))


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It rains in {city}, at 7 degrees."


agent = Agent(
    name="Weather agent",
    instructions="You are a helpful agent. Look the weather up before you answer.",
    model="gpt-4.1-mini",
    tools=[get_weather],
)

result = Runner.run_sync(agent, "Do I need an umbrella in Oslo?")
print(result.final_output)
