"""Measure the ledger's write throughput in turns: `python bench/store.py [--url URL]`.

One writer appends turns of 600 tokens (400 prompt, 200 sampled, 2 KB of messages) in batches, each batch one durable
transaction, as the proxy's group commit does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid

import numpy as np

from turnwise.store import ledger
from turnwise.store.database import Database
from turnwise.types import Session, Turn

PROMPT_TOKENS, SAMPLED_TOKENS = 400, 200
MESSAGE = {"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 35}


def turn(session_id: str, parent: Turn | None) -> Turn:
    """Return the next turn of a session."""
    turn_id = f"chatcmpl-{uuid.uuid4().hex}"
    return Turn(
        turn_id=turn_id,
        session_id=session_id,
        parent_turn_id=parent.turn_id if parent else None,
        chain_id=parent.chain_id if parent else turn_id,
        model="bench",
        messages=[MESSAGE],
        sampling={"temperature": 1.0, "max_tokens": 512},
        response={"role": "assistant", "content": MESSAGE["content"][:500]},
        prompt_delta=np.arange(PROMPT_TOKENS, dtype=np.int32),
        prompt_length=PROMPT_TOKENS,
        token_ids=np.arange(SAMPLED_TOKENS, dtype=np.int32),
        logprobs=np.full(SAMPLED_TOKENS, -1.5, np.float32),
        finish_reason="stop",
        history_digest=uuid.uuid4().bytes,
        messages_digest=uuid.uuid4().bytes,
        dialogue_digest=uuid.uuid4().bytes,
    )


def measure(database: Database, num_turns: int, batch_size: int) -> float:
    """Return turns per second; each turn of a batch belongs to another session."""
    ids = [f"bench-{uuid.uuid4().hex}" for _ in range(batch_size)]
    with database.write() as connection:
        for session_id in ids:
            ledger.create_session(connection, Session(session_id=session_id))
    tips: dict[str, Turn | None] = dict.fromkeys(ids)
    spent = 0.0
    for _ in range(num_turns // batch_size):
        batch = [turn(session_id, tips[session_id]) for session_id in ids]
        tips = {one.session_id: one for one in batch}
        started = time.perf_counter()
        with database.write() as connection:
            ledger.append_turns(connection, batch)
        spent += time.perf_counter() - started
    return num_turns // batch_size * batch_size / spent


def main() -> None:
    """Print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="database; by default a SQLite file in a temporary directory")
    parser.add_argument("--turns", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        database = Database(options.url or f"sqlite:///{directory}/bench.db")
        database.upgrade()
        for batch_size in (1, 8, 32, 128):
            num_turns = max(batch_size, options.turns // (10 if batch_size == 1 else 1))
            rate = measure(database, num_turns, batch_size)
            print(f"{database.dialect:>10}  batch {batch_size:>3}  {rate:>9,.0f} turns/s  {num_turns} turns")
        database.close()


if __name__ == "__main__":
    main()
