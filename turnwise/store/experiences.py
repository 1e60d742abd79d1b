"""Experiences, computed from the ledger on every read: the trainer's batch and the proxy's dry run are the same.

Only finished sessions count (over, with a reward): a session without a reward is different from one with reward 0.
Sessions are read in batches, so a long history streams in bounded memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from turnwise import chains
from turnwise.chains import EID, HINTS, ChainTokens, Experience, is_imported, is_trainable, merge_session, split_session
from turnwise.credit import SessionCredit, assign_credit, latest_lines
from turnwise.store import lineage, rows, trained
from turnwise.store.lineage import Updates
from turnwise.store.session_filter import SessionFilter, rows_in_batches
from turnwise.store.statements import is_among
from turnwise.store.tables import feedback, sessions
from turnwise.types import (
    IMPORT,
    TRAINED_ROLES,
    Credit,
    Json,
    Outcome,
    Reward,
    Role,
    Session,
    SessionStatus,
    Turn,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How experiences are computed from sessions."""

    credit: Credit | None = None
    """Replaces each session's credit policy; None for its own."""
    gamma: float | None = None
    """Replaces each session's discount; None for its own."""
    reward_bonus_coeff: float = 0.0
    """Coefficient of the bonus for an improvement from step to step."""
    roles: Collection[Role] = TRAINED_ROLES
    """Roles whose turns are trained; turns of other roles remain in their prompts."""
    merge: Literal["turn", "chain"] = "turn"
    """One experience per turn, or one per chain as in training."""
    with_imported: bool = False
    """Include imported replies, whose behaviour logprobs are 0 where they are not known."""
    with_unrewarded: bool = False
    """Include sessions without rewards; their reward is 0."""


PER_TURN, PER_CHAIN = Shape(), Shape(merge="chain")


def experiences(conn: sa.Connection, wanted: SessionFilter, shape: Shape = PER_TURN) -> Iterator[Experience]:
    """Yield the experiences of rewarded sessions, oldest first, over a transaction that stays open meanwhile.

    Without a status only those of sessions that are over, unless one session is named.
    """
    clauses = wanted.clauses()
    if wanted.status is None and wanted.session_id is None:
        clauses.append(sessions.c.status != SessionStatus.OPEN.value)
    yield from _stream(conn, clauses, shape)


def experiences_of_groups(
    conn: sa.Connection,
    group_pks: Sequence[int],
    *,
    roles: Collection[Role] = TRAINED_ROLES,
    with_imported: bool = False,
) -> Iterator[Experience]:
    """Yield one experience per chain of the finished sessions of these groups, over a transaction that stays open."""
    shape = Shape(roles=roles, merge="chain", with_imported=with_imported)
    clauses = [sessions.c.group_pk.in_(group_pks), sessions.c.status != SessionStatus.OPEN.value]
    return _stream(conn, clauses, shape)


def experiences_of_sessions(
    conn: sa.Connection, session_pks: Sequence[int], *, roles: Collection[Role] = TRAINED_ROLES
) -> Iterator[Experience]:
    shape = Shape(roles=roles, merge="chain", with_unrewarded=True)
    return _stream(conn, [is_among(conn.dialect, sessions.c.session_pk, session_pks)], shape)


def session_credit(conn: sa.Connection, session_pk: int) -> SessionCredit | None:
    """Return the rewards and returns of a session's turns under its own credit policy; None without a reward."""
    lines = lineage.rewards_of(conn, [session_pk]).get(session_pk)
    if not lines:
        return None
    row = conn.execute(sa.select(sessions.c.credit, sessions.c.gamma).where(sessions.c.session_pk == session_pk)).one()
    turns = lineage.turns_of(conn, [session_pk])[session_pk]
    return assign_credit(turns, latest_lines(lines), Credit(row.credit), gamma=row.gamma)


def _stream(conn: sa.Connection, clauses: Sequence[sa.ColumnElement[bool]], shape: Shape) -> Iterator[Experience]:
    is_rewarded = [] if shape.with_unrewarded else [sessions.c.num_rewards > 0]
    for found in rows_in_batches(conn, *clauses, *is_rewarded):
        pks = [row.session_pk for row in found]
        turns, lines = lineage.turns_of(conn, pks), lineage.rewards_of(conn, pks)
        updates_of, hints = trained.trained_in(conn, pks), _hints(conn, pks)
        for row in found:
            pk = row.session_pk
            in_session = [_trained(turn, shape) for turn in turns.get(pk, [])]
            yield from _of_session(row, in_session, lines.get(pk, []), updates_of.get(pk, ()), hints[pk], shape)


