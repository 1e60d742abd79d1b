"""Stored turns with their whole prompts, rebuilt through their parents.

A session is read with one statement and rebuilt in one pass in order of `seq` (parents come before children), so the
cost is linear in the number of turns. A recursive query reads the ancestors of a single turn.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from turnwise import chains
from turnwise.errors import NotFound
from turnwise.store import rows
from turnwise.store.pages import ID_BYTES, LOGPROB_BYTES, num_fitting
from turnwise.store.statements import is_among, size_of
from turnwise.store.tables import rewards, session_labels, sessions, turns
from turnwise.types import Json, Label, Reward, TokenIds, TrainedIn, Turn

Updates: TypeAlias = Sequence[tuple[TrainedIn, Mapping[str, float]]]
"""The updates that trained a session, oldest first, each with the advantages of its turns by turn id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTurn(TrainedIn):
    """A turn's part in an update that trained it."""

    advantage: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn with its rewards, and with its whole prompt or the part that it adds to its parent's prompt."""

    turn: Turn
    messages: list[Json]
    """The prompt's messages: all of them from the root on, or those that the turn adds to its parent's."""
    tools: list[Json] | None
    """The tools of its chain; None if only the part that the turn adds was read, except at a root."""
    prompt_token_ids: TokenIds
    """The whole prompt [P], or the part that the turn adds."""
    trained_in: tuple[TrainedTurn, ...] = ()
    """The updates that trained it, oldest first."""
    rewards: tuple[Reward, ...]
    """Lines for this turn or its step, in order of arrival; without lines for the whole session."""


SELECT_TURNS = sa.select(*turns.c, sessions.c.session_id, sessions.c.tenant).join_from(turns, sessions)
_SELECT_REWARDS = sa.select(*rewards.c, sessions.c.session_id, sessions.c.tenant).join_from(rewards, sessions)


def turns_of(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, list[Turn]]:
    """Return all turns of these sessions in order of `seq`, by session."""
    found = conn.execute(
        SELECT_TURNS.where(turns.c.session_pk.in_(session_pks)).order_by(turns.c.session_pk, turns.c.seq)
    )
    return rows.by_key(found, "session_pk", rows.TURNS.record)


def rewards_of(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, list[Reward]]:
    found = conn.execute(_SELECT_REWARDS.where(rewards.c.session_pk.in_(session_pks)).order_by(rewards.c.reward_id))
    return rows.by_key(found, "session_pk", rows.REWARDS.record)


def labels_of(conn: sa.Connection, session_pks: Sequence[int]) -> dict[int, tuple[Label, ...]]:
    """Return the labels of these sessions in alphabetical order, by session."""
    found = conn.execute(
        sa.select(session_labels)
        .where(is_among(conn.dialect, session_labels.c.session_pk, session_pks))
        .order_by(session_labels.c.session_pk, session_labels.c.label)
    )
    by_session = rows.by_key(found, "session_pk", rows.LABELS.record)
    return {session_pk: tuple(labels) for session_pk, labels in by_session.items()}


def session_turns(
    conn: sa.Connection, session_pk: int, *wanted: sa.ColumnElement[bool], with_ancestors: bool = True
) -> list[Turn]:
    conditions = _with_parents(session_pk, *wanted) if with_ancestors else [turns.c.session_pk == session_pk, *wanted]
    return [rows.TURNS.record(row) for row in conn.execute(SELECT_TURNS.where(*conditions).order_by(turns.c.seq))]


def turns_to(conn: sa.Connection, turn_id: str, tenant: str) -> tuple[int, list[Turn]]:
    """Return the key of a turn's session, and the turns from the root of its chain to this turn, inclusive.

    Raises:
        NotFound: this tenant has no such turn.
    """
    session_pk, seq = place_of_turn(conn, turn_id, tenant)
    return session_pk, session_turns(conn, session_pk, turns.c.seq == seq)


def place_of_turn(conn: sa.Connection, turn_id: str, tenant: str | None = None) -> tuple[int, int]:
    """Return the key of a turn's session and its place in it.

    Raises:
        NotFound: no such turn, or none of this tenant.
    """
    found = sa.select(turns.c.session_pk, turns.c.seq).where(turns.c.turn_id == turn_id)
    if tenant is not None:
        found = found.join(sessions).where(sessions.c.tenant == tenant)
    row = conn.execute(found).one_or_none()
    if row is None:
        raise NotFound(f"there is no turn {turn_id!r}", param="turn_id")
    return row.session_pk, row.seq


def path_to(
    conn: sa.Connection, turn_id: str, *columns: sa.ColumnElement[Any], tenant: str | None = None
) -> list[rows.StoredRow]:
    """Return columns of the turns from the root of a chain to this turn, inclusive.

    Raises:
        NotFound: no such turn, or none of this tenant.
    """
    session_pk, _ = place_of_turn(conn, turn_id, tenant)
    through = _with_parents(session_pk, turns.c.turn_id == turn_id)
    return list(conn.execute(sa.select(*columns).select_from(turns).where(*through).order_by(turns.c.seq)))


