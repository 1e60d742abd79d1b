"""A refused batch leaves the policy as it was, and sessions of another model stop no version."""

from __future__ import annotations

import dataclasses
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import load_file
from support.experts import write_experts
from support.trainer_ledger import (
    VOCABULARY,
    Rollouts,
    load_model,
    new_ledger,
    settings_for,
    store_imported,
    train,
)

from turnwise.errors import BatchRefused
from turnwise.store import ledger as ledger_of
from turnwise.store import queries, tables
from turnwise.types import Reward, Session, Split

GAE = {"estimator": "gae", "critic_learning_rate": 1e-2}


class RefusingLoss:
    """A policy gradient that refuses one row; each optimizer step of the test has one row."""

    def __init__(self, refused: int) -> None:
        self._refused = refused
        self._num_rows = 0

    def loss(self, tokens, _rule):
        self._num_rows += 1
        if self._num_rows == self._refused:
            raise BatchRefused(f"the loss refuses row {self._refused}")
        return -tokens.logprobs * tokens.advantages


NO_STATE = {"checkpoint_every": 3}


@pytest.mark.parametrize(
    ("first_row", "extra"),
    [
        pytest.param(1, {}, id="new optimizer-policy"),
        pytest.param(3, GAE, id="later batch-critic"),
        pytest.param(3, NO_STATE, id="later batch-no state on disk"),
        pytest.param(1, GAE, id="new optimizer-critic", marks=pytest.mark.slow),
        pytest.param(1, NO_STATE, id="new optimizer-no state on disk", marks=pytest.mark.slow),
        pytest.param(3, {}, id="later batch-policy", marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_is_refused_after_an_optimizer_step_leaves_weights_and_optimizers_as_they_were(
    tmp_path, model, monkeypatch, first_row, extra
):
    """Each batch has two steps. It makes no difference whether the first or the second one is refused."""
    torch.set_num_threads(1)
    results = []
    for refused in (first_row, first_row + 1):
        directory = tmp_path / str(refused)
        directory.mkdir()
        database = new_ledger(directory / "ledger.db")
        Rollouts(database, load_model(model)).play("a", num_groups=9)
        monkeypatch.setitem(sys.modules, "refusing", SimpleNamespace(loss=RefusingLoss(refused).loss))
        settings = {"algorithm": "custom", "custom_loss": "refusing:loss", "row_tokens": 1000, "total_batches": 3}
        train(settings_for(directory, model, num_minibatches=2, max_logprob_gap=9.0, **settings | extra))
        with database.read() as conn:
            reasons = [record.metrics.get("refused") for record in reversed(queries.updates(conn)[0])]
            assert reasons == [
                f"the loss refuses row {refused}" if 2 * n < refused <= 2 * n + 2 else None for n in range(3)
            ]
            assert queries.counts(conn).groups == {"dropped": 3, "trained": 6}
        database.close()
        results.append(load_file(directory / "policies" / "v000002" / "model.safetensors"))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_group_with_tokens_of_another_model_is_dropped_and_the_others_are_trained(tmp_path, model, ledger):
    """The forward pass would end in an IndexError, and so would that of each restart."""
    rollouts = Rollouts(ledger, load_model(model))
    rollouts.play("own", num_groups=2)
    store_imported(ledger, "other", [VOCABULARY + 7], {1.0: [3], 0.0: [4]})
    train(settings_for(tmp_path, model, total_batches=1, algorithm="sft", sft_min_reward=-1.0))
    with ledger.read() as conn:
        found = conn.execute(sa.select(tables.groups.c.group_id, tables.groups.c.reason)).all()
    reasons = {row.group_id: row.reason for row in found}
    assert reasons["other"].startswith(f"other_model: token {VOCABULARY + 7} is not in the vocabulary of {VOCABULARY}")
    assert (reasons["own-0"], reasons["own-1"]) == (None, None)


def test_the_publishing_gate_leaves_out_sessions_that_were_routed_in_another_model(tmp_path, ledger, caplog):
    """One of five held-out sessions has routing of one layer, and the model has two."""
    experts = write_experts(tmp_path / "experts", num_experts=4)
    Rollouts(ledger, load_model(experts)).play("a", num_groups=3)
    Rollouts(ledger, load_model(experts), num_turns=1, split=Split.EVAL).play("held-out", num_groups=1)
    with ledger.write() as conn:
        (view,), _ = queries.turns(conn, "default", "held-out-0-0")
        routing = io.BytesIO()
        np.save(routing, np.zeros((9, 1, 2), np.int16))
        other = {"turn_id": "other-t0", "chain_id": "other-t0", "session_id": "other"}
        turn = dataclasses.replace(view.turn, **other, routed_experts=routing.getvalue())
        ledger_of.create_session(conn, Session(session_id="other", split=Split.EVAL))
        ledger_of.append_turns(conn, [turn])
        ledger_of.add_rewards(conn, [Reward(session_id="other", value=1.0)])
        ledger_of.end_session(conn, "default", "other")
    gate = {"gate_sessions": 64, "gate_good_reward": -1.0, "gate_drop": 9.0}
    state = train(settings_for(tmp_path, experts, total_batches=1, learning_rate=1e-4, **gate))
    assert state.progress.policy_version == 1
    assert state.metrics["gate_num_good"] == 4
    assert "leaves out 1 of 5 chains" in caplog.text
