"""The table of known agents: the variables, files and flags that point each one at the proxy.

An agent that reads the variables of the OpenAI, Anthropic or Google SDKs needs no entry. An entry adds what its agent
needs beyond them: variables, configuration files in a scratch home that goes with the run, or flags.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.errors import SettingsError
from turnwise.types import Json

DEFAULT_CONTEXT_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the model for one run."""

    base_url: str
    """Base URL for OpenAI clients: `…/sessions/ID/v1`."""
    api_key: str
    model: str
    home: Path
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    """Context length of the model. An agent that assumes a shorter one compacts too early."""

    @property
    def root(self) -> str:
        """Base URL for Anthropic and Google clients, without `/v1`."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Model:
    """Name and context length of the served model."""

    name: str
    context_tokens: int = DEFAULT_CONTEXT_TOKENS


@dataclass(frozen=True, slots=True)
class Agent:
    """How one agent is pointed at the proxy."""

    name: str
    programs: tuple[str, ...] = ()
    variables: Callable[[Address], dict[str, str]] = field(default=lambda _: {})
    files: Callable[[Address], dict[str, str]] = field(default=lambda _: {})
    flags: Callable[[Address], list[str]] = field(default=lambda _: [])
    scratch_home: bool = True
    """Use a scratch directory as HOME, so that the user's own settings are neither read nor changed."""


def _json(value: Json) -> str:
    return json.dumps(value, indent=2) + "\n"


def _codex_config(address: Address) -> str:
    return f"""\
model = {json.dumps(address.model)}
model_provider = "turnwise"

[model_providers.turnwise]
name = "Turnwise"
base_url = {json.dumps(address.base_url)}
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""


def _opencode_config(address: Address) -> str:
    # Not named `openai`: opencode gives that provider another wire format.
    model = {"name": address.model, "limit": {"context": address.context_tokens, "output": MAX_OUTPUT_TOKENS}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Turnwise",
        "options": {"baseURL": address.base_url, "apiKey": address.api_key},
        "models": {address.model: model},
    }
    whole = f"turnwise/{address.model}"
    return _json({"provider": {"turnwise": provider}, "model": whole, "small_model": whole, "autoupdate": False})


def _pi_models(address: Address) -> str:
    model = {
        "id": address.model,
        "name": address.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": address.context_tokens,
        "maxTokens": MAX_OUTPUT_TOKENS,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": address.base_url,
        "api": "openai-completions",
        "apiKey": address.api_key,
        "models": [model],
    }
    return _json({"providers": {"turnwise": provider}})


def _selected_auth(kind: str) -> str:
    return _json({"security": {"auth": {"selectedType": kind}}, "privacy": {"usageStatisticsEnabled": False}})


def _kimi_config(address: Address) -> str:
    return f"""\
default_model = "turnwise"
default_permission_mode = "auto"
telemetry = false

[providers.turnwise]
type = "openai"
base_url = {json.dumps(address.base_url)}
api_key = {json.dumps(address.api_key)}

[models.turnwise]
provider = "turnwise"
model = {json.dumps(address.model)}
max_context_size = {address.context_tokens}
"""


def _vibe_config(address: Address) -> str:
    return f"""\
active_model = "turnwise"

[[providers]]
name = "turnwise"
api_base = {json.dumps(address.base_url)}
api_key_env_var = "OPENAI_API_KEY"

