"""An agent of Haystack."""

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT, bash

generator = OpenAIChatGenerator(Secret.from_token(API_KEY), model=MODEL, api_base_url=BASE_URL)
tool = create_tool_from_function(bash, description="Run a command.")
agent = Agent(chat_generator=generator, tools=[tool], system_prompt=INSTRUCTIONS)
print(agent.run(messages=[ChatMessage.from_user(PROMPT)])["last_message"].text)
