"""Measure the storage of a session: `python bench/storage.py [--url URL]`.

Stores sessions of 100 turns as the proxy does and compares the growth of the database with their new data: 12 bytes per
token (4 for each id, 4 for the logprob of each sampled token, rounded up) and the bytes of the new messages, at 4
characters per token. The table also has the storage that whole prompts would need.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid

import numpy as np
import sqlalchemy as sa

from turnwise.store import sessions, turns
from turnwise.store.database import Database
from turnwise.types import Session, Turn

LIMIT = 2.2
"""Maximum number of stored bytes per byte of new data."""
BYTES_PER_TOKEN = 12
CHARACTERS_PER_TOKEN = 4
SESSIONS = 20
"""Large enough that half-filled pages do not matter."""
LENGTHS = ((32, 32), (100, 100), (100, 400), (1000, 200))
"""Tokens of a new message and of its reply."""


def play(database: Database, num_turns: int, asked: int, sampled: int) -> dict[str, int]:
    """Store one session; return the bytes of its new data and of its whole prompts."""
    session_id = f"session-{uuid.uuid4().hex}"
    question = {"role": "user", "content": ("word" * asked)[: asked * CHARACTERS_PER_TOKEN]}
    answer = {"role": "assistant", "content": ("text" * sampled)[: sampled * CHARACTERS_PER_TOKEN]}
    text = len(json.dumps(question)) + len(json.dumps(answer))
    new = (asked + sampled) * BYTES_PER_TOKEN + text
    parent: Turn | None = None
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id=session_id))
        for number in range(num_turns):
            turn_id = f"chatcmpl-{uuid.uuid4().hex}"
            parent = Turn(
                turn_id=turn_id,
                session_id=session_id,
                parent_turn_id=parent.turn_id if parent else None,
                chain_id=parent.chain_id if parent else turn_id,
                model="Qwen/Qwen3-4B",
                messages=[question],
                sampling={"temperature": 1.0, "max_completion_tokens": 512},
                response=answer,
                prompt_delta=np.arange(asked, dtype=np.int32),
                prompt_length=number * (asked + sampled) + asked,
                token_ids=np.arange(sampled, dtype=np.int32),
                logprobs=np.full(sampled, -1.5, np.float32),
                finish_reason="stop",
                ttft_seconds=0.1,
                duration_seconds=1.0,
                history_digest=uuid.uuid4().bytes[:8],
                messages_digest=uuid.uuid4().bytes[:8],
                dialogue_digest=uuid.uuid4().bytes[:8],
            )
            turns.append_turns(connection, [parent])
    return {"new": num_turns * new, "whole": new * num_turns * (num_turns + 1) // 2}


def stored_bytes(database: Database) -> int:
    """Return the size of the tables and indexes."""
    with database.read() as connection:
        if database.dialect == "postgresql":
            return int(connection.execute(sa.text("SELECT pg_database_size(current_database())")).scalar_one())
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (connection.execute(sa.text(f"PRAGMA {name}")).scalar_one() for name in names)
        return int((pages - free) * size)


def main() -> int:
    """Print a line per length of a turn; return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="database; by default a SQLite file in a temporary directory")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    given = parser.parse_args()
    over = 0
    print(f"{'tokens a turn':>16}{'new':>12}{'stored':>12}{'ratio':>8}{'every prompt whole':>22}   bytes a session")
    with tempfile.TemporaryDirectory() as directory:
        database = Database(given.url or f"sqlite:///{directory}/bench.db")
        database.upgrade()
        for asked, sampled in LENGTHS:
            before = stored_bytes(database)
            costs = [play(database, given.turns, asked, sampled) for _ in range(given.sessions)]
            stored = (stored_bytes(database) - before) // given.sessions
            new, whole = costs[0]["new"], costs[0]["whole"]
            over += stored > LIMIT * new
            tokens = f"{asked} + {sampled}"
            print(f"{tokens:>16}{new:>12,}{stored:>12,}{stored / new:>8.2f}{whole:>15,} {whole / new:>5.1f}×")
        database.close()
    print(f"the limit of {LIMIT} is {f'passed {over} times' if over else 'kept'}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
