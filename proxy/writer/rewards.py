"""Reward lines for the writing process: pickled in slices, because one pickle of all would hold the event loop."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from turnwise.store import ledger
from turnwise.store.database import Connection
from turnwise.types import Reward


def add_pickled(
    connection: Connection,
    slices: Sequence[bytes],
    *,
    idempotency_key: str | None,
    body_digest: bytes,
    retrain: bool,
) -> list[int]:
    """Do what `ledger.add_rewards` does with lines that are pickled in slices."""
    lines: list[Reward] = [line for piece in slices for line in pickle.loads(piece)]  # noqa: S301  from our own process
    return ledger.add_rewards(
        connection, lines, idempotency_key=idempotency_key, body_digest=body_digest, retrain=retrain
    )
