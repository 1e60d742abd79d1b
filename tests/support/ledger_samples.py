"""Turns and sessions for tests: small, and with tokens that identify their turn."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from turnwise.features.page import overview
from turnwise.store import rewards, sessions
from turnwise.store.database import Database
from turnwise.store.turns import append_turns
from turnwise.types import Reward, Session, Turn, UpdateRecord


def make_turn(turn_id: str, parent: Turn | None = None, *, session_id: str = "s", **fields: Any) -> Turn:
    """Return a turn with two prompt tokens after its parent and two sampled ones.

    Turn `t7` has the prompt tokens 70, 71 and samples 72, 73 with logprobs -7.0 and -7.25.
    """
    number = int(turn_id.removeprefix("t"))
    parent_length = 0 if parent is None else parent.prompt_length + parent.token_ids.size
    turn = Turn(
        turn_id=turn_id,
        session_id=session_id,
        parent_turn_id=None if parent is None else parent.turn_id,
        chain_id=turn_id if parent is None else parent.chain_id,
        model="policy",
        messages=[{"role": "user", "content": f"question {number}"}],
        tools=[{"type": "function"}] if parent is None else None,
        response={"role": "assistant", "content": f"answer {number}"},
        prompt_delta=np.array([10 * number, 10 * number + 1], np.int32),
        prompt_length=parent_length + 2,
        token_ids=np.array([10 * number + 2, 10 * number + 3], np.int32),
        logprobs=np.array([-number, -number - 0.25], np.float32),
        finish_reason="stop",
    )
    return dataclasses.replace(turn, **fields)


def add_session(
    database: Database, session_id: str = "s", *, turns: int = 1, of_turns: Mapping[str, Any] = {}, **fields: Any
) -> Session:
    """Store a session with a chain of turns `SESSION-t1`, `SESSION-t2` and so on, after `TENANT-` for other tenants."""
    with database.write() as connection:
        session, _ = sessions.create_session(connection, Session(session_id=session_id, **fields))
        prefix = session_id if session.tenant == "default" else f"{session.tenant}-{session_id}"
        parent: Turn | None = None
        for number in range(1, turns + 1):
            of_session = {"session_id": session_id, "tenant": session.tenant, "policy_id": session.policy_id}
            turn = make_turn(f"t{number}", parent, **of_session | of_turns)
            parent_id = None if parent is None else parent.turn_id
            name = f"{prefix}-t{number}"
            chain_id = f"{prefix}-t1"
            turn = dataclasses.replace(turn, turn_id=name, parent_turn_id=parent_id, chain_id=chain_id)
            append_turns(connection, [turn])
            parent = turn
    return session


def finish(database: Database, session_id: str = "s", value: float = 1.0, tenant: str = "default") -> None:
    with database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id=session_id, tenant=tenant, value=value)])
        sessions.end_session(connection, tenant, session_id)


def sampled_by(version: int) -> dict[str, int]:
    """Return the fields of turns that a policy version has sampled."""
    return {"policy_version_first": version, "policy_version_last": version}


def add_finished(database: Database, session_id: str = "s", *, value: float = 1.0, **fields: Any) -> Session:
    """Store a session as `add_session` does, reward it and end it."""
    session = add_session(database, session_id, **fields)
    finish(database, session_id, value, session.tenant)
    return session


def update_record(update_id: int, *, policy_version: int | None = None, **fields: Any) -> UpdateRecord:
    counts = {"num_groups": 1, "num_sessions": 1, "num_tokens": 2}
    version = update_id if policy_version is None else policy_version
    return UpdateRecord(**({"trainer_id": "t", **counts} | fields), update_id=update_id, policy_version=version)


def groups_by_status(database: Database) -> dict[str, int]:
    with database.read() as connection:
        return overview.count_rows(connection).groups
