"""The core without any feature: it plays a session, stores it exactly, and continues it."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

from support.migrated import new_database
from turnwise_fake_engine import running_fake_engine

from turnwise.store.turns import read_turns
from turnwise.types import Outcome

ROOT = Path(__file__).parents[2]
SCRIPT = f"import sys; sys.path[:0] = {[str(ROOT), *(str(ROOT / path) for path in ('tests', 'extras/fake_engine'))]}"
SECONDS = 300.0


def play(store: str, engine: str, num_calls: int) -> list[str]:
    """Play calls in a process of its own, because this one has imported features; return how it refuses others."""
    program = f"{SCRIPT}; import runpy; runpy.run_module('support.core_alone', run_name='__main__')"
    argv = [sys.executable, "-c", program, store, engine, str(num_calls)]
    played = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert played.returncode == 0, played.stderr
    refused, imported = json.loads(played.stdout.splitlines()[-1])
    assert imported == []
    return refused


def test_a_proxy_without_features_plays_a_session_stores_it_exactly_and_continues_it_from_the_store(tmp_path):
    """Two calls, whole and streamed; another process continues with two more. What only features serve is refused."""
    database = new_database(tmp_path / "turnwise.db")
    store = f"sqlite:///{tmp_path / 'turnwise.db'}"
    with running_fake_engine() as engine:
        refused = [play(store, engine.url, 2) for _ in range(2)]
    assert refused[0][0].startswith("the chat call has media, and this proxy serves text alone")
    assert refused[0][1:] == [
        f"`{field}`: no such field; GET /openapi.json lists the fields." for field in ("sampling", "record", "colour")
    ]
    with database.read() as connection:
        views, _ = read_turns(connection, "default", "s")
    turns = [view.turn for view in views]
    assert [turn.outcome for turn in turns] == [Outcome.EXACT] * 4
    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    for before, after in itertools.pairwise(views):
        known = [*before.prompt_token_ids, *before.turn.token_ids]
        assert [*after.prompt_token_ids][: len(known)] == known
    assert all(len(turn.logprobs) == len(turn.token_ids) > 0 for turn in turns)
    database.close()
