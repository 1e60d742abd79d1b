"""All entries of the table, in the order of the page."""

from __future__ import annotations

from harnesses.entries.command_line import COMMAND_LINE
from harnesses.entries.frameworks import FRAMEWORKS
from harnesses.entries.sdks import SDKS
from harnesses.entry import Harness

HARNESSES: tuple[Harness, ...] = (*COMMAND_LINE, *FRAMEWORKS, *SDKS)
ON_VLLM = frozenset(
    {
        "Claude Code",
        "Codex CLI",
        "Gemini CLI",
        "pi",
        "openai (Python)",
        "openai (Python), Responses API",
        "anthropic (Python)",
        "google-genai (Python)",
    }
)
"""Those that are played in front of a real vLLM: a command-line agent and an SDK of each wire format."""