[[models]]
name = {json.dumps(address.model)}
provider = "turnwise"
alias = "turnwise"
"""


def _cline_providers(address: Address) -> str:
    settings = {
        "provider": "openai-compatible",
        "apiKey": address.api_key,
        "model": address.model,
        "baseUrl": address.base_url,
        "contextWindow": address.context_tokens,
    }
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    name = settings["provider"]
    return _json({"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: provider}})


def _copilot_variables(address: Address) -> dict[str, str]:
    return {
        "COPILOT_HOME": str(address.home / ".copilot"),
        "COPILOT_MODEL": address.model,
        "COPILOT_OFFLINE": "true",
        "COPILOT_PROVIDER_API_KEY": address.api_key,
        "COPILOT_PROVIDER_BASE_URL": address.base_url,
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(MAX_OUTPUT_TOKENS),
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(address.context_tokens - MAX_OUTPUT_TOKENS),
    }


AGENTS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("any", scratch_home=False),
        Agent(
            "codex",
            ("codex",),
            variables=lambda address: {"CODEX_HOME": str(address.home / ".codex")},
            files=lambda address: {".codex/config.toml": _codex_config(address)},
        ),
        Agent(
            "opencode",
            ("opencode",),
            variables=lambda address: {"OPENCODE_CONFIG": str(address.home / "opencode.json")},
            files=lambda address: {"opencode.json": _opencode_config(address)},
        ),
        Agent(
            "qwen-code",
            ("qwen",),
            files=lambda _: {".qwen/settings.json": _selected_auth("openai")},
        ),
        Agent(
            "gemini-cli",
            ("gemini",),
            variables=lambda _: {"GEMINI_CLI_TRUST_WORKSPACE": "true"},
            files=lambda _: {".gemini/settings.json": _selected_auth("gemini-api-key")},
            flags=lambda address: ["--model", address.model],
        ),
        Agent(
            "pi",
            ("pi",),
            variables=lambda address: {"PI_CODING_AGENT_DIR": str(address.home / ".pi/agent")},
            files=lambda address: {".pi/agent/models.json": _pi_models(address)},
            flags=lambda address: ["--provider", "turnwise", "--model", address.model],
        ),
        Agent(
            "claude-code",
            ("claude",),
            variables=lambda address: {
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": address.model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CONFIG_DIR": str(address.home / ".claude"),
            },
        ),
        Agent(
            "mini-swe-agent",
            ("mini", "mini-swe-agent"),
            variables=lambda address: {
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": str(address.home / ".mini-swe-agent"),
                "MSWEA_MODEL_NAME": f"openai/{address.model}",
            },
        ),
        Agent(
            "aider",
            ("aider",),
            variables=lambda address: {"AIDER_MODEL": f"openai/{address.model}", "AIDER_ANALYTICS": "false"},
        ),
        Agent(
            "cline",
            ("cline",),
            files=lambda address: {".cline/data/settings/providers.json": _cline_providers(address)},
            flags=lambda _: ["-P", "openai-compatible"],
        ),
        Agent("copilot", ("copilot",), variables=_copilot_variables),
        Agent("gptme", ("gptme",), variables=lambda address: {"MODEL": f"openai/{address.model}"}),
        Agent(
            "kimi-code",
            ("kimi",),
            variables=lambda address: {"KIMI_CODE_HOME": str(address.home / ".kimi-code")},
            files=lambda address: {".kimi-code/config.toml": _kimi_config(address)},
        ),
        Agent(
            "vibe",
            ("vibe",),
            variables=lambda address: {"VIBE_HOME": str(address.home / ".vibe")},
            files=lambda address: {".vibe/config.toml": _vibe_config(address)},
        ),
    )
}


def find_agent(argv: Sequence[str], name: str | None = None) -> Agent:
    """Return the entry of a command: by name, else by the name of its program, else `any`."""
    if name is not None:
        if name not in AGENTS:
            raise SettingsError(f"--as {name!r} is no known agent; give one of {', '.join(AGENTS)}")
        return AGENTS[name]
    program = Path(argv[0]).name
    return next((agent for agent in AGENTS.values() if program in agent.programs), AGENTS["any"])


def variables(agent: Agent, address: Address) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": address.base_url,
        "OPENAI_API_BASE": address.base_url,
        "OPENAI_API_KEY": address.api_key,
        "OPENAI_MODEL": address.model,
        "ANTHROPIC_BASE_URL": address.root,
        "ANTHROPIC_API_KEY": address.api_key,
        "ANTHROPIC_AUTH_TOKEN": address.api_key,
        "ANTHROPIC_MODEL": address.model,
        "GOOGLE_GEMINI_BASE_URL": address.root,
        "GEMINI_API_KEY": address.api_key,
        "GEMINI_MODEL": address.model,
        "TURNWISE_BASE_URL": address.base_url,
        "TURNWISE_API_KEY": address.api_key,
        "TURNWISE_MODEL": address.model,
        **agent.variables(address),
    }


def environment(agent: Agent, address: Address, *, scratch_home: bool) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNWISE_")}
    home = {"HOME": str(address.home), "XDG_CONFIG_HOME": str(address.home / ".config")} if scratch_home else {}
    if scratch_home:
        data = {"XDG_DATA_HOME": ".local/share", "XDG_STATE_HOME": ".local/state", "XDG_CACHE_HOME": ".cache"}
        home |= {name: str(address.home / below) for name, below in data.items()}
    return {**inherited, **home, **variables(agent, address)}


def write_files(agent: Agent, address: Address) -> None:
    for below, content in agent.files(address).items():
        path = address.home / below
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o600)  # it may hold the session's key


def command_line(agent: Agent, argv: Sequence[str], address: Address) -> list[str]:
    return [argv[0], *agent.flags(address), *argv[1:]]
