"""Whether a chain is the main agent's, a sub-agent's, a summary, a side call, or a discarded attempt, also afterwards.

The role of a chain is found when it starts, from the agent's id, the system message and the shape of the call; its
later turns have the same. A session's only chain is the main agent's, whatever it asks for, save a known harness's own
prompt for a summary or a title in a call that names no session. A chain that asks for a title or a topic becomes a side
chain as soon as the session has another chain, and one that asks for a summary becomes a summary.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from proxy.calls.steps import CallStep
from proxy.dialects.base import SYSTEM_ROLES, Call
from proxy.features.roles.prompts import ASKS_FOR_SUMMARY, COMPACTION, SHIPPED, TASKS, asks_for
from proxy.sessions.conversation import DIGEST_BYTES, ConversationDigests, canonical_arguments, canonical_content
from proxy.sessions.forest import KnownTurn, TurnForest, repeated_calls
from turnwise.errors import StoreError
from turnwise.features.roles import set_roles
from turnwise.types import Json, Role, Turn

if TYPE_CHECKING:
    from prometheus_client import Counter

    from proxy.calls.capture import Running
    from proxy.metrics import Counted
    from proxy.services import Services
    from proxy.writer.process import NewTurn

log = logging.getLogger(__name__)

AGENTS = frozenset({Role.MAIN, Role.SUB_AGENT})
"""Roles of chains that are an agent's own work."""
MIN_TASK = 8
"""Characters of an argument that may be the task of a sub-agent."""
MIN_REPLY = 32
"""Characters of a reply that is recognised by its text alone."""
SCANNED_CHARACTERS = 4000
"""Characters of a message that are searched for what it asks for."""
PROBE_TOKENS = 4
"""A call that may sample no more than these tokens only tests the connection."""
ABOUT_BYTES = 140
"""Memory of what is kept of a turn, without its texts."""
COMPACTION_PROMPT = "compaction_prompt"
"""Reason of a turn that asks for a summary in the chain that is summarised: the turn alone has another role."""
AFTER_SUMMARY = "after_summary"
"""Reason of a turn that extends a turn which may be a summary, so that the context stays as it is."""
KNOWN_TASK = "known_task"
"""Key of a turn's sampling with what its call asks for, as `side_task` returns it, where a feature knows that; empty
for the agent's own work."""
Root: TypeAlias = tuple[str | None, bytes]
"""What a chain's first turn shows about it: `side_task` of its call, and the digest of the system messages before the
first other message."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class About:
    """What is kept of a turn to find the roles of others."""

    role: Role = Role.MAIN
    side_task: str | None = None
    """At the root of a chain: what it asks for, if that is not an agent's own work."""
    system_digest: bytes = b""
    """At the root of a chain: the digest of its system messages."""
    arguments: frozenset[bytes] = frozenset()
    reply_digest: bytes = b""
    is_empty: bool = False
    """Whether its reply has neither text nor tool calls."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """When its call started and ended; seconds since 1970."""

    num_bytes: int = 0
    """Memory of it, roughly."""


def describe(turn: Turn, parent: KnownTurn | None) -> About:
    """Return what is kept of a stored turn, with the messages that it adds to its parent's."""
    side_task, system_digest = None, b""
    if turn.parent_turn_id is None:
        side_task, system_digest = read_root(turn.messages, turn.tools, turn.sampling)
    role = turn.role or Role.MAIN
    if turn.role_reason == COMPACTION_PROMPT and parent is not None and parent.about.role is not Role.RETRY:
        role = parent.about.role  # a side call does not change the role of its chain
    started_at, calls = turn.created_at.timestamp(), turn.response.get("tool_calls")
    arguments, reply = argument_digests(turn.response) if calls else frozenset(), reply_digest(turn.response)
    texts = (side_task or "", reply, arguments, *arguments) if arguments else (side_task or "", reply)
    return About(
        role=role,
        side_task=side_task,
        system_digest=system_digest,
        arguments=arguments,
        reply_digest=reply,
        is_empty=not calls and not canonical_content(turn.response.get("content")),
        started_at=started_at,
        ended_at=started_at + turn.duration_seconds,
        num_bytes=ABOUT_BYTES + sum(map(sys.getsizeof, texts)),
    )


def read_root(messages: Sequence[Json], tools: Any, parameters: Json) -> Root:
    return side_task(messages, tools, parameters), text_digest(_system_text(messages, None))


