"""Which role a chain has in its session: the main agent, a sub-agent, a side call, or a discarded attempt.

The role of a chain is found when it starts, from the agent's id, the system message and the shape of the call; its
later turns have the same. A session's only chain is the main agent's, whatever it asks for. A chain that asks for a
title, a topic or a summary becomes a side chain as soon as the session has another chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from proxy.continuation.digests import SYSTEM_ROLES, canonical_content
from proxy.continuation.forest import Forest, KnownTurn
from proxy.continuation.plan import Plan
from proxy.dialects.base import Call
from turnwise.types import Json, Role

SCANNED_CHARACTERS = 4000
"""Of a message that is searched for what it asks for."""
PROBE_TOKENS = 4
"""A call that may sample no more than these tokens only tests the connection."""


class TextPattern(NamedTuple):
    """How texts ask for something."""

    words: tuple[str, ...]
    """Lower-case words: a text without any of them does not match, and a search for words takes little time."""
    pattern: re.Pattern[str]

    def is_in(self, text: str) -> bool:
        """Return whether a text asks for it."""
        lowered = text.lower()
        return any(word in lowered for word in self.words) and self.pattern.search(text) is not None


COMPACTION = TextPattern(
    ("compact", "compress", "summari"),
    re.compile(
        r"context checkpoint compaction|\b(?:compact|compress|summari[sz])\w*\b[^.\n]{0,80}\b(?:conversation|"
        r"chat history|dialogue|context|session)\b",
        re.IGNORECASE,
    ),
)
TASKS = {
    "asks_for_title": TextPattern(
        ("title",),
        re.compile(
            r"\btitle generator\b|\b(?:generate|write|create|output|extract|suggest|come up with)\b[^.\n]{0,60}"
            r"\btitle\b",
            re.IGNORECASE,
        ),
    ),
    "asks_for_topic": TextPattern(("topic",), re.compile(r"\bnew conversation topic\b", re.IGNORECASE)),
    "asks_for_summary": COMPACTION,
}
"""What harnesses ask for beside an agent's own work, by the reason that is stored."""


class Found(NamedTuple):
    """A role and why the chain has it."""

    role: Role
    reason: str


class Root(NamedTuple):
    """What the first turn of a chain shows about the chain."""

    side_task: str | None
    """`side_task` of its call."""
    system_digest: bytes
    """`system_digest` of its messages."""


class Correction(NamedTuple):
    """Stored turns whose role a later turn has shown to be another one."""

    turn_ids: list[str]
    found: Found


def read_root(messages: Sequence[Json], tools: Any, parameters: Json) -> Root:
    """Return what a call without a parent shows about the chain that it starts."""
    return Root(side_task(messages, tools, parameters), system_digest(messages))


def find_role(call: Call, plan: Plan, forest: Forest, root: Root | None) -> Found:
    """Return the role of a call's turn; `root` is `read_root` of a call without a parent."""
    parent = plan.parent
    if parent is not None:
        if COMPACTION.is_in(_last_user_text(call.messages)):
            return Found(Role.SIDE, "compaction_prompt")
        return Found(parent.role, "extends")
    if call.agent_id is not None:
        return Found(Role.SUB_AGENT, "agent_id")
    others = forest.agent_roots
    if not others:
        return Found(Role.MAIN, "first_chain")
    assert root is not None
    if root.side_task is not None:
        return Found(Role.SIDE, root.side_task)
    if plan.reason is not None and plan.reason != "edited_history":
        return Found(Role.MAIN, "continues_conversation")
    same = others.get(root.system_digest)
    return Found(Role.SUB_AGENT, "other_system") if same is None else Found(same.role, "same_system")


def corrections(turn: KnownTurn, forest: Forest) -> list[Correction]:
    """Return what a new turn shows about the turns before it."""
    found = []
    if turn.parent_turn_id is None and turn.side_task is None:
        for root in forest.side_roots:
            if root.role is Role.MAIN and root.side_task is not None:
                chain = [each.turn_id for each in forest.by_id.values() if each.chain_id == root.chain_id]
                found.append(Correction(chain, Found(Role.SIDE, root.side_task)))
    siblings = forest.siblings(turn, aborted=True)
    parent = forest.by_id.get(turn.parent_turn_id or "")
    if parent is not None:
        others = forest.siblings(parent, aborted=True) + forest.siblings(parent, aborted=False)
        siblings += [other for other in others if not other.has_child and other.ended_at <= parent.started_at]
    discarded = [other.turn_id for other in siblings if other.role is not Role.RETRY]
    if discarded:
        found.append(Correction(discarded, Found(Role.RETRY, "sampled_again")))
    return found


def side_task(messages: Sequence[Json], tools: Any, parameters: Json) -> str | None:
    """Return the task of a call that the harness makes for itself; None for a call of the agent."""
    limit = parameters.get("max_completion_tokens") or parameters.get("max_tokens")
    if isinstance(limit, int) and limit <= PROBE_TOKENS:
        return "probe"
    if tools or any(message.get("role") == "assistant" for message in messages):
        return None
    text = f"{_system_text(messages)}\n{_last_user_text(messages)}"
    return next((name for name, pattern in TASKS.items() if pattern.is_in(text)), None)


def system_digest(messages: Sequence[Json]) -> bytes:
    """Return the digest of the system messages before the first other message."""
    return blake2b(_system_text(messages, None).encode(errors="replace"), digest_size=8).digest()


def _system_text(messages: Sequence[Json], limit: int | None = SCANNED_CHARACTERS) -> str:
    texts = []
    for message in messages:
        if message.get("role") not in SYSTEM_ROLES:
            break
        texts.append(str(canonical_content(message.get("content"))))
    return "\n".join(texts)[:limit]


def _last_user_text(messages: Sequence[Json]) -> str:
    if not messages or messages[-1].get("role") != "user":
        return ""
    return str(canonical_content(messages[-1].get("content")))[:SCANNED_CHARACTERS]