def fitting(conn: sa.Connection, turn_ids: Sequence[str], max_bytes: int) -> list[str]:
    """Return the first of these turns that have so many stored bytes together; always the first one."""
    held = turns.c
    arrays = held.prompt_delta, held.token_ids, held.logprobs, held.routed_experts
    size = size_of(conn.dialect, held.messages, held.tools, held.response, *arrays)
    # One by one: SQLite reads a text to measure it, and those behind the last one that fits may be large.
    sizes = (conn.execute(sa.select(size).where(held.turn_id == each)).scalar_one_or_none() or 0 for each in turn_ids)
    return list(turn_ids[: num_fitting(sizes, len(turn_ids), max_bytes)])


def turn_by_id(conn: sa.Connection, turn_id: str) -> Turn:
    return rows.TURNS.record(conn.execute(SELECT_TURNS.where(turns.c.turn_id == turn_id)).one())


def sizes_between(conn: sa.Connection, session_pk: int, first: int, end: int, *, whole_prompt: bool) -> Iterator[int]:
    """Yield roughly the bytes that the turns of a session with `first` ≤ `seq` < `end` have as JSON, in order."""
    dialect, held = conn.dialect, turns.c
    prompt = size_of(dialect, held.messages, held.tools) + ID_BYTES * size_of(dialect, held.prompt_delta)
    reply = size_of(dialect, held.response) + ID_BYTES * size_of(dialect, held.token_ids)
    other = size_of(dialect, held.sampling, held.routed_experts) + LOGPROB_BYTES * size_of(dialect, held.logprobs)
    found = conn.execute(
        sa.select(held.seq, held.turn_id, held.parent_turn_id, prompt, reply, other)
        .where(held.session_pk == session_pk, held.seq >= (0 if whole_prompt else first), held.seq < end)
        .order_by(held.seq)
    )
    through: dict[str | None, int] = {}
    """Bytes of prompt and reply, by turn id."""
    for seq, turn_id, parent_turn_id, prompt_bytes, reply_bytes, other_bytes in found:
        size = prompt_bytes + reply_bytes
        if whole_prompt:
            size = through[turn_id] = size + through.get(parent_turn_id, 0)
        if seq >= first:
            yield size + other_bytes


def turn_views(
    turns_in_order: Sequence[Turn],
    lines: Iterable[Reward],
    updates: Updates = (),
    *,
    first: int = 0,
    whole_prompt: bool = True,
) -> list[TurnView]:
    """Return each turn from `seq` `first` on with its whole prompt, or the part that it adds to its parent's prompt.

    Args:
        turns_in_order: Turns of one session in order of `seq`, for whole prompts with all their ancestors.
        lines: The session's reward lines in order of arrival.
        updates: The updates that trained it.
        first: The `seq` of the first turn that is returned.
        whole_prompt: Whether each turn has its whole prompt.
    """
    rewards_for: dict[str | int | None, list[Reward]] = defaultdict(list)
    for line in lines:
        rewards_for[line.turn_id if line.turn_id is not None else line.step].append(line)
    by_id = {turn.turn_id: turn for turn in turns_in_order}
    views = []
    for turn in turns_in_order:
        if turn.seq < first:
            continue
        path = chains.lineage(turn, by_id) if whole_prompt else [turn]
        messages: list[Json] = []
        tokens: list[TokenIds] = []
        for earlier in path[:-1]:
            messages += [*earlier.messages, earlier.response]
            tokens += [earlier.prompt_delta, earlier.token_ids]
        views.append(
            TurnView(
                turn=turn,
                messages=messages + turn.messages,
                tools=path[0].tools,
                prompt_token_ids=np.concatenate([*tokens, turn.prompt_delta]),
                trained_in=tuple(
                    TrainedTurn(**dataclasses.asdict(update), advantage=advantages[turn.turn_id])
                    for update, advantages in updates
                    if turn.turn_id in advantages
                ),
                rewards=tuple(
                    sorted(rewards_for[turn.turn_id] + rewards_for[turn.step], key=lambda line: line.reward_id or 0)
                ),
            )
        )
    return views


def _with_parents(session_pk: int, *wanted: sa.ColumnElement[bool]) -> list[sa.ColumnElement[bool]]:
    """Return the SQL conditions for the wanted turns and their ancestors."""
    link = sa.select(turns.c.turn_id, turns.c.parent_turn_id).where(turns.c.session_pk == session_pk)
    line = link.where(*wanted).cte(recursive=True)
    # UNION, not UNION ALL: ancestors that several turns share are visited once.
    line = line.union(link.where(turns.c.turn_id == line.c.parent_turn_id))
    return [turns.c.session_pk == session_pk, turns.c.turn_id.in_(sa.select(line.c.turn_id))]
