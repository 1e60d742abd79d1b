"""Agents that are programs of the command line."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from harnesses.entry import PROMPT, Tool, npm, pypi
from turnwise_fake_engine import Reply, ToolCall


def _npm(program: str, *arguments: str) -> Callable[[Path], list[str]]:
    return lambda directory: [str(directory / "node_modules" / ".bin" / program), *arguments]


def _of_platform(package: str) -> str:
    machine = "arm64" if platform.machine() in {"aarch64", "arm64"} else "x64"
    return f"{package}-{platform.system().lower()}-{machine}"


def platform_binary(package: str, below: str, *arguments: str) -> Callable[[Path], list[str]]:
    return lambda directory: [str(directory / "node_modules" / _of_platform(package) / below), *arguments]


NODE = _of_platform("node")
"""Node as a package, for programs that do not run on the Node of every machine; npm links it beside them."""


def _submit(text: str) -> Reply:
    command = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {text}"
    return Reply(text="Done.", tool_calls=[ToolCall(name="bash", arguments={"command": command})])


def _search_and(calls: Sequence[ToolCall]) -> Reply:
    """Return the reply that looks for a tool whose schema was left out of the prompt, and calls others beside it."""
    search = ToolCall(name="ToolSearch", arguments={"query": "select:WebFetch", "max_results": 1})
    return Reply(text="I look.", tool_calls=[search, *calls])


OWN_PROVIDER = (
    'exec "$0" exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox '
    '-m "$OPENAI_MODEL" -c "openai_base_url=\\"$OPENAI_BASE_URL\\"" "$1"'
)
"""Codex with the provider that it has for OpenAI, which asks for a WebSocket first; `config.toml` has no other one."""
COMMAND_LINE = (
    npm(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "`ANTHROPIC_BASE_URL=…` (no `/v1`), `ANTHROPIC_AUTH_TOKEN`, `ANTHROPIC_MODEL`",
        platform_binary(
            "@anthropic-ai/claude-code",
            "claude",
            "-p",
            PROMPT,
            "--output-format",
            "json",
            "--allowedTools",
            "Bash,Agent",
        ),
        dialect="messages",
        agent="claude-code",
        tool=Tool("Bash", others={"description": "check"}),
        delegate=Tool("Agent", "prompt", {"description": "a part", "subagent_type": "general-purpose"}),
        first_text="Available agent types",
        first_sub_text="skills are available",
    ),
    npm(
        "Codex CLI",
        "@openai/codex",
        '`config.toml`: `[model_providers.x] base_url = …/v1, wire_api = "responses"`',
        _npm("codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        dialect="responses",
        agent="codex",
        tool=Tool("exec_command", "cmd", {"yield_time_ms": 60_000}),
        delegate=Tool("multi_agent_v1__spawn_agent", "message"),
        delegates_in_background=True,
    ),
    npm(
        "Claude Code, tool search",
        "@anthropic-ai/claude-code",
        "as Claude Code, with `ENABLE_TOOL_SEARCH=true`",
        platform_binary(
            "@anthropic-ai/claude-code", "claude", "-p", PROMPT, "--output-format", "json", "--allowedTools", "Bash"
        ),
        dialect="messages",
        agent="claude-code",
        tool=Tool("Bash", others={"description": "check"}),
        ask=_search_and,
        first_text="Available agent types",
        environment={"ENABLE_TOOL_SEARCH": "true"},
        remark="What it finds is a tool of its next request, which other tools in the prompt make a new chain.",
    ),
    npm(
        "Codex CLI, its own provider",
        "@openai/codex",
        "`openai_base_url = …/v1` in `config.toml`, `CODEX_API_KEY`",
        lambda directory: ["sh", "-c", OWN_PROVIDER, str(directory / "node_modules" / ".bin" / "codex"), PROMPT],
        dialect="responses",
        tool=Tool("exec_command", "cmd", {"yield_time_ms": 60_000}),
        environment={"CODEX_API_KEY": "any"},
    ),
    npm(
        "Gemini CLI",
        "@google/gemini-cli",
        "`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`), `GEMINI_API_KEY`",
        _npm("gemini", "-p", PROMPT, "--yolo", "--output-format", "json"),
        dialect="gemini",
        agent="gemini-cli",
        tool=Tool("run_shell_command"),
    ),
    npm(
        "opencode",
        "opencode-ai",
        "`opencode.json`: a provider with `@ai-sdk/openai-compatible` and `options.baseURL`",
        platform_binary("opencode", "bin/opencode", "run", "--format", "json", PROMPT),
        agent="opencode",
        tool=Tool("bash", others={"description": "check"}),
        delegate=Tool("task", "prompt", {"description": "a part", "subagent_type": "general"}),
    ),
    npm(
        "Qwen Code",
        "@qwen-code/qwen-code",
        "`OPENAI_BASE_URL=…/v1`, `--auth-type openai`",
        _npm("qwen", "-p", PROMPT, "--auth-type", "openai", "--yolo", "--output-format", "json"),
        agent="qwen-code",
        tool=Tool("run_shell_command", others={"is_background": False}),
        delegate=Tool("agent", "prompt", {"description": "a part", "subagent_type": "general-purpose"}),
    ),
    npm(
        "pi",
        "@earendil-works/pi-coding-agent",
        "`models.json`: a provider with `baseUrl` and `api: openai-completions`",
        _npm("pi", "-p", "--mode", "json", PROMPT),
        beside=(NODE,),
        agent="pi",
    ),
    npm(
        "Kimi Code",
        "@moonshot-ai/kimi-code",
        '`config.toml`: a provider with `type = "openai"` and `base_url`',
        _npm("kimi", "-p", PROMPT, "--output-format", "stream-json"),
        beside=(NODE,),
        agent="kimi-code",
        tool=Tool("Bash"),
        delegate=Tool("Agent", "prompt", {"description": "a part", "subagent_type": "coder"}),
        first_text="Auto permission mode",
        first_sub_text="Auto permission mode",
    ),
    pypi(
        "Mistral Vibe",
        "mistral-vibe",
        "`config.toml`: `[[providers]]` with `api_base`, and `[[models]]`",
        lambda directory: [str(directory / "bin" / "vibe"), "-p", PROMPT, "--auto-approve", "--trust"],
        python=">=3.12",
        agent="vibe",
    ),
    pypi(
        "mini-swe-agent",
        "mini-swe-agent",
        "`OPENAI_API_BASE=…/v1`, `-m openai/NAME`",
        lambda directory: [str(directory / "bin" / "mini"), "-y", "--exit-immediately", "-t", PROMPT],
        beside=("mcp",),
        agent="mini-swe-agent",
        last=_submit,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"},
    ),
)