def find_role(
    call: Call,
    parent: KnownTurn | None,
    reason: str | None,
    forest: TurnForest,
    root: Root | None,
    *,
    is_named: bool = True,
) -> tuple[Role, str]:
    """Return the role of a call's turn, and why it has that.

    Args:
        call: the call.
        parent: the turn that it extends.
        reason: why it extends no turn, although its messages contain replies.
        forest: the turns of its session.
        root: `read_root` of a call without a parent.
        is_named: whether the call names its session. Without a name, a harness's request for a summary may have a
            session of its own.
    """
    known = call.notes.get(KNOWN_TASK)
    if parent is not None:
        if known == ASKS_FOR_SUMMARY or (known is None and asks_for(COMPACTION, _last_text(call.messages))):
            return Role.SUMMARY, COMPACTION_PROMPT
        is_after = asks_for(COMPACTION, _last_text(call.messages[parent.num_messages - 2 : parent.num_messages - 1]))
        role = parent.about.role if parent.about.role is not Role.RETRY else continued_role(parent, forest)
        return role, AFTER_SUMMARY if is_after else "extends"
    if known == ASKS_FOR_SUMMARY:
        return Role.SUMMARY, ASKS_FOR_SUMMARY
    if call.agent_id is not None:
        return Role.SUB_AGENT, "agent_id"
    assert root is not None
    task, system_digest = root
    if next(_agent_roots(forest), None) is None:
        is_known = task is not None and not is_named and any(asks_for(SHIPPED, t) for t in _asked_texts(call.messages))
        return (_role_of(task), task) if task is not None and is_known else (Role.MAIN, "first_chain")
    if task is not None:
        return _role_of(task), task
    return _later_role(call, reason, forest, system_digest)


def _later_role(call: Call, reason: str | None, forest: TurnForest, system_digest: bytes) -> tuple[Role, str]:
    if reason is not None and reason != "edited_history":
        return Role.MAIN, "continues_conversation"
    same = next((each for each in _agent_roots(forest) if each.about.system_digest == system_digest), None)
    has_replies = any(message.get("role") == "assistant" for message in call.messages)
    if same is not None and not has_replies and _is_asked_by_call(call.messages, forest):
        return Role.SUB_AGENT, "asked_by_tool_call"
    if same is not None:
        return continued_role(same, forest), "same_system"
    continued = _find_reply(call.messages, forest) if has_replies else None
    return (Role.SUB_AGENT, "other_system") if continued is None else (continued.about.role, "continues_conversation")


def corrections(
    turn: KnownTurn, forest: TurnForest, conversation: ConversationDigests
) -> list[tuple[list[str], tuple[Role, str]]]:
    """Return what a new turn shows about the turns before it: ids of stored turns, their true role and its reason.

    Args:
        turn: the new turn.
        forest: the turns of its session.
        conversation: the messages of its call.
    """
    found: list[tuple[list[str], tuple[Role, str]]] = []
    if turn.parent_turn_id is None and turn.about.side_task is None:
        for root in forest.by_id.values():
            if root.parent_turn_id is None and root.about.role is Role.MAIN and root.about.side_task is not None:
                chain = [each.turn_id for each in forest.by_id.values() if each.chain_id == root.chain_id]
                found.append((chain, (_role_of(root.about.side_task), root.about.side_task)))
    siblings = [other for other in _siblings(turn, forest) if other.is_aborted]
    parent = forest.by_id.get(turn.parent_turn_id or "")
    if parent is not None and parent.about.role is Role.RETRY:
        marked = [each.turn_id for each in forest.ancestors(parent) if each.about.role is Role.RETRY]
        found.append((marked, (continued_role(parent, forest), "continued")))
    if parent is not None:
        siblings += [
            other
            for other in _siblings(parent, forest)
            if not other.has_child and other.about.ended_at <= parent.about.started_at
        ]
    discarded = [other.turn_id for other in siblings if other.about.role is not Role.RETRY]
    if discarded:
        found.append((discarded, (Role.RETRY, "sampled_again")))
    # The session's reward is not for a reply with nothing in it, after which the harness asks again.
    empty = [
        other.turn_id
        for other in forest.left_out(parent, conversation)
        if other.about.is_empty and not other.has_child and other is not turn
        if other.about.ended_at <= turn.about.started_at and other.about.role is not Role.RETRY
    ]
    if empty:
        found.append((empty, (Role.RETRY, "empty_reply")))
    return found


def continued_role(turn: KnownTurn, forest: TurnForest) -> Role:
    """Return the role that a child of this turn gets. If the turn is a `retry`, that of its sibling which is none.

    Of two attempts with the same prompt, as parallel sub-agents with one task make them, the client may continue both.
    """
    for each in forest.ancestors(turn):
        if each.about.role is not Role.RETRY:
            return Role(each.about.role)
        others = sorted(_siblings(each, forest), key=operator.attrgetter("is_aborted"))
        if found := next((other.about.role for other in others if other.about.role is not Role.RETRY), None):
            return Role(found)
    return Role.MAIN


def _is_asked_by_call(messages: Sequence[Json], forest: TurnForest) -> bool:
    asked = text_digest(_last_text(messages, None))
    return any(asked in turn.about.arguments and not turn.has_child for turn in forest.by_id.values())


