"""Records to rows and back: the one place that knows how an array, a document or an instant is stored.

One decision: JSON is written as pure ASCII, so that whatever a client sends, lone surrogates and NULs included, is text
that both databases take.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa

from turnwise.store.database import from_micros, to_micros
from turnwise.types import (
    Credit,
    Logprobs,
    Outcome,
    PolicyKind,
    PolicyStatus,
    PolicyVersion,
    Reward,
    Session,
    SessionStatus,
    Split,
    TokenIds,
    Turn,
    UpdateRecord,
)

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
StoredRow: TypeAlias = sa.Row[*tuple[Any, ...]]
"""A row of some table, its columns as attributes."""
dump = json.JSONEncoder(separators=(",", ":")).encode
"""A document as the text that is stored."""


def ids_from_blob(blob: bytes) -> TokenIds:
    """Return stored token ids, read-only."""
    return np.frombuffer(blob, _INT32)


def logprobs_from_blob(blob: bytes) -> Logprobs:
    """Return stored logprobs, read-only."""
    return np.frombuffer(blob, _FLOAT32)


def session_row(session: Session, group_pk: int | None) -> dict[str, Any]:
    """Return the row of a new session: open, without turns and rewards."""
    return {
        "tenant": session.tenant,
        "session_id": session.session_id,
        "task_id": session.task_id,
        "run": session.run,
        "group_id": session.group_id,
        "group_size": session.group_size,
        "group_pk": group_pk,
        "split": session.split.value,
        "credit": session.credit.value,
        "gamma": session.gamma,
        "sampling": dump(session.sampling),
        "metadata": dump(session.metadata),
        "status": SessionStatus.OPEN.value,
        "num_turns": 0,
        "num_chains": 0,
        "num_rewards": 0,
        "created_at": to_micros(session.created_at),
        "last_active_at": to_micros(session.created_at),
    }


def session_from_row(row: StoredRow, reward: float | None) -> Session:
    """Return a stored session; its reward is worked out elsewhere."""
    return Session(
        session_id=row.session_id,
        tenant=row.tenant,
        task_id=row.task_id,
        run=row.run,
        group_id=row.group_id,
        group_size=row.group_size,
        split=Split(row.split),
        credit=Credit(row.credit),
        gamma=row.gamma,
        sampling=json.loads(row.sampling),
        metadata=json.loads(row.metadata),
        status=SessionStatus(row.status),
        termination_reason=row.termination_reason,
        reward=reward,
        num_turns=row.num_turns,
        num_chains=row.num_chains,
        created_at=from_micros(row.created_at),
        last_active_at=from_micros(row.last_active_at),
        ended_at=None if row.ended_at is None else from_micros(row.ended_at),
    )


def turn_row(turn: Turn, session_pk: int) -> dict[str, Any]:
    """Return the row of a turn whose `seq` and `step` are given."""
    return {
        "turn_id": turn.turn_id,
        "session_pk": session_pk,
        "parent_turn_id": turn.parent_turn_id,
        "chain_id": turn.chain_id,
        "seq": turn.seq,
        "step": turn.step,
        "dialect": turn.dialect,
        "model": _storable(turn.model),
        "messages": dump(turn.messages),
        "tools": None if turn.tools is None else dump(turn.tools),
        "sampling": dump(turn.sampling),
        "response": dump(turn.response),
        "prompt_delta": turn.prompt_delta.astype(_INT32, copy=False).tobytes(),
        "prompt_length": turn.prompt_length,
        "token_ids": turn.token_ids.astype(_INT32, copy=False).tobytes(),
        "logprobs": turn.logprobs.astype(_FLOAT32, copy=False).tobytes(),
        "finish_reason": turn.finish_reason,
        "outcome": turn.outcome.value,
        "reason": None if turn.reason is None else _storable(turn.reason),
        "policy_version_first": turn.policy_version_first,
        "policy_version_last": turn.policy_version_last,
        "history_digest": turn.history_digest,
        "messages_digest": turn.messages_digest,
        "dialogue_digest": turn.dialogue_digest,
        "request_key": turn.request_key,
        "inferred_by": turn.inferred_by,
        "created_at": to_micros(turn.created_at),
        "ttft_seconds": turn.ttft_seconds,
        "duration_seconds": turn.duration_seconds,
    }


def turn_from_row(row: StoredRow) -> Turn:
    """Return a stored turn, from a row of `turns` with its session's `session_id` and `tenant` beside it."""
    return Turn(
        turn_id=row.turn_id,
        session_id=row.session_id,
        tenant=row.tenant,
        parent_turn_id=row.parent_turn_id,
        chain_id=row.chain_id,
        seq=row.seq,
        step=row.step,
        dialect=row.dialect,
        model=row.model,
        messages=json.loads(row.messages),
        tools=None if row.tools is None else json.loads(row.tools),
        sampling=json.loads(row.sampling),
        response=json.loads(row.response),
        prompt_delta=ids_from_blob(row.prompt_delta),
        prompt_length=row.prompt_length,
        token_ids=ids_from_blob(row.token_ids),
        logprobs=logprobs_from_blob(row.logprobs),
        finish_reason=row.finish_reason,
        outcome=Outcome(row.outcome),
        reason=row.reason,
        policy_version_first=row.policy_version_first,
        policy_version_last=row.policy_version_last,
        history_digest=row.history_digest,
        messages_digest=row.messages_digest,
        dialogue_digest=row.dialogue_digest,
        request_key=row.request_key,
        inferred_by=row.inferred_by,
        created_at=from_micros(row.created_at),
        ttft_seconds=row.ttft_seconds,
        duration_seconds=row.duration_seconds,
    )


