"""A chat of Langroid with a short context: it drops its oldest questions."""

import langroid as lr
from langroid.language_models import OpenAIGPTConfig
from shell import API_KEY, BASE_URL, INSTRUCTIONS, MODEL, PROMPT
from shell import bash as run


class Bash(lr.ToolMessage):
    request: str = "bash"
    purpose: str = "Run a <command>."
    command: str

    def handle(self) -> str:
        return run(self.command)


llm = OpenAIGPTConfig(
    chat_model=MODEL,
    api_base=BASE_URL,
    api_key=API_KEY,
    chat_context_length=1_000,
    max_output_tokens=200,
    stream=False,  # its reader of streams requires `arguments` in the first chunk of a call, which vLLM leaves out
)
config = lr.ChatAgentConfig(
    llm=llm,
    system_message=INSTRUCTIONS,
    use_tools=False,
    use_functions_api=True,
    context_overflow_strategy="drop_turns",
)
agent = lr.ChatAgent(config)
agent.enable_message(Bash)
for _ in range(5):
    print(lr.Task(agent, interactive=False, restart=False).run(PROMPT, turns=4))
