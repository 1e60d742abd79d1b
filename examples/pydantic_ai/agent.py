"""Answer a question with a tool, by pydantic-ai."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url="http://127.0.0.1:8100/v1")

agent = Agent(
    OpenAIChatModel("gpt-4.1-mini", provider=provider),
    instructions="You are a helpful agent. Look the weather up before you answer.",
)


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It rains in {city}, at 7 degrees."


result = agent.run_sync("Do I need an umbrella in Oslo?")
print(result.output)
