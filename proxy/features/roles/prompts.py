"""How calls of harnesses ask for a summary, a title or a topic, beside an agent's own work."""

from __future__ import annotations

import dataclasses
import functools
import re

ASKS_FOR_SUMMARY = "asks_for_summary"
MAX_SEARCHED = 256
"""Searches whose result is kept: an agent sends its system message with every call."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TextPattern:
    """How texts ask for something."""

    words: tuple[str, ...]
    """Lower-case words: a text without any of them does not match, and a search for words takes little time."""
    pattern: re.Pattern[str]


@functools.lru_cache(MAX_SEARCHED)
def asks_for(asked: TextPattern, text: str) -> bool:
    lowered = text.lower()
    return any(map(lowered.__contains__, asked.words)) and asked.pattern.search(text) is not None


SHIPPED_PROMPTS = (
    "context checkpoint compaction",  # Codex CLI
    r"<role>\s*context extraction assistant\b",  # LangChain
    r"\bcontext-aware state summary\b",  # OpenHands
    r"\bcontinuation summary\b[^.]{0,120}\bresume work\b",  # Inspect AI
    r"\bassistant tasked with summarizing conversations\b",  # Claude Code, Inspect AI
    r"\bhand off your work to another AI agent\b|\bpicking up work from a previous AI agent\b",  # Terminus 2
    r"\bnext agent has a few questions for you\b",
    r"\bcontext summarization assistant\b|\bmessages above are a conversation to summarize\b",  # pi
    r"\bcompressing tool call results to save context space\b",  # Agno
    r"\bportion of a Claude Code session transcript\b",
    r"\bstructured checkpoint before history is compacted\b",  # gptme
    r"\bthe history is being compacted\b",  # Copilot CLI
    r"\bsummarize the provided coding session into a concise continuation note\b",  # Cline
    r"\bsummarize the following conversation history concisely, preserving\b",  # AG2
    r"\bcomplete summarization of the entire dialog\b",  # Semantic Kernel
    r"\bclear and complete summary of the entire conversation\b",  # Microsoft Agent Framework
)
_SUMMARY_WORDS = (
    *("compact", "compress", "summar", "distil"),
    *("context extraction", "hand off", "next agent", "session transcript"),
)
SHIPPED_TITLES = (
    r"\bcreate a 2-4 word title for this conversation\b",  # gptme
    r"\byou output only a thread title\b",  # opencode
)
SHIPPED = TextPattern(
    (*_SUMMARY_WORDS, "title"), re.compile("|".join((*SHIPPED_PROMPTS, *SHIPPED_TITLES)), re.IGNORECASE)
)
COMPACTION = TextPattern(
    _SUMMARY_WORDS,
    re.compile(
        r"\b(?:compact|compress|summari[sz]|distil)\w*\b[^.\n]{0,80}\b(?:conversation|chat history|dialog(?:ue)?)\b"
        # Code has contexts and sessions as well: "summarise the session handling", "a compact context manager".
        r"|\b(?:compact|compress|summari[sz])\w*\b[^.\n]{0,40}\b(?:the|this|our|your|current|entire|coding) "
        r"(?:context|session)\b(?=\s*(?:so far|above|history|window|for continuation|into|[.,:;!?\n]|$))"
        r"|\bsummary of (?:the|this|our) (?:entire |whole |previous )?(?:conversation|dialog(?:ue)?)\b|"
        + "|".join(SHIPPED_PROMPTS),
        re.IGNORECASE,
    ),
)
TASKS = {
    "asks_for_title": TextPattern(
        ("title", "summari"),
        re.compile(
            r"\btitle generator\b|\b(?:generate|write|create|output|extract|suggest|come up with)\b[^.\n]{0,60}"
            r"\btitle\b|\bsummari[sz]e\b[^.\n]{0,60}\b(?:under|within|at most|up to) \d+ (?:characters|words)\b",
            re.IGNORECASE,
        ),
    ),
    "asks_for_topic": TextPattern(("topic",), re.compile(r"\bnew conversation topic\b", re.IGNORECASE)),
    ASKS_FOR_SUMMARY: COMPACTION,
}
"""What harnesses ask for beside an agent's own work, by the reason that is stored."""
