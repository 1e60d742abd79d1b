"""Which sessions and turns are trained or evaluated: experiences, computed from the ledger on every read.

Only finished sessions count (over, with a reward): a session without a reward is different from one with reward 0.
Sessions are read in batches, so a long history streams in bounded memory.

Where several policies sampled in a session, each has the session's rewards for its own turns, as if it had sampled
alone. The turns of the others are steps that it does not train, as those of roles that are not trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from turnwise import chains
from turnwise.chains import ChainTokens, Experience, is_imported, is_trainable, merge_session, split_session
from turnwise.credit import SessionCredit, assign_credit, latest_lines
from turnwise.parts import Loaded, load_parts
from turnwise.store import extensions
from turnwise.store.database import Database
from turnwise.store.rewards import rewards_of
from turnwise.store.rows import StoredRow
from turnwise.store.schema import groups, sessions
from turnwise.store.selection import SessionFilter
from turnwise.store.statements import num_within
from turnwise.store.turns import turns_of
from turnwise.store.updates import Updates, trained_in
from turnwise.types import (
    IMPORT,
    TRAINED_ROLES,
    Credit,
    Json,
    Outcome,
    Reward,
    Role,
    SessionStatus,
    Split,
    Turn,
)

_SESSIONS_AT_ONCE = 32
_TURNS_AT_ONCE = 500
"""Most sessions, and most turns of several sessions, that are read at once."""
MAY_BE_TRAINED = sessions.c.train == 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How experiences are computed from sessions."""

    credit: Credit | None = None
    """Replaces each session's credit policy; None for its own."""
    gamma: float | None = None
    """Replaces each session's discount; None for its own."""
    reward_bonus_coeff: float = 0.0
    roles: Collection[Role] = TRAINED_ROLES
    """Roles whose turns are trained; turns of other roles remain in their prompts."""
    merge: Literal["turn", "chain"] = "turn"
    with_imported: bool = False
    """Include imported replies, whose behaviour logprobs are 0 where they are not known."""
    with_unrewarded: bool = False
    """Include sessions without rewards; their reward is 0."""
    with_files: bool = False
    """Read the files that parts name too."""
    policy_id: int | None = None
    """The policy whose turns are trained; None for each that sampled."""


Source: TypeAlias = sa.Connection | Database
"""Where experiences are read: in one transaction, or in one for each page of sessions, so that a slow reader holds
none open."""
PER_TURN, PER_CHAIN, CLAIMED = Shape(), Shape(merge="chain"), Shape(merge="chain", with_files=True)


def experiences(source: Source, wanted: SessionFilter, shape: Shape = PER_TURN) -> Iterator[Experience]:
    """Yield the experiences of rewarded sessions, oldest first.

    Without a status only those of sessions that are over, unless one session is named.
    """
    clauses = wanted.clauses()
    if wanted.status is None and wanted.session_id is None:
        clauses.append(sessions.c.status != SessionStatus.OPEN.value)
    yield from stream(source, clauses, shape)


def experiences_of_groups(
    conn: sa.Connection, group_pks: Sequence[int], shape: Shape = CLAIMED
) -> Iterator[Experience]:
    """Yield one experience per chain of the finished sessions of these groups, over a transaction that stays open.

    A part of a group has the sessions of the group.
    """
    whole = sa.select(sa.func.coalesce(groups.c.part_of, groups.c.group_pk)).where(groups.c.group_pk.in_(group_pks))
    clauses = [sessions.c.group_pk.in_(whole), sessions.c.status != SessionStatus.OPEN.value, MAY_BE_TRAINED]
    return stream(conn, clauses, shape)


def opened(source: Source) -> contextlib.AbstractContextManager[sa.Connection]:
    return source.read() if isinstance(source, Database) else contextlib.nullcontext(source)


def next_rows(conn: sa.Connection, before: Sequence[StoredRow], *wanted: sa.ColumnElement[bool]) -> Sequence[StoredRow]:
    """Return the rows of the sessions after these, oldest first, as many as have turns that can be read at once."""
    behind = before[-1].session_pk if before else 0
    page = sa.select(sessions).where(*wanted, sessions.c.session_pk > behind).order_by(sessions.c.session_pk)
    found = conn.execute(page.limit(_SESSIONS_AT_ONCE)).all()
    return found[: num_within((row.num_turns for row in found), _TURNS_AT_ONCE)]


def stream(source: Source, clauses: Sequence[sa.ColumnElement[bool]], shape: Shape) -> Iterator[Experience]:
    is_rewarded = [] if shape.with_unrewarded else [sessions.c.num_rewards > 0]
    found: Sequence[StoredRow] = ()
    while True:
        with opened(source) as conn:
            found = next_rows(conn, found, *clauses, *is_rewarded)
            pks = [row.session_pk for row in found]
            turns, lines = turns_of(conn, pks), rewards_of(conn, pks)
            updates_of = trained_in(conn, pks)
            loaded = load_parts(conn, found, turns, with_files=shape.with_files)
        if not found:
            return
        for row in found:
            pk = row.session_pk
            for policy_id in dict.fromkeys(turn.policy_id for turn in turns.get(pk, [])):
                if shape.policy_id in (None, policy_id):
                    own = credited_turns([_trained(turn, shape) for turn in of_policy(turns.get(pk, []), policy_id)])
                    found_of = _of_session(row, own, lines.get(pk, []), updates_of.get(pk, ()), loaded[pk], shape)
                    yield from (dataclasses.replace(one, policy_id=policy_id) for one in found_of)