def _agent_roots(forest: TurnForest) -> Iterator[KnownTurn]:
    """Yield the roots of chains that ask for an agent's own work, in the order in which they were added."""
    return (each for each in forest.by_id.values() if each.parent_turn_id is None and each.about.side_task is None)


def _find_reply(messages: Sequence[Json], forest: TurnForest) -> KnownTurn | None:
    """Return the newest agent's turn whose reply the messages repeat, by the ids of its tool calls or its text."""
    call_ids = repeated_calls(messages)
    texts = {reply_digest(message) for message in messages} - {b""}
    agents = (each for each in reversed(forest.by_id.values()) if each.about.role in AGENTS)
    return next(
        (each for each in agents if not call_ids.isdisjoint(each.call_ids) or each.about.reply_digest in texts), None
    )


def _siblings(turn: KnownTurn, forest: TurnForest) -> list[KnownTurn]:
    same = forest.by_prompt[turn.prompt_digest]
    return [each for each in same if each.turn_id != turn.turn_id and each.parent_turn_id == turn.parent_turn_id]


def text_digest(text: str) -> bytes:
    return blake2b(text.strip().encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


def reply_digest(message: Json) -> bytes:
    text = canonical_content(message.get("content")) if message.get("role") == "assistant" else None
    return text_digest(text) if isinstance(text, str) and len(text.strip()) >= MIN_REPLY else b""


def argument_digests(message: Json) -> frozenset[bytes]:
    """Return the digests of the texts among the arguments of a message's tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return frozenset()
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    given = [canonical_arguments(each.get("arguments")) for each in functions if isinstance(each, dict)]
    texts = (value for each in given if isinstance(each, dict) for value in each.values() if isinstance(value, str))
    return frozenset(text_digest(text) for text in texts if len(text) >= MIN_TASK)


def side_task(messages: Sequence[Json], tools: Any, parameters: Json) -> str | None:
    """Return the task of a call that the harness makes for itself; None for a call of the agent."""
    if (known := parameters.get(KNOWN_TASK)) is not None:
        return known or None
    limit = parameters.get("max_completion_tokens") or parameters.get("max_tokens")
    if isinstance(limit, int) and limit <= PROBE_TOKENS:
        return "probe"
    if any(message.get("role") == "assistant" for message in messages):
        texts = (_last_text(messages),) if tools else _asked_texts(messages)
        return ASKS_FOR_SUMMARY if any(asks_for(COMPACTION, text) for text in texts) else None
    if tools:
        return None
    texts = _asked_texts(messages)
    return next((name for name, asked in TASKS.items() if any(asks_for(asked, text) for text in texts)), None)


def _role_of(task: str) -> Role:
    return Role.SUMMARY if task == ASKS_FOR_SUMMARY else Role.SIDE


def _system_text(messages: Sequence[Json], limit: int | None = SCANNED_CHARACTERS) -> str:
    texts = []
    for message in messages:
        if message.get("role") not in SYSTEM_ROLES:
            break
        texts.append(str(canonical_content(message.get("content"))))
    return "\n".join(texts)[:limit]


def _asked_texts(messages: Sequence[Json]) -> tuple[str, ...]:
    return _system_text(messages), _last_text(messages)


def _last_text(messages: Sequence[Json], limit: int | None = SCANNED_CHARACTERS) -> str:
    """Return the last message's text, if the user or the harness wrote it."""
    if not messages or messages[-1].get("role") not in ("user", *SYSTEM_ROLES):
        return ""
    return str(canonical_content(messages[-1].get("content")))[:limit]


class Roles(CallStep):
    """Finds the roles of all turns."""

    takes_all = True
    counters: ClassVar[Mapping[str, Counted]] = {
        "turns_by_role": ("turnwise_turns_by_role", "Stored completions by the role of their chain", ["role"])
    }
    turns_by_role: Counter

    def __init__(self, services: Services) -> None:
        self._writer = services.writer

    def built(self, running: Running, turns: list[NewTurn]) -> None:
        call, place, root = running.call, running.place, None
        if place.parent is None:
            root = read_root(call.messages, call.tools, turns[0].sampling)
        is_named = place.inferred_by is None
        found = find_role(call, place.parent, place.reason, place.forest, root, is_named=is_named)
        for turn in turns:
            turn.role, turn.role_reason = found

    async def stored(self, running: Running, turns: list[NewTurn], known: list[KnownTurn]) -> None:
        for turn in turns:
            self.turns_by_role.labels(turn.role).inc()
        forest = running.place.forest
        for turn_ids, (role, reason) in corrections(known[0], forest, running.place.conversation) if known else ():
            try:
                await self._writer.do(set_roles, turn_ids, role, reason)
            except StoreError as error:  # the call's own turn is stored
                log.warning("the turns %s keep their roles: %s", ", ".join(turn_ids), error)
                continue
            for turn_id in turn_ids:
                forest.by_id[turn_id].about.role = role
