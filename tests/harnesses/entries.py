"""The agents of docs/agents.md: packages, headless commands, and the scripted replies of the engine."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from turnwise.fake_engine import Reply, ToolCall

PROMPT = "Run the check and report."
"""The prompt for every agent."""
COMMAND = "echo checked-$((6*7))"
"""The command for agents with a shell; its output differs from its text."""
OUTPUT = "checked-42"
ANSWER = "FINISHED-WELL"

FINAL_ANSWER = Reply(text="Done.", tool_calls=[ToolCall(name="final_answer", arguments={"answer": ANSWER})])
"""The tool call that ends a run of smolagents."""

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
"""Agents that use an SDK as its documentation does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness:
    """One agent, framework or SDK."""

    name: str
    kind: Literal["npm", "pip", "dev"]
    """Source of the package; `dev` means Turnwise's development environment."""
    package: str
    version: str
    dialect: str
    pointing: str
    """The line that points it at the proxy, for people who do not use `turnwise run`."""
    argv: Callable[[Path], list[str]]
    """The command, from the directory that it is installed in."""
    agent: str = "any"
    """Its entry in the table of `turnwise run`."""
    tool: ToolCall
    """The engine's first answer."""
    last: Reply = dataclasses.field(default_factory=lambda: Reply(text=ANSWER))
    """The engine's answer after the tool's output."""
    prompt: str = PROMPT
    output: str = OUTPUT
    """Output of its tool."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    with_packages: tuple[str, ...] = ()
    """Additional packages."""
    program: Path | None = None
    """An example whose address is replaced, which is then the last argument of `argv`."""


def _npm(program: str, *arguments: str) -> Callable[[Path], list[str]]:
    return lambda directory: [str(directory / "node_modules" / ".bin" / program), *arguments]


def _opencode(directory: Path) -> list[str]:
    """Return the command: without its install script, the program is that of the platform's package."""
    machine = "arm64" if platform.machine() in {"aarch64", "arm64"} else "x64"
    program = directory / "node_modules" / f"opencode-{platform.system().lower()}-{machine}" / "bin" / "opencode"
    return [str(program), "run", "--format", "json", PROMPT]


def _pip(program: str, *arguments: str) -> Callable[[Path], list[str]]:
    return lambda directory: [str(directory / "bin" / program), *arguments]


def _example(name: str, package: str, pointing: str, last: Reply | None = None) -> Harness:
    return Harness(
        name=name,
        kind="dev",
        package=package,
        version="",
        dialect="chat",
        pointing=pointing,
        last=last or Reply(text=ANSWER),
        argv=lambda _: [sys.executable],
        tool=ToolCall(name="get_weather", arguments={"city": "Oslo"}),
        prompt="umbrella",
        output="It rains in Oslo",
        program=ROOT / "examples" / package.replace("-slim", "").replace("-", "_") / "agent.py",
    )


HARNESSES = (
    Harness(
        name="Codex CLI",
        kind="npm",
        package="@openai/codex",
        version="0.169.0",
        dialect="responses",
        pointing='`config.toml`: `[model_providers.x] base_url = …/v1, wire_api = "responses"`',
        argv=_npm(
            "codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT
        ),
        agent="codex",
        tool=ToolCall(name="shell_command", arguments={"command": COMMAND}),
    ),
    Harness(
        name="Gemini CLI",
        kind="npm",
        package="@google/gemini-cli",
        version="0.61.0",
        dialect="gemini",
        pointing="`GOOGLE_GEMINI_BASE_URL=…` (no `/v1`), `GEMINI_API_KEY`",
        argv=_npm("gemini", "-p", PROMPT, "--yolo", "--output-format", "json"),
        agent="gemini-cli",
        tool=ToolCall(name="run_shell_command", arguments={"command": COMMAND}),
    ),
    Harness(
        name="opencode",
        kind="npm",
        package="opencode-ai",
        version="1.18.33",
        dialect="chat",
        pointing="`opencode.json`: a provider with `@ai-sdk/openai-compatible` and `options.baseURL`",
        argv=_opencode,
        agent="opencode",
        tool=ToolCall(name="bash", arguments={"command": COMMAND, "description": "check"}),
    ),
    Harness(
        name="Qwen Code",
        kind="npm",
        package="@qwen-code/qwen-code",
        version="0.15.10",
        dialect="chat",
        pointing="`OPENAI_BASE_URL=…/v1`, `--auth-type openai`",
        argv=_npm("qwen", "-p", PROMPT, "--auth-type", "openai", "--yolo", "--output-format", "json"),
        agent="qwen-code",
        tool=ToolCall(name="run_shell_command", arguments={"command": COMMAND, "is_background": False}),
    ),
    Harness(
        name="pi",
        kind="npm",
        package="@mariozechner/pi-coding-agent",
        version="0.73.1",
        dialect="chat",
        pointing="`models.json`: a provider with `baseUrl` and `api: openai-completions`",
        argv=_npm("pi", "-p", "--mode", "json", PROMPT),
        agent="pi",
        tool=ToolCall(name="bash", arguments={"command": COMMAND}),
    ),
    Harness(
        name="mini-swe-agent",
        kind="pip",
        package="mini-swe-agent",
        version="2.4.6",
        with_packages=("mcp",),
        dialect="chat",
        pointing="`OPENAI_API_BASE=…/v1`, `-m openai/NAME`",
        argv=_pip("mini", "-y", "--exit-immediately", "-t", PROMPT),
        agent="mini-swe-agent",
        tool=ToolCall(name="bash", arguments={"command": COMMAND}),
        last=Reply(
            text="Done.",
            tool_calls=[
                ToolCall(
                    name="bash", arguments={"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"}
                )
            ],
        ),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"},
    ),
    _example("openai (Python)", "openai", "`OPENAI_BASE_URL=…/v1` or `base_url=`"),
    Harness(
        name="anthropic (Python)",
        kind="dev",
        package="anthropic",
        version="",
        dialect="messages",
        pointing="`ANTHROPIC_BASE_URL=…` (no `/v1`) or `base_url=`",
        argv=lambda _: [sys.executable, str(PROGRAMS / "anthropic_agent.py"), PROMPT],
        tool=ToolCall(name="bash", arguments={"command": COMMAND}),
    ),
    Harness(
        name="openai (Python), Responses API",
        kind="dev",
        package="openai",
        version="",
        dialect="responses",
        pointing="`OPENAI_BASE_URL=…/v1` or `base_url=`",
        argv=lambda _: [sys.executable, str(PROGRAMS / "responses_agent.py"), PROMPT],
        tool=ToolCall(name="bash", arguments={"command": COMMAND}),
    ),
    _example("LangGraph", "langgraph", "`ChatOpenAI(base_url=…/v1)`"),
    _example("OpenAI Agents SDK", "openai-agents", "`AsyncOpenAI(base_url=…/v1)`"),
    _example("pydantic-ai", "pydantic-ai-slim", "`OpenAIProvider(base_url=…/v1)`"),
    _example("smolagents", "smolagents", "`OpenAIModel(api_base=…/v1)`", FINAL_ANSWER),
)
