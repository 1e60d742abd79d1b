"""Turns: appended to their sessions, each exactly once, and read with their whole prompts.

An appended turn gets its place, its chain and its digest. It is a row instead of a record there, because the proxy's
writing process builds no object that is not stored. A session is read with one statement and rebuilt in one pass in
order of `seq` (parents come before children), so the cost is linear in the number of turns. A recursive query reads the
ancestors of a single turn.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from turnwise import chains
from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.errors import Conflict, NotFound
from turnwise.parts import json_size
from turnwise.store import extensions, rows
from turnwise.store.rewards import rewards_of
from turnwise.store.rows import finish_turn
from turnwise.store.schema import sessions, turns
from turnwise.store.selection import LockedSession, is_session, lock_sessions, session_row
from turnwise.store.statements import (
    ID_BYTES,
    LOGPROB_BYTES,
    beginning_of_parts,
    execute_many,
    fetch_rows,
    insert_rows,
    mark,
    num_fitting,
    size_of,
)
from turnwise.store.updates import Updates, trained_in
from turnwise.types import (
    Json,
    Outcome,
    Reward,
    SessionKey,
    SessionStatus,
    TokenIds,
    TrainedIn,
    Turn,
)

SESSION_ENDED = "session_ended"
TurnRow: TypeAlias = dict[str, Any]
_NEWEST = (turns.c.session_pk.desc(), turns.c.seq.desc())
_HAS_CHILD = (
    "EXISTS (SELECT 1 FROM turns AS child WHERE child.session_pk = turns.session_pk AND child.seq > turns.seq "
    "AND child.parent_turn_id = turns.turn_id)"
)
"""Whether a turn extends this one; it reads only later turns of the session."""
_COUNT = (
    "UPDATE sessions SET num_turns = num_turns + {value}, num_chains = num_chains + {value}, "
    "last_active_at = {latest}(last_active_at, {value}) WHERE session_pk = {value}"
)


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


def turns_of(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, list[Turn]]:
    found = conn.execute(
        SELECT_TURNS.where(turns.c.session_pk.in_(session_pks)).order_by(turns.c.session_pk, turns.c.seq)
    )
    return rows.by_key(found, "session_pk", rows.TURNS.record)


def turns_where(conn: sa.Connection, *wanted: sa.ColumnElement[bool]) -> list[Turn]:
    found = SELECT_TURNS.where(*wanted).order_by(turns.c.session_pk, turns.c.seq)
    return [rows.TURNS.record(row) for row in conn.execute(found)]


def turns_to(conn: sa.Connection, turn_id: str, tenant: str) -> tuple[int, list[Turn]]:
    """Return the key of a turn's session, and the turns from the root of its chain to this turn, inclusive."""
    session_pk, seq = place_of_turn(conn, turn_id, tenant)
    return session_pk, turns_where(conn, *_with_parents(session_pk, turns.c.seq == seq))


def place_of_turn(conn: sa.Connection, turn_id: str, tenant: str | None = None) -> tuple[int, int]:
    """Return the key of a turn's session and its place in it."""
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
    """Return columns of the turns from the root of a chain to this turn, inclusive."""
    session_pk, _ = place_of_turn(conn, turn_id, tenant)
    through = _with_parents(session_pk, turns.c.turn_id == turn_id)
    return list(conn.execute(sa.select(*columns).select_from(turns).where(*through).order_by(turns.c.seq)))


def fitting(conn: sa.Connection, turn_ids: Sequence[str], max_bytes: int) -> list[str]:
    held = turns.c
    arrays = held.prompt_delta, held.token_ids, held.logprobs, held.parts
    size = size_of(conn.dialect, held.messages, held.tools, held.response, *arrays)
    # One by one: SQLite reads a text to measure it, and those behind the last one that fits may be large.
    sizes = (conn.execute(sa.select(size).where(held.turn_id == each)).scalar_one_or_none() or 0 for each in turn_ids)
    return list(turn_ids[: num_fitting(sizes, len(turn_ids), max_bytes)])


def sizes_between(conn: sa.Connection, session_pk: int, first: int, end: int, *, whole_prompt: bool) -> Iterator[int]:
    """Yield roughly the bytes that the turns of a session with `first` ≤ `seq` < `end` have as JSON, in order."""
    dialect, held = conn.dialect, turns.c
    prompt = size_of(dialect, held.messages, held.tools) + ID_BYTES * size_of(dialect, held.prompt_delta)
    reply = size_of(dialect, held.response) + ID_BYTES * size_of(dialect, held.token_ids)
    other = size_of(dialect, held.sampling) + LOGPROB_BYTES * size_of(dialect, held.logprobs)
    found = conn.execute(
        sa.select(held.seq, held.turn_id, held.parent_turn_id, prompt, reply, other, beginning_of_parts())
        .where(held.session_pk == session_pk, held.seq >= (0 if whole_prompt else first), held.seq < end)
        .order_by(held.seq)
    )
    through: dict[str | None, int] = {}
    """Bytes of prompt and reply, by turn id."""
    for seq, turn_id, parent_turn_id, prompt_bytes, reply_bytes, other_bytes, parts in found:
        size = prompt_bytes + reply_bytes
        if whole_prompt:
            size = through[turn_id] = size + through.get(parent_turn_id, 0)
        if seq >= first:
            yield size + other_bytes + json_size(parts)