def reward_row(reward: Reward, session_pk: int) -> dict[str, Any]:
    """Return the row of a new reward line."""
    return {
        "session_pk": session_pk,
        "turn_id": reward.turn_id,
        "step": reward.step,
        "name": reward.name,
        "value": reward.value,
        "source": reward.source,
        "written_by": reward.written_by,
        "created_at": to_micros(reward.created_at),
    }


def reward_from_row(row: StoredRow) -> Reward:
    """Return a stored reward line, from a row of `rewards` with its session's `session_id` and `tenant` beside it."""
    return Reward(
        session_id=row.session_id,
        tenant=row.tenant,
        turn_id=row.turn_id,
        step=row.step,
        value=row.value,
        name=row.name,
        source=row.source,
        written_by=row.written_by,
        reward_id=row.reward_id,
        created_at=from_micros(row.created_at),
    )


def policy_row(policy: PolicyVersion) -> dict[str, Any]:
    """Return the row of a policy version that is published now."""
    return {
        "version": policy.version,
        "path": policy.path,
        "kind": policy.kind.value,
        "status": PolicyStatus.PUBLISHED.value,
        "update_id": policy.update_id,
        "metrics": dump(policy.metrics),
        "created_at": to_micros(policy.created_at),
    }


def policy_from_row(row: StoredRow) -> PolicyVersion:
    """Return a stored policy version."""
    return PolicyVersion(
        version=row.version,
        path=row.path,
        kind=PolicyKind(row.kind),
        status=PolicyStatus(row.status),
        update_id=row.update_id,
        metrics=json.loads(row.metrics),
        error=row.error,
        reload_seconds=row.reload_seconds,
        created_at=from_micros(row.created_at),
        activated_at=None if row.activated_at is None else from_micros(row.activated_at),
    )


def update_row(update: UpdateRecord) -> dict[str, Any]:
    """Return the row of an update."""
    return {
        "update_id": update.update_id,
        "trainer_id": update.trainer_id,
        "policy_version": update.policy_version,
        "num_groups": update.num_groups,
        "num_sessions": update.num_sessions,
        "num_tokens": update.num_tokens,
        "metrics": dump(update.metrics),
        "created_at": to_micros(update.created_at),
    }


def update_from_row(row: StoredRow) -> UpdateRecord:
    """Return a stored update."""
    return UpdateRecord(
        update_id=row.update_id,
        trainer_id=row.trainer_id,
        policy_version=row.policy_version,
        num_groups=row.num_groups,
        num_sessions=row.num_sessions,
        num_tokens=row.num_tokens,
        metrics=json.loads(row.metrics),
        created_at=from_micros(row.created_at),
    )


def _storable(text: str) -> str:
    """Return free text without what PostgreSQL refuses (a NUL) and UTF-8 cannot encode (a lone surrogate)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
