"""What agents sent in their runs, cut to what roles are found by: the calls that a test plays again through a proxy.

A text occurs once in the file, and is cut where no search for a role reads on; a digest keeps cut texts apart.
"""

import dataclasses
import gzip
import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harnesses.play import examine_briefly, sub_agent_rules
from harnesses.run import Stage
from harnesses.shortening import ShorteningHarness, examine_shortening

from proxy.dialects.base import SYSTEM_ROLES
from proxy.features.roles.chains import SCANNED_CHARACTERS
from proxy.sessions.conversation import canonical_content
from turnwise.types import Json

FILE = Path(__file__).parent / "recorded.json.gz"
UNSCANNED_CHARACTERS = 400
"""Characters that are kept of the texts that no search for a role reads: replies, and outputs of tools."""
SCRATCH = re.compile(r"/[^\s\"']*/harness-[a-z0-9_]+")
LIMITS = ("max_tokens", "max_completion_tokens")


def play_to_record(stage: Stage) -> list[Json]:
    """Play an agent without a session in its address, and in one where it has sub-agents; return its calls in order."""
    if isinstance(stage.harness, ShorteningHarness):
        examine_shortening(stage)
    else:
        examine_briefly(stage)
        if stage.harness.delegate is not None:
            stage.attempt(uuid.uuid4().hex[:8], lambda _: sub_agent_rules(stage))
    played = sorted(stage.turns, key=lambda turn: turn["created_at"])
    return [_recorded(turn) for turn in played if turn["outcome"] != "error"]


def _recorded(turn: Json) -> Json:
    tools = json.dumps(turn["tools"], sort_keys=True) if turn["tools"] else None
    reply = {"content": _cut(turn["response"].get("content"), UNSCANNED_CHARACTERS)}
    called = [each["function"] for each in turn["response"].get("tool_calls") or ()]
    reply |= {"tool_calls": [{"name": each["name"], "arguments": each["arguments"]} for each in called]}
    return {
        "session": turn["session_id"],
        "messages": [_message(each) for each in turn["messages"]],
        "tools": tools and _digest(tools),
        "limits": {name: turn["sampling"][name] for name in LIMITS if turn["sampling"].get(name) is not None},
        "reply": reply,
        "role": turn["role"],
        "role_reason": turn["role_reason"],
        "is_continued": bool(turn.get("continued_by")),
    }


def _message(message: Json) -> Json:
    is_scanned = message["role"] in ("user", *SYSTEM_ROLES)
    kept = {name: message[name] for name in ("role", "tool_call_id", "tool_calls") if message.get(name)}
    limit = SCANNED_CHARACTERS if is_scanned else UNSCANNED_CHARACTERS
    return kept | {"content": _cut(canonical_content(message.get("content")), limit)}


def _cut(content: Any, limit: int) -> str:
    text = content if isinstance(content, str) else json.dumps(content or "")
    return text if len(text) <= limit else f"{text[:limit]}… {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(SCRATCH.sub("/scratch", text).encode()).hexdigest()[:12]


@dataclasses.dataclass(slots=True)
class Recordings:
    """The calls of agents by the agent's name."""

    file: Path = FILE

    def read(self) -> dict[str, list[Json]]:
        if not self.file.exists():
            return {}
        stored = json.loads(gzip.decompress(self.file.read_bytes()))
        texts: Sequence[str] = stored["texts"]
        for calls in stored["agents"].values():
            for call in calls:
                for message in (*call["messages"], call["reply"]):
                    message["content"] = texts[message["content"]]
        return dict(stored["agents"])

    def add(self, name: str, calls: Sequence[Json]) -> None:
        """Add or replace the calls of an agent."""
        agents = json.loads(SCRATCH.sub("/scratch", json.dumps({**self.read(), name: calls})))
        texts: dict[str, int] = {}
        for each in sorted(agents):
            for call in agents[each]:
                for message in (*call["messages"], call["reply"]):
                    message["content"] = texts.setdefault(message["content"], len(texts))
        stored = {"agents": dict(sorted(agents.items())), "texts": list(texts)}
        self.file.write_bytes(gzip.compress(json.dumps(stored, ensure_ascii=False).encode(), mtime=0))
