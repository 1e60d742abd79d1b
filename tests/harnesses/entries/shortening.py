"""Agents that shorten long conversations: they leave out old messages or replace them by a summary."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from harnesses.entries.command_line import OWN_PROVIDER, platform_binary
from harnesses.entry import PROMPT, Tool, python_program
from harnesses.shortening import ShorteningHarness
from turnwise_fake_engine import Reply, ToolCall

from turnwise.rollouts.agents import MAX_OUTPUT_TOKENS

pypi = functools.partial(ShorteningHarness, installer="pypi")
npm = functools.partial(ShorteningHarness, installer="npm")
"""Entries of each installer: name, package, setting of the base URL, command."""


def _with_encodings(argv: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """Return a command that counts tokens with the encodings in LiteLLM's package, instead of downloading them."""
    encodings = "lib/*/site-packages/litellm/litellm_core_utils/tokenizers"
    return lambda directory: ["env", f"TIKTOKEN_CACHE_DIR={next(directory.glob(encodings))}", *argv(directory)]


def _gptme_call(calls: Sequence[ToolCall]) -> Reply:
    return Reply(text=f"I look.\n\n```shell\n{calls[0].arguments['command']}\n```")


def _cline_call(calls: Sequence[ToolCall]) -> Reply:
    arguments = {"commands": [calls[0].arguments["command"]]}
    return Reply(text="I look.", tool_calls=[ToolCall(name="run_commands", arguments=arguments)])


def _terminus(keystrokes: str, *, is_last: bool) -> Reply:
    commands = [{"keystrokes": f"{keystrokes}\n", "duration": 0.1}]
    plan = {"analysis": "I see a terminal.", "plan": "I look.", "commands": commands, "task_complete": is_last}
    return Reply(text=json.dumps(plan))


def _terminus_call(calls: Sequence[ToolCall]) -> Reply:
    return _terminus(str(calls[0].arguments["command"]), is_last=False)


REMOTE_COMPACTION = OWN_PROVIDER.replace('"$1"', '-c model_auto_compact_token_limit=40000 "$1"')
COMPACTING = (
    pypi(
        "LangChain, SummarizationMiddleware",
        "langchain",
        "`ChatOpenAI(base_url=…/v1)`",
        python_program("langchain_summary"),
        beside=("langchain-openai",),
        shortens="a summary replaces all but the last two messages",
        summary_texts=("Context Extraction Assistant",),
    ),
    pypi(
        "Inspect AI, CompactionSummary",
        "inspect-ai",
        '`get_model("openai-api/turnwise/NAME", base_url=…/v1)`',
        python_program("inspect_compaction"),
        beside=("openai",),
        delegate=Tool("expert", "input"),
        shortens="a summary replaces everything after the first question",
        summary_texts=("tasked with summarizing conversations",),
    ),
    pypi(
        "AG2, SummarizeCompact",
        "ag2",
        "`OpenAIConfig(NAME, base_url=…/v1)`",
        python_program("ag2_summary"),
        beside=("openai",),
        shortens="a summary replaces all but the last four events",
        summary_texts=("Summarize the following conversation history",),
        is_asked_again=True,
    ),
    pypi(
        "Semantic Kernel, ChatHistorySummarizationReducer",
        "semantic-kernel",
        "`OpenAIChatCompletion(NAME, async_client=AsyncOpenAI(base_url=…/v1))`",
        python_program("semantic_kernel_summary"),
        tool=Tool("Shell-bash"),
        shortens="a summary replaces all but the last two messages",
        summary_texts=("summarization of the entire dialog",),
        is_asked_again=True,
    ),
    pypi(
        "gptme",
        "gptme",
        "`OPENAI_BASE_URL=…/v1`, `MODEL=openai/NAME`",
        _with_encodings(
            lambda directory: [str(directory / "bin" / "python"), "-m", "gptme", "--non-interactive", PROMPT]
        ),
        beside=("litellm",),
        agent="gptme",
        ask=_gptme_call,
        last=lambda text: Reply(text=f"Done.\n\n```complete\n{text}\n```"),
        environment={"GPTME_CONTEXT_BUDGET": "8000"},
        shortens="a summary replaces its conversation at 8,000 tokens",
        summary_texts=("produce a structured checkpoint",),
    ),
    npm(
        "Copilot CLI",
        "@github/copilot",
        "`COPILOT_PROVIDER_BASE_URL=…/v1`, `COPILOT_MODEL`",
        platform_binary("@github/copilot", "copilot", "-p", PROMPT, "--allow-all-tools"),
        agent="copilot",
        tool=Tool("bash", others={"description": "check"}),
        delegate=Tool("task", "prompt", {"description": "a part", "agent_type": "general-purpose", "name": "part"}),
        context_for=lambda tokens: tokens / 0.8 + MAX_OUTPUT_TOKENS,
        output_lines=2_000,
        shortens="a summary replaces its conversation at 80 % of its context",
        summary_texts=("create a detailed summary of the conversation",),
    ),
    npm(
        "Cline",
        "cline",
        "`providers.json`: the provider `openai-compatible` with `baseUrl`",
        platform_binary("@cline/cli", "bin/cline", "--json", PROMPT),
        agent="cline",
        ask=_cline_call,
        context_for=lambda tokens: tokens / 0.9,
        output_lines=5_000,
        shortens="a summary replaces all but its last messages at 90 % of its context",
        summary_texts=("Summar",),
    ),
    npm(
        "Codex CLI, remote compaction",
        "@openai/codex",
        "`openai_base_url = …/v1` in `config.toml`, `CODEX_API_KEY`",
        lambda directory: ["sh", "-c", REMOTE_COMPACTION, str(directory / "node_modules" / ".bin" / "codex"), PROMPT],
        dialect="responses",
        tool=Tool("exec_command", "cmd", {"yield_time_ms": 60_000}),
        environment={"CODEX_API_KEY": "any"},
        output_lines=2_000,
        shortens="a `compaction` item of the proxy replaces all but the user's messages at 40,000 tokens",
        summary_texts=("Write the summary and nothing else",),
    ),
    npm(
        "Claude Code, auto-compact",
        "@anthropic-ai/claude-code",
        "`ANTHROPIC_BASE_URL=…` (no `/v1`), `ANTHROPIC_AUTH_TOKEN`, `ANTHROPIC_MODEL`",
        platform_binary(
            "@anthropic-ai/claude-code", "claude", "-p", PROMPT, "--output-format", "json", "--allowedTools", "Bash"
        ),
        dialect="messages",
        agent="claude-code",
        tool=Tool("Bash", others={"description": "check"}),
        environment={"CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "5"},
        output_lines=2_000,
        shortens="a summary replaces its conversation at 5 % of its context",
        summary_texts=("detailed summary of the conversation",),
    ),
    pypi(
        "Terminus 2",
        "terminal-bench",
        "`Terminus2(api_base=…/v1)`, model `openai/NAME`",
        python_program("terminus_2"),
        python=">=3.12",
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
    pypi(
        "AutoGen, BufferedChatCompletionContext",
        "autogen-agentchat",
        "`OPENAI_BASE_URL=…/v1` or `OpenAIChatCompletionClient(base_url=…/v1)`",
        python_program("autogen_window"),
        beside=("autogen-ext[openai]",),
        shortens="it sends the last five messages",
    ),
    pypi(
        "Langroid, drop_turns",
        "langroid",
        "`OpenAIGPTConfig(api_base=…/v1)`",
        _with_encodings(python_program("langroid_window")),
        beside=("litellm",),
        shortens="it leaves out the oldest questions with their replies",
        is_asked_again=True,
    ),
)