def _of_session(
    row: rows.StoredRow,
    turns: Sequence[Turn],
    lines: Sequence[Reward],
    updates: Updates,
    hints: Mapping[str, Json],
    shape: Shape,
) -> Iterator[Experience]:
    assigned = assign_credit(
        turns,
        latest_lines(lines),
        shape.credit or Credit(row.credit),
        gamma=row.gamma if shape.gamma is None else shape.gamma,
        reward_bonus_coeff=shape.reward_bonus_coeff,
    )
    session = rows.SESSIONS.record(row, reward=assigned.reward)
    by_id = {turn.turn_id: turn for turn in turns}
    for sequence in merge_session(turns) if shape.merge == "chain" else split_session(turns):
        agent = agent_digest(chains.lineage(sequence.turns[0], by_id)[0].messages)
        experience = _experience(session, sequence, assigned, updates, agent, shape.credit)
        own = {turn_id: hint for turn_id, hint in hints.items() if turn_id in experience.turn_ids}
        yield dataclasses.replace(experience, info=experience.info | {HINTS: own}) if own else experience


def _hints(conn: sa.Connection, session_pks: Sequence[int]) -> defaultdict[int, dict[str, Json]]:
    """Return the corrections of people as they are put into prompts, by session and by turn; the last one of a turn."""
    is_own = is_among(conn.dialect, feedback.c.session_pk, session_pks)
    found = sa.select(feedback.c.session_pk, feedback.c.content).where(is_own).order_by(feedback.c.created_at)
    hints: defaultdict[int, dict[str, Json]] = defaultdict(dict)
    for row in conn.execute(found):
        hint = json.loads(row.content).get("hint")
        if hint is not None:
            hints[row.session_pk][hint["turn_id"]] = hint
    return hints


def agent_digest(messages: Sequence[Json]) -> str:
    """Return a digest of the system prompt that a conversation begins with; numbers in it, such as dates, count alike.

    Args:
        messages: The messages of a chain's first prompt.
    """
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
    session: Session,
    sequence: ChainTokens,
    credit: SessionCredit,
    updates: Updates,
    agent: str,
    other_policy: Credit | None,
) -> Experience:
    turn_ids = tuple(turn.turn_id for turn in sequence.turns)
    steps = tuple(turn.seq if turn.step is None else turn.step for turn in sequence.turns)
    group_id = session.group_id or session.session_id
    # After a roll back in the middle of a turn, the version of its last token is the older one.
    versions = [version for turn in sequence.turns for version in (turn.policy_version_first, turn.policy_version_last)]
    return Experience(
        eid=EID(batch=group_id, task=session.task_id or "", run=session.run, step=steps[0], suffix=turn_ids[0]),
        session_id=session.session_id,
        group_id=group_id,
        tenant=session.tenant,
        turn_ids=turn_ids,
        turn_steps=steps,
        tokens=sequence.tokens,
        prompt_length=sequence.prompt_length,
        loss_mask=sequence.loss_mask,
        turn_index=sequence.turn_index,
        logprobs=sequence.logprobs,
        turn_messages=tuple(turn.messages for turn in sequence.turns),
        routed_experts=sequence.routed_experts,
        turn_rewards=np.array([credit.turn_rewards[turn_id] for turn_id in turn_ids], np.float64),
        turn_own_rewards=np.array([credit.own_rewards.get(turn_id, 0.0) for turn_id in turn_ids], np.float64),
        turn_returns=np.array([credit.turn_returns[turn_id] for turn_id in turn_ids], np.float64),
        turn_advantages=_advantages(turn_ids, updates),
        reward=credit.reward,
        policy_version_first=min(versions),
        policy_version_last=max(versions),
        split=session.split,
        trained_in=tuple(update for update, advantages in updates if not advantages.keys().isdisjoint(turn_ids)),
        metrics={"num_turns": len(turn_ids), "num_tokens": int(sequence.loss_mask.sum())},
        info={
            "status": session.status.value,
            "termination_reason": session.termination_reason,
            "metadata": session.metadata,
            "credit": (other_policy or session.credit).value,
            "single": session.opened_by != IMPORT and (session.group_id is None or session.group_size == 1),
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
