"""Agents that shorten long conversations: they leave out old messages or replace them by a summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from harnesses.entries.command_line import platform_binary
from harnesses.entry import PROMPT, Tool, python_program
from harnesses.shortening import ShorteningHarness
from turnwise_fake_engine import Reply, ToolCall


def _with_encodings(argv: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """Return a command that counts tokens with the encodings in LiteLLM's package, instead of downloading them."""
    encodings = "lib/*/site-packages/litellm/litellm_core_utils/tokenizers"
    return lambda directory: ["env", f"TIKTOKEN_CACHE_DIR={next(directory.glob(encodings))}", *argv(directory)]


def _gptme_call(calls: Sequence[ToolCall]) -> Reply:
    """Return a reply that calls gptme's tool as gptme's prompt describes it."""
    assert isinstance(calls[0].arguments, dict)
    return Reply(text=f"I look.\n\n```shell\n{calls[0].arguments['command']}\n```")


def _cline_call(calls: Sequence[ToolCall]) -> Reply:
    """Return a reply that calls Cline's tool, which takes several commands."""
    assert isinstance(calls[0].arguments, dict)
    arguments = {"commands": [calls[0].arguments["command"]]}
    return Reply(text="I look.", tool_calls=[ToolCall(name="run_commands", arguments=arguments)])


def _terminus(keystrokes: str, *, is_last: bool) -> Reply:
    """Return a reply in Terminus 2's format."""
    commands = [{"keystrokes": f"{keystrokes}\n", "duration": 0.1}]
    plan = {"analysis": "I see a terminal.", "plan": "I look.", "commands": commands, "task_complete": is_last}
    return Reply(text=json.dumps(plan))


def _terminus_call(calls: Sequence[ToolCall]) -> Reply:
    assert isinstance(calls[0].arguments, dict)
    return _terminus(str(calls[0].arguments["command"]), is_last=False)


COMPACTING = (
    ShorteningHarness(
        name="LangChain, SummarizationMiddleware",
        installer="pypi",
        package="langchain",
        beside=("langchain-openai",),
        dialect="chat",
        pointing="`ChatOpenAI(base_url=…/v1)`",
        argv=python_program("langchain_summary"),
        shortens="a summary replaces all but the last two messages",
        summary_texts=("Context Extraction Assistant",),
    ),
    ShorteningHarness(
        name="Inspect AI, CompactionSummary",
        installer="pypi",
        package="inspect-ai",
        beside=("openai",),
        dialect="chat",
        pointing='`get_model("openai-api/turnwise/NAME", base_url=…/v1)`',
        argv=python_program("inspect_compaction"),
        delegate=Tool("expert", "input"),
        shortens="a summary replaces everything after the first question",
        summary_texts=("tasked with summarizing conversations",),
    ),
    ShorteningHarness(
        name="AG2, SummarizeCompact",
        installer="pypi",
        package="ag2",
        beside=("openai",),
        dialect="chat",
        pointing="`OpenAIConfig(NAME, base_url=…/v1)`",
        argv=python_program("ag2_summary"),
        shortens="a summary replaces all but the last four events",
        summary_texts=("Summarize the following conversation history",),
        is_asked_again=True,
    ),
    ShorteningHarness(
        name="Semantic Kernel, ChatHistorySummarizationReducer",
        installer="pypi",
        package="semantic-kernel",
        dialect="chat",
        pointing="`OpenAIChatCompletion(NAME, async_client=AsyncOpenAI(base_url=…/v1))`",
        argv=python_program("semantic_kernel_summary"),
        tool=Tool("Shell-bash"),
        shortens="a summary replaces all but the last two messages",
        summary_texts=("summarization of the entire dialog",),
        is_asked_again=True,
    ),
    ShorteningHarness(
        name="gptme",
        installer="pypi",
        package="gptme",
        beside=("litellm",),
        dialect="chat",
        pointing="`OPENAI_BASE_URL=…/v1`, `MODEL=openai/NAME`",
        argv=_with_encodings(
            lambda directory: [str(directory / "bin" / "python"), "-m", "gptme", "--non-interactive", PROMPT]
        ),
        agent="gptme",
        ask=_gptme_call,
        last=lambda text: Reply(text=f"Done.\n\n```complete\n{text}\n```"),
        environment={"GPTME_CONTEXT_BUDGET": "8000"},
        shortens="a summary replaces its conversation at 8,000 tokens",
        summary_texts=("produce a structured checkpoint",),
    ),
    ShorteningHarness(
        name="Copilot CLI",
        installer="npm",
        package="@github/copilot",
        dialect="chat",
        pointing="`COPILOT_PROVIDER_BASE_URL=…/v1`, `COPILOT_MODEL`",
        argv=platform_binary("@github/copilot", "copilot", "-p", PROMPT, "--allow-all-tools"),
        agent="copilot",
        tool=Tool("bash", others={"description": "check"}),
        delegate=Tool("task", "prompt", {"description": "a part", "agent_type": "general-purpose", "name": "part"}),
        context_tokens=64_000,
        shortens="a summary replaces its conversation at 80 % of 60,000 tokens",
        summary_texts=("create a detailed summary of the conversation",),
    ),
    ShorteningHarness(
        name="Cline",
        installer="npm",
        package="cline",
        dialect="chat",
        pointing="`providers.json`: the provider `openai-compatible` with `baseUrl`",
        argv=platform_binary("@cline/cli", "bin/cline", "--json", PROMPT),
        agent="cline",
        ask=_cline_call,
        context_tokens=100_000,
        output_lines=5_000,
        shortens="a summary replaces all but its last messages at 81 % of 100,000 tokens",
        summary_texts=("Summar",),
    ),
    ShorteningHarness(
        name="Terminus 2",
        installer="pypi",
        package="terminal-bench",
        python=">=3.12",
        dialect="chat",
        pointing="`Terminus2(api_base=…/v1)`, model `openai/NAME`",
        argv=python_program("terminus_2"),
        ask=_terminus_call,
        last=lambda text: _terminus(f"echo {text}", is_last=True),
        offers_tools=False,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        shortens="a second agent's questions and their answers replace its conversation",
        summary_texts=(
            "hand off your work",
            "picking up work from a previous AI agent",
            "The next agent has a few questions",
        ),
    ),
)
TRIMMING = (
    ShorteningHarness(
        name="AutoGen, BufferedChatCompletionContext",
        installer="pypi",
        package="autogen-agentchat",
        beside=("autogen-ext[openai]",),
        dialect="chat",
        pointing="`OPENAI_BASE_URL=…/v1` or `OpenAIChatCompletionClient(base_url=…/v1)`",
        argv=python_program("autogen_window"),
        shortens="it sends the last five messages",
    ),
    ShorteningHarness(
        name="Langroid, drop_turns",
        installer="pypi",
        package="langroid",
        beside=("litellm",),
        dialect="chat",
        pointing="`OpenAIGPTConfig(api_base=…/v1)`",
        argv=_with_encodings(python_program("langroid_window")),
        shortens="it leaves out the oldest questions with their replies",
        is_asked_again=True,
    ),
)
