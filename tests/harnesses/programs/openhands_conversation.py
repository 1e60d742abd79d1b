"""A conversation of the OpenHands SDK."""

from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from shell import API_KEY, BASE_URL, MODEL, PROMPT

llm = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=API_KEY)
conversation = Conversation(Agent(llm=llm, tools=[Tool(name=TerminalTool.name)]), workspace=Path.cwd())
conversation.send_message(PROMPT)
conversation.run()
