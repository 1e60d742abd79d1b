"""An agent of Inspect AI that summarises its conversation, with the same agent as a tool."""

import inspect_ai
from inspect_ai.agent import as_tool, react
from inspect_ai.dataset import Sample
from inspect_ai.model import CompactionSummary, get_model
from inspect_ai.tool import tool
from shell import API_KEY, BASE_URL, MODEL, PROMPT, bash


@tool(name="bash")
def shell():
    async def execute(command: str) -> str:
        """Run a command.

        Args:
            command: The command.
        """
        return bash(command)

    return execute


async def count_characters(text: str) -> int:
    """Count without the encoding of tokens, which it would download."""
    return len(text)


model = get_model(f"openai-api/turnwise/{MODEL}", base_url=BASE_URL, api_key=API_KEY)
model.api.count_text_tokens = count_characters
settings = {"model": model, "submit": False, "compaction": CompactionSummary(threshold=4_000)}
expert = react(name="expert", description="Takes a part of a task.", tools=[shell()], **settings)
delegate = as_tool(expert)
agent = react(tools=[shell(), delegate], **settings)
task = inspect_ai.Task([Sample(PROMPT)], solver=agent)
(log,) = inspect_ai.eval(task, model=model, display="none")
print(log.samples[0].output.completion)
