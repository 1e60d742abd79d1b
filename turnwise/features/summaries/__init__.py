"""Summaries: which context goes on from which, as stored with the turns, and what that makes of their credit.

A turn of the role `summary` sums a conversation up, and its harness goes on in a new context that begins with what it
said. Which one does is decided once, when the turn that begins it is stored, and by content. It is the part `summaries`
of both turns. A digest does not cover it, because that of a summary changes.

A summary is an action of the policy, and what follows from it is its return. So it counts to the step of the first turn
that follows from it, takes no step of its own, and has the return of that step. One from which nothing follows is not
trained: no reward says anything of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import sqlalchemy as sa

from turnwise.chains import is_trainable
from turnwise.credit import SessionCredit
from turnwise.features.summaries.matching import (
    Reply,
    continued,
    is_empty,
    prompt_text,
    texts_of_calls,
    texts_of_reply,
)
from turnwise.parts import Part, pack_parts, unpack_parts
from turnwise.store.extensions import Extension
from turnwise.store.schema import indexes, sessions, turns
from turnwise.store.statements import fetch_rows
from turnwise.store.turns import path_to
from turnwise.types import Json, Outcome, Role, SessionStatus, Turn, text_of

SUMMARIES = "summaries"
NOT_CONTINUED = "not_continued"
ANOTHER_ATTEMPT = "another_attempt"
PARTIAL = "partial"
REASONS = {
    NOT_CONTINUED: "no later context has its reply",
    ANOTHER_ATTEMPT: "the context goes on from another reply to the same prompt",
    PARTIAL: "the client stopped it",
}
AGENTS = frozenset({Role.MAIN, Role.SUB_AGENT})
TASK = "asked_by_tool_call"
"""Why a turn has the role of a sub-agent whose task an agent wrote: what it quotes is no context to go on from."""
AFTER_SUMMARY = "after_summary"
Row: TypeAlias = Mapping[str, Any]

_t = turns.c
_of_summaries = f"role = '{Role.SUMMARY.value}'"
_HAS_ANY = (
    "session_pk",
    "EXISTS (SELECT 1 FROM turns WHERE turns.session_pk = sessions.session_pk AND role = 'summary')",
)
"""One statement for all turns of a commit says which sessions have summaries: most have none."""
indexes.append(
    sa.Index(
        "ix_turns_summaries",
        _t.session_pk,
        _t.seq,
        sqlite_where=sa.text(_of_summaries),
        postgresql_where=sa.text(_of_summaries),
    )
)


class Summaries(Part):
    """What a turn has to do with summaries: those that its context goes on from, or what goes on from it."""

    name = SUMMARIES
    is_digested = False
    fields: ClassVar = {
        "continues_summary": (
            list[str] | None,
            "The turns of the summaries that its context goes on from: its prompt has what they said. Else null.",
        ),
        "continued_by": (
            list[str] | None,
            "Of a summary, the turns whose contexts go on from it; null of turns that are none.",
        ),
        "summary_left_out": (
            str | None,
            f"Why a summary is not trained: {'; '.join(f'`{name}`: {why}' for name, why in REASONS.items())}.",
        ),
    }

    def of_turn(self, packed: bytes | None) -> Json:
        found = _read(packed)
        return {name: found.get(name) for name in self.fields}


def _read(packed: bytes | None) -> Json:
    return {} if packed is None else json.loads(packed)


def link(conn: sa.Connection, rows: Sequence[Row]) -> None:
    """Store which summaries the turns that were just stored go on from, and which of them are summaries."""
    for row in rows:
        if row["role"] == Role.SUMMARY:
            why = PARTIAL if row["outcome"] == Outcome.ABORTED else NOT_CONTINUED
            _note(conn, row["turn_id"], {"continued_by": [], "summary_left_out": why})
    begun = [row for row in rows if row["seq"] and _may_continue(row)]
    wanted = {"session_pk": [row["session_pk"] for row in begun]}
    summed_up = {key for key, has_any in fetch_rows(conn, sessions, _HAS_ANY, wanted) if has_any} if begun else ()
    for row in begun:
        if row["session_pk"] in summed_up:
            _link_one(conn, row)


def _may_continue(row: Row) -> bool:
    """Return whether a turn begins a context; one that extends the summary itself goes on in the same."""
    if row["role"] == Role.SUMMARY:
        return True
    is_of_agent = row["role"] in AGENTS and row["role_reason"] != TASK
    return is_of_agent and (row["chain_id"] == row["turn_id"] or row["role_reason"] == AFTER_SUMMARY)


def _link_one(conn: sa.Connection, row: Row) -> None:
    own = _t.session_pk == row["session_pk"], _t.seq < row["seq"]
    wanted = (_t.turn_id, _t.parent_turn_id, _t.response, _t.messages, _t.parts)
    summaries = conn.execute(sa.select(*wanted).where(*own, sa.text(_of_summaries)).order_by(_t.seq)).all()
    if not summaries:
        return
    known = {each.turn_id: _read(unpack_parts(each.parts or b"").get(SUMMARIES)) for each in summaries}
    if row["role"] == Role.SUMMARY:  # a summary of summaries: not of those that an agent has gone on from
        summaries = [each for each in summaries if known.keys() >= set(known[each.turn_id].get("continued_by", ()))]
    parent = row["parent_turn_id"]
    found = [each.turn_id for each in summaries if each.turn_id == parent]
    if row["chain_id"] == row["turn_id"]:
        replies = [Reply(each.turn_id, texts, "") for each in summaries if (texts := texts_of(each.response))]
        messages = json.loads(row["messages"])
        found = list(dict.fromkeys([*found, *_continued(conn, messages, replies)]))
        if not found and row["role"] == Role.MAIN:
            found = _emptied(conn, messages, summaries[-1], known)
        if found and row["role"] == Role.SUB_AGENT and _is_task(conn, row, messages):
            return
    if found:
        _store(conn, row, found, summaries, known)


def _store(
    conn: sa.Connection, row: Row, found: Sequence[str], summaries: Sequence[Any], known: Mapping[str, Json]
) -> None:
    """Store that a turn goes on from the summaries `found`; `known` has what is stored of each of the session."""
    if found != [row["parent_turn_id"]]:
        mine = _read(unpack_parts(row["parts"] or b"").get(SUMMARIES))
        before = {"continued_by": [], "summary_left_out": NOT_CONTINUED} if row["role"] == Role.SUMMARY else {}
        _note(conn, row["turn_id"], before | mine | {"continues_summary": found})
    for each in summaries:
        why = known[each.turn_id].get("summary_left_out")
        if each.turn_id in found:
            by = [*known[each.turn_id].get("continued_by", ()), row["turn_id"]]
            left_out = why if why == PARTIAL else None
            _note(conn, each.turn_id, known[each.turn_id] | {"continued_by": by, "summary_left_out": left_out})
        elif why == NOT_CONTINUED and any(_is_attempt(each, other) for other in summaries if other.turn_id in found):
            _note(conn, each.turn_id, known[each.turn_id] | {"summary_left_out": ANOTHER_ATTEMPT})


def _is_task(conn: sa.Connection, row: Row, messages: Sequence[Json]) -> bool:
    """Return whether an earlier call of the session wrote the last message, so that what it quotes is no context."""
    asked, own = text_of(messages[-1].get("content")).strip(), _t.session_pk == row["session_pk"]
    wanted = sa.select(_t.response).where(
        own, _t.seq < row["seq"], _t.response.contains('"tool_calls"', autoescape=True)
    )
    given = (text for (response,) in conn.execute(wanted) for text in texts_of_calls(json.loads(response)))
    return any(text.strip() == asked for text in given)


def _is_attempt(one: Any, other: Any) -> bool:
    return bool(one.parent_turn_id == other.parent_turn_id and one.messages == other.messages)


def texts_of(response: str) -> tuple[str, ...]:
    return texts_of_reply(json.loads(response))


def _continued(conn: sa.Connection, messages: Sequence[Json], replies: Sequence[Reply]) -> list[str]:
    """Return the summaries that a prompt has; their own prompts are read only where it may have one."""
    likely = set(continued(messages, replies))
    if not likely:
        return []
    texts = {reply.texts for reply in replies if reply.turn_id in likely}
    wanted = [reply for reply in replies if reply.turn_id in likely or reply.texts in texts]
    return continued(messages, [Reply(each.turn_id, each.texts, _prompt(conn, each.turn_id)) for each in wanted])


def _emptied(conn: sa.Connection, messages: Sequence[Json], last: Any, known: Mapping[str, Json]) -> list[str]:
    """Return the last summary if it says nothing and the context is shorter than what it had to sum up.

    Each prompt has all that it says. What follows is its return too: else a policy could be silent for nothing.
    """
    is_waiting = known[last.turn_id].get("summary_left_out") == NOT_CONTINUED and is_empty(json.loads(last.response))
    return [last.turn_id] if is_waiting and len(prompt_text(messages)) < len(_prompt(conn, last.turn_id)) else []


def session_summed_up(
    conn: sa.Connection, tenant: str, session_ids: Collection[str], messages: Sequence[Json]
) -> str | None:
    """Return which of these open sessions has a summary that a prompt goes on from, and that no context did.

    Of several it is the newest one: an equal summary may be left of a run that was given up.
    """
    own = (
        sessions.c.tenant == tenant,
        sessions.c.session_id.in_(session_ids),
        sessions.c.status == SessionStatus.OPEN.value,
    )
    of_them = conn.execute(sa.select(sessions.c.session_pk, sessions.c.session_id).where(*own))
    names = {row.session_pk: row.session_id for row in of_them}
    wanted = (_t.session_pk, _t.turn_id, _t.response, _t.parts)
    found = sa.select(*wanted).where(_t.session_pk.in_(names), sa.text(_of_summaries))
    session_of: dict[str, str] = {}
    replies = []
    for row in conn.execute(found.order_by(_t.session_pk, _t.seq)):
        stored = _read(unpack_parts(row.parts or b"").get(SUMMARIES))
        if stored.get("summary_left_out") == NOT_CONTINUED and (texts := texts_of(row.response)):
            session_of[row.turn_id] = names[row.session_pk]
            replies.append(Reply(row.turn_id, texts, ""))
    going_on = _continued(conn, messages, replies)
    same = {reply.texts for reply in replies if reply.turn_id in going_on}
    return next((session_of[reply.turn_id] for reply in reversed(replies) if reply.texts in same), None)


def _prompt(conn: sa.Connection, turn_id: str) -> str:
    *before, own = path_to(conn, turn_id, _t.messages, _t.response)
    said = [message for row in before for message in (*json.loads(row.messages), json.loads(row.response))]
    return prompt_text([*said, *json.loads(own.messages)])


def _note(conn: sa.Connection, turn_id: str, values: Json) -> None:
    own = _t.turn_id == turn_id
    parts = unpack_parts(conn.execute(sa.select(_t.parts).where(own)).scalar_one() or b"")
    parts[SUMMARIES] = json.dumps(values, separators=(",", ":")).encode()
    conn.execute(sa.update(turns).where(own).values(parts=pack_parts(parts)))


def at_steps(found: Sequence[Turn]) -> Sequence[Turn]:
    """Return a session's turns as they are credited: each summary at the step that follows from it.

    That is the step of the first turn that goes on from it, through summaries of it. A summary from which nothing
    follows is untrainable.
    """
    if all(turn.role is not Role.SUMMARY for turn in found):
        return found
    after = _followers(found)
    steps: dict[str, int] = {}
    for turn in reversed(found):  # what goes on from a turn is stored after it
        if turn.role is not Role.SUMMARY:
            steps[turn.turn_id] = _step(turn)
        elif (first := next((each for each in after[turn.turn_id] if each in steps), None)) is not None:
            steps[turn.turn_id] = steps[first]
    return [turn if turn.role is not Role.SUMMARY else _as_credited(turn, steps) for turn in found]


def _followers(found: Sequence[Turn]) -> Mapping[str, Sequence[str]]:
    """Return the turns that go on from each turn, by their ids, in order; attempts that were given up come last."""
    kept: dict[str, list[str]] = defaultdict(list)
    for is_given_up in (False, True):
        for turn in found:
            if is_given_up is (turn.role is Role.RETRY or turn.outcome in (Outcome.ABORTED, Outcome.ERROR)):
                for each in (turn.parent_turn_id, *continued_summaries(turn)):
                    kept[each or ""].append(turn.turn_id)
    return kept


def continued_summaries(turn: Turn) -> Collection[str]:
    return _read(turn.parts.get(SUMMARIES)).get("continues_summary") or ()


def _as_credited(turn: Turn, steps: Mapping[str, int]) -> Turn:
    if turn.turn_id in steps:
        return dataclasses.replace(turn, step=steps[turn.turn_id])
    if not is_trainable(turn):
        return turn
    return dataclasses.replace(
        turn, outcome=Outcome.UNTRAINABLE, reason=f"summary_{why_left_out(turn) or NOT_CONTINUED}"
    )


def why_left_out(turn: Turn) -> str | None:
    """Return why a summary is not trained; None of any other turn."""
    why: str | None = _read(turn.parts.get(SUMMARIES)).get("summary_left_out")
    return why


def _step(turn: Turn) -> int:
    return turn.seq if turn.step is None else turn.step


def with_returns(found: Sequence[Turn], credit: SessionCredit) -> SessionCredit:
    """Return the credit of a session's turns where summaries also have the rewards of single turns of their steps.

    Those follow from a summary, unlike from another turn of the step.
    """
    own: dict[int, float] = defaultdict(float)
    given: dict[str, float] = {}
    for turn in found:
        own[_step(turn)] += credit.own_rewards.get(turn.turn_id, 0.0) if turn.role is not Role.SUMMARY else 0.0
    for turn in found:
        if turn.role is Role.SUMMARY:
            given[turn.turn_id] = credit.turn_returns[turn.turn_id] + own[_step(turn)]
    return dataclasses.replace(credit, turn_returns=credit.turn_returns | given) if given else credit


EXTENSION = Extension(after_append=link, credited=at_steps, assigned=with_returns)