def turn_views(
    turns_in_order: Sequence[Turn],
    lines: Iterable[Reward],
    updates: Updates = (),
    *,
    first: int = 0,
    whole_prompt: bool = True,
) -> list[TurnView]:
    """Return each turn from `seq` `first` on with its whole prompt, or the part that it adds to its parent's prompt.

    The turns are of one session, in order of `seq`, for whole prompts with all their ancestors.
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
    link = sa.select(turns.c.turn_id, turns.c.parent_turn_id).where(turns.c.session_pk == session_pk)
    line = link.where(*wanted).cte(recursive=True)
    # UNION, not UNION ALL: ancestors that several turns share are visited once.
    line = line.union(link.where(turns.c.turn_id == line.c.parent_turn_id))
    return [turns.c.session_pk == session_pk, turns.c.turn_id.in_(sa.select(line.c.turn_id))]


def read_turn(conn: sa.Connection, tenant: str, turn_id: str, *, whole_prompt: bool = True) -> TurnView:
    """Return a turn with its rewards, and with its whole prompt or the part that it adds to its parent's prompt."""
    session_pk, seq = place_of_turn(conn, turn_id, tenant)
    return _views(conn, session_pk, seq, seq + 1, whole_prompt=whole_prompt)[0]


def read_turns(
    conn: sa.Connection,
    tenant: str,
    session_id: str,
    *,
    limit: int | None = 100,
    after: str | None = None,
    whole_prompt: bool = True,
    max_bytes: int | None = None,
) -> tuple[list[TurnView], bool]:
    """Return a session's turns after the turn `after` in order, and whether there are more.

    Each has its whole prompt, or what it adds to its parent's. With `max_bytes` a page may end before its limit.
    """
    held = session_row(conn, tenant, session_id)
    first = 0 if after is None else 1 + _seq_of(conn, held.session_pk, after)
    end = held.num_turns if limit is None else min(first + limit, held.num_turns)
    if max_bytes is not None:
        sizes = sizes_between(conn, held.session_pk, first, end, whole_prompt=whole_prompt)
        end = first + num_fitting(sizes, end - first, max_bytes)
    return _views(conn, held.session_pk, first, end, whole_prompt=whole_prompt), end < held.num_turns


def _views(conn: sa.Connection, session_pk: int, first: int, end: int, *, whole_prompt: bool) -> list[TurnView]:
    page = turns.c.seq >= first, turns.c.seq < end
    wanted = _with_parents(session_pk, *page) if whole_prompt else [turns.c.session_pk == session_pk, *page]
    lines = rewards_of(conn, [session_pk])[session_pk]
    updates_of = trained_in(conn, [session_pk])[session_pk]
    return turn_views(turns_where(conn, *wanted), lines, updates_of, first=first, whole_prompt=whole_prompt)


def find_turn(
    conn: sa.Connection, tenant: str, session_id: str, *, turn_id: str | None = None, request_key: str | None = None
) -> Turn | None:
    names = {turns.c.turn_id: turn_id, turns.c.request_key: request_key}
    is_named = sa.or_(*(column == name for column, name in names.items() if name is not None))
    return next(iter(turns_where(conn, *is_session(tenant, session_id), is_named)), None)


def _seq_of(conn: sa.Connection, session_pk: int, turn_id: str) -> int:
    seq = conn.execute(
        sa.select(turns.c.seq).where(turns.c.session_pk == session_pk, turns.c.turn_id == turn_id)
    ).scalar_one_or_none()
    if seq is None:
        raise NotFound(f"there is no turn {turn_id!r} in this session", param="after")
    return int(seq)


