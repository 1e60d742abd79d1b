"""The plainest use: calls with the OpenAI client and a reward, without groups or settings, change the weights."""

from __future__ import annotations

from pathlib import Path

import httpx2
import openai
from support.proxies import RunningProxy, StartProxy
from support.tiny_models import make_model
from support.trainer_ledger import settings_for, train
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine
from turnwise_fake_engine.tokens import VOCABULARY_SIZE

from turnwise.store import overview, updates
from turnwise.store.database import Database

SYSTEM = {"role": "system", "content": "You are the help desk of a shop."}


def serve_user(proxy: RunningProxy, number: int, reward: float) -> str:
    """Answer a user in a session without a group, rate it, and end it; return the note on training."""
    client = openai.OpenAI(base_url=proxy.session_v1(f"user-{number}"), api_key="none", max_retries=0)
    question = {"role": "user", "content": f"Where is order {number}?"}
    client.chat.completions.create(model="fake", messages=[SYSTEM, question], max_completion_tokens=8)
    lines = {"session_id": f"user-{number}", "value": reward}
    httpx2.post(f"{proxy.v1}/rewards", json=lines).raise_for_status()
    ended = httpx2.post(f"{proxy.v1}/sessions/user-{number}/end", json={}).raise_for_status()
    return str(ended.json()["training_note"])


def test_rated_calls_without_a_group_become_a_version(
    start_proxy: StartProxy, fake_engine: RunningFakeEngine, tmp_path: Path
) -> None:
    fake_engine.answer(Rule(reply=Reply(text="It left.")))
    proxy = start_proxy(fake_engine.url, database_url=f"sqlite:///{tmp_path}/ledger.db")
    for number in range(4):
        note = serve_user(proxy, number, reward=float(number % 2))
        assert note.startswith("It is a single session and waits for the trainer")
    model = make_model(tmp_path / "model", vocab_size=VOCABULARY_SIZE, max_position_embeddings=2048)
    # The stand-in's logprobs are invented, and two sessions fill the place of a group.
    changes = {"max_logprob_gap": 1e6, "groups_per_batch": 2, "singles_per_group": 2, "total_batches": 1}
    state = train(settings_for(tmp_path, model, **changes))
    assert (state.progress.policy_version, state.progress.num_sessions) == (1, 4)
    assert sorted(row.value for row in state.singles) == [0.0, 0.0, 1.0, 1.0]
    database = Database(proxy.database_url)
    with database.read() as connection:
        assert overview.count_rows(connection).groups == {"trained": 4}
        update = updates.last_update(connection)
    database.close()
    assert update is not None
    assert (update.metrics["num_single_sessions"], update.metrics["num_uniform_groups"]) == (4, 0)