def of_policy(turns: Iterable[Turn], policy_id: int) -> list[Turn]:
    """Return the turns of a session: those of other policies than the wanted one as untrainable."""
    return [
        turn
        if turn.policy_id == policy_id
        else dataclasses.replace(turn, outcome=Outcome.UNTRAINABLE, reason="other_policy")
        for turn in turns
    ]


def credited_turns(turns: Sequence[Turn]) -> Sequence[Turn]:
    for change in extensions.credited:
        turns = change(turns)
    return turns


def assigned_credit(turns: Sequence[Turn], lines: Sequence[Reward], credit: Credit, **rule: float) -> SessionCredit:
    assigned = assign_credit(turns, latest_lines(lines), credit, **rule)
    for change in extensions.assigned:
        assigned = change(turns, assigned)
    return assigned


def _of_session(
    row: StoredRow,
    turns: Sequence[Turn],
    lines: Sequence[Reward],
    updates: Updates,
    loaded: Loaded,
    shape: Shape,
) -> Iterator[Experience]:
    assigned = assigned_credit(
        turns,
        lines,
        shape.credit or Credit(row.credit),
        gamma=row.gamma if shape.gamma is None else shape.gamma,
        reward_bonus_coeff=shape.reward_bonus_coeff,
    )
    of_session: Json = {
        "status": row.status,
        "termination_reason": row.termination_reason,
        "metadata": json.loads(row.metadata),
        "credit": (shape.credit or Credit(row.credit)).value,
        "single": row.opened_by != IMPORT and (row.group_id is None or row.group_size == 1),
    }
    by_id = {turn.turn_id: turn for turn in turns}
    merged = merge_session(turns, loaded) if shape.merge == "chain" else split_session(turns, loaded)
    for sequence in merged:
        agent = agent_digest(chains.lineage(sequence.turns[0], by_id)[0].messages)
        yield _experience(row, sequence, assigned, updates, agent, of_session)


def agent_digest(messages: Sequence[Json]) -> str:
    """Return a digest of the system prompt that messages begin with; numbers in it, such as dates, count alike."""
    leading = itertools.takewhile(lambda message: message.get("role") in ("system", "developer"), messages)
    text = json.dumps([message.get("content") for message in leading], ensure_ascii=False)
    return hashlib.sha256(re.sub(r"\d+", "0", text).encode()).hexdigest()[:16]


def _trained(turn: Turn, shape: Shape) -> Turn:
    """Return the turn, changed to untrainable if it has another role, and to trainable if imported turns count."""
    if shape.with_imported and is_imported(turn):
        logprobs = turn.logprobs if turn.logprobs.size else np.zeros(turn.token_ids.size, np.float32)
        return dataclasses.replace(turn, outcome=Outcome.EXACT, logprobs=logprobs)
    role = turn.role or Role.MAIN
    if role in shape.roles or not is_trainable(turn):
        return turn
    return dataclasses.replace(turn, outcome=Outcome.UNTRAINABLE, reason=f"role_{role}")


def _experience(
    session: StoredRow,
    sequence: ChainTokens,
    credit: SessionCredit,
    updates: Updates,
    agent: str,
    of_session: Json,
) -> Experience:
    turn_ids = tuple(turn.turn_id for turn in sequence.turns)
    steps = tuple(turn.seq if turn.step is None else turn.step for turn in sequence.turns)
    group_id = session.group_id or session.session_id
    # After a roll back in the middle of a turn, the version of its last token is the older one.
    versions = [version for turn in sequence.turns for version in (turn.policy_version_first, turn.policy_version_last)]
    return Experience(
        session_id=session.session_id,
        group_id=group_id,
        tenant=session.tenant,
        task_id=session.task_id or "",
        run=session.run,
        turn_ids=turn_ids,
        turn_steps=steps,
        tokens=sequence.tokens,
        prompt_length=sequence.prompt_length,
        loss_mask=sequence.loss_mask,
        turn_index=sequence.turn_index,
        logprobs=sequence.logprobs,
        turn_messages=tuple(turn.messages for turn in sequence.turns),
        parts=sequence.parts,
        turn_rewards=np.array([credit.turn_rewards[turn_id] for turn_id in turn_ids], np.float64),
        turn_own_rewards=np.array([credit.own_rewards.get(turn_id, 0.0) for turn_id in turn_ids], np.float64),
        turn_returns=np.array([credit.turn_returns[turn_id] for turn_id in turn_ids], np.float64),
        turn_shares=np.array([credit.shares[turn_id] for turn_id in turn_ids], np.float64).T,
        turn_advantages=_advantages(turn_ids, updates),
        reward=credit.reward,
        policy_version_first=min(versions),
        policy_version_last=max(versions),
        split=Split(session.split),
        trained_in=tuple(update for update, advantages in updates if not advantages.keys().isdisjoint(turn_ids)),
        metrics={"num_turns": len(turn_ids), "num_tokens": int(sequence.loss_mask.sum())},
        info={
            **of_session,
            "agent": agent,
            "roles": [turn.role or Role.MAIN for turn in sequence.turns],
            "sampling": [turn.sampling for turn in sequence.turns],  # one entry per turn
            "finish_reasons": [turn.finish_reason for turn in sequence.turns],
            "rewards": credit.by_name,
        },
    )


def _advantages(turn_ids: Sequence[str], updates: Updates) -> npt.NDArray[np.float64] | None:
    """Return the advantages of turns in the last update that trained all of them; None without one."""
    for _, advantages in reversed(updates):
        if advantages.keys() >= set(turn_ids):
            return np.array([advantages[turn_id] for turn_id in turn_ids], np.float64)
    return None