def append_rows(conn: sa.Connection, batch: Sequence[TurnRow]) -> list[bool]:
    """Store turns of many sessions, each exactly once by its turn id and by its session and request key.

    Return for each turn whether it was added; `find_turn` returns what a replay finds. Parents come before children,
    and place, chain, digest and changed outcomes are set. A row may have the instant `session_created_at` of the
    session that its call had found. A turn of a session that is over is stored as untrainable with the reason
    `session_ended`.

    Raises:
        NotFound: a session or a parent is not stored, or the session was deleted and there is another one of its
        name.
        Conflict: another session has a turn with this id.
    """
    locked = lock_sessions(conn, set(map(_session_of, batch)))
    states = {(session.tenant, session.session_id): _SessionState(session) for session in locked}
    session_of_turn, open_chains, num_tokens = _stored_turns(conn, batch)
    for change in extensions.before_append:
        change(batch, {key: state.stored for key, state in states.items()}, num_tokens)
    stored_keys = _stored_keys(conn, batch, states)
    added: list[bool] = []
    for row in batch:
        state = states[_session_of(row)]
        session_pk = state.stored.session_pk
        if row.get("session_created_at", state.stored.created_at) != state.stored.created_at:
            raise NotFound(f"session {row['session_id']!r} was deleted during the call", param="session_id")
        turn_id, parent_id = row["turn_id"], row["parent_turn_id"]
        added.append(not _is_replay(row, session_pk, session_of_turn, stored_keys))
        if not added[-1]:
            continue
        if parent_id is not None and session_of_turn.get(parent_id) != session_pk:
            raise NotFound(f"turn {turn_id!r} extends {parent_id!r}, which its session does not hold")
        session_of_turn[turn_id] = session_pk
        stored_keys.add((session_pk, row["request_key"]))
        # Of several turns that extend one turn at the same time, the first continues its chain.
        row["chain_id"] = turn_id if parent_id is None else open_chains.pop(parent_id, turn_id)
        open_chains[turn_id] = row["chain_id"]
        state.place(row)
        finish_turn(row)
    new_rows = [row for row, is_added in zip(batch, added, strict=True) if is_added]
    if new_rows:
        insert_rows(conn, turns, new_rows)
        latest = "greatest" if conn.dialect.name == "postgresql" else "max"
        count = _COUNT.format(latest=latest, value=mark(conn.dialect))
        execute_many(conn, count, [state.counts() for state in states.values() if state.num_new])
        for extend in extensions.after_append:
            extend(conn, new_rows)
    return added


def _session_of(row: TurnRow) -> SessionKey:
    return row["tenant"], row["session_id"]


@dataclasses.dataclass(slots=True)
class _SessionState:
    """A locked session to which turns are appended."""

    stored: LockedSession
    num_new: int = 0
    num_new_chains: int = 0
    last_active_at: int = 0

    def place(self, row: dict[str, Any]) -> None:
        seq = self.stored.num_turns + self.num_new
        self.num_new += 1
        self.num_new_chains += row["chain_id"] == row["turn_id"]
        self.last_active_at = max(self.last_active_at, row["created_at"])
        row["session_pk"], row["seq"] = self.stored.session_pk, seq
        if row["step"] is None:
            row["step"] = seq
        if self.stored.status != SessionStatus.OPEN and row["outcome"] in TRAINABLE_OUTCOMES:
            row["outcome"], row["reason"] = Outcome.UNTRAINABLE.value, SESSION_ENDED

    def counts(self) -> tuple[int, int, int, int]:
        return self.num_new, self.num_new_chains, self.last_active_at, self.stored.session_pk


def _stored_turns(
    conn: sa.Connection, batch: Sequence[TurnRow]
) -> tuple[dict[str, int], dict[str, str], dict[str, int]]:
    """Return the session of each turn and parent of the batch that is stored, and the chain of each without a child.

    The last value has the number of tokens of each. The parents' sessions are locked.
    """
    ids = {turn_id for row in batch for turn_id in (row["turn_id"], row["parent_turn_id"]) if turn_id is not None}
    columns = "turn_id", "session_pk", "chain_id", "prompt_length + length(token_ids)", _HAS_CHILD
    found = fetch_rows(conn, turns, columns, {"turn_id": list(ids)})
    open_chains = {turn_id: chain_id for turn_id, _, chain_id, _, has_child in found if not has_child}
    num_tokens = {turn_id: number for turn_id, _, _, number, _ in found}
    return {turn_id: session_pk for turn_id, session_pk, *_ in found}, open_chains, num_tokens


def _stored_keys(
    conn: sa.Connection, batch: Sequence[TurnRow], states: dict[SessionKey, _SessionState]
) -> set[tuple[int, str | None]]:
    keyed = [row for row in batch if row["request_key"] is not None]
    names = {
        "session_pk": [states[_session_of(row)].stored.session_pk for row in keyed],
        "request_key": [row["request_key"] for row in keyed],
    }
    return set(fetch_rows(conn, turns, tuple(names), names)) if keyed else set()


def _is_replay(
    row: dict[str, Any], session_pk: int, session_of_turn: dict[str, int], stored_keys: set[tuple[int, str | None]]
) -> bool:
    turn_id, request_key = row["turn_id"], row["request_key"]
    holder = session_of_turn.get(turn_id)
    if holder is not None and holder != session_pk:
        raise Conflict(f"turn id {turn_id!r} belongs to another session; ids must be unique")
    return holder is not None or (request_key is not None and (session_pk, request_key) in stored_keys)


def append_turns(conn: sa.Connection, batch: Sequence[Turn]) -> None:
    append_rows(conn, list(map(rows.TURNS.row, batch)))
