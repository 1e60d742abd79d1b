"""Answer a question with a tool, by smolagents."""

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return f"It rains in {city}, at 7 degrees."


model = OpenAIModel(model_id="gpt-4.1-mini", api_base="http://127.0.0.1:8100/sessions/umbrella/v1")
agent = ToolCallingAgent(tools=[get_weather], model=model)

print(agent.run("Do I need an umbrella in Oslo?"))
