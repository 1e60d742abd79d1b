"""A crew of one agent and one task."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from shell import API_KEY, BASE_URL, MODEL, PROMPT, bash

llm = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=API_KEY, stream=True)
agent = Agent(role="Checker", goal="Run checks.", backstory="You check.", llm=llm, tools=[tool("bash")(bash)])
task = Task(description=PROMPT, expected_output="A report.", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
