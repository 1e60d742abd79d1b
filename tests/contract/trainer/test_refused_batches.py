"""Sessions of another model, and those that may not be trained, stop no version."""

import contextlib
import dataclasses
import io

import numpy as np
import pytest
import sqlalchemy as sa
from support.tiny_models import EXPERTS, VOCABULARY, load_model, make_model
from support.trainer_ledger import Rollouts, settings_for, store_imported, train

from trainer.claims.claims import Claims
from trainer.features.gap import Verdicts
from trainer.features.memory import OUT_OF_MEMORY, check_fitting
from turnwise.errors import SettingsError
from turnwise.features import consent, retention
from turnwise.features.experts import EXPERTS as ROUTING
from turnwise.features.lineage import versions as lineage
from turnwise.store import rewards, schema, sessions, turns
from turnwise.types import Reward, Session, Split


@pytest.mark.parametrize(("num_trained", "num_large", "stops"), [(23, 9, False), (3, 29, True), (0, 9, False)])
def test_groups_that_do_not_fit_stop_a_training_only_where_they_are_nearly_all_of_ten_or_more(
    num_trained, num_large, stops
):
    """29 of 32 groups are more than 0.9 of them; 9 of 32 are few, also where they are the last of the batch."""
    reasons = [f"{OUT_OF_MEMORY}: a row"] * num_large
    with pytest.raises(SettingsError, match=r"29 of the last 32 groups") if stops else contextlib.nullcontext():
        check_fitting(Verdicts(), num_trained, reasons, (OUT_OF_MEMORY,))


@pytest.mark.parametrize("is_first", [False, True], ids=["behind the others", "first of its batch"])
def test_a_group_with_tokens_of_another_model_is_dropped_and_the_others_are_trained(tmp_path, model, ledger, is_first):
    """The forward pass would end in an IndexError, and so would that of each restart."""
    rollouts = Rollouts(ledger, load_model(model))
    if not is_first:
        rollouts.play("own", num_groups=2)
    store_imported(ledger, "other", [VOCABULARY + 7], {1.0: [3], 0.0: [4]})
    if is_first:
        rollouts.play("own", num_groups=2)
    train(settings_for(tmp_path, model, total_batches=1, algorithm={"name": "sft", "min_reward": -1.0}))
    with ledger.read() as conn:
        found = conn.execute(sa.select(schema.groups.c.group_id, schema.groups.c.reason)).all()
    reasons = {row.group_id: row.reason for row in found}
    assert reasons["other"].startswith(f"other_model: token {VOCABULARY + 7} is not in the vocabulary of {VOCABULARY}")
    assert (reasons["own-0"], reasons["own-1"]) == (None, None)


def test_the_publishing_gate_leaves_out_sessions_that_were_routed_in_another_model(tmp_path, ledger, caplog):
    """One of five held-out sessions has routing of one layer, and the model has two."""
    experts = make_model(tmp_path / "experts", "Qwen3Moe", **EXPERTS)
    Rollouts(ledger, load_model(experts)).play("a", num_groups=3)
    Rollouts(ledger, load_model(experts), num_turns=1, split=Split.EVAL).play("held-out", num_groups=1)
    with ledger.write() as conn:
        (view,), _ = turns.read_turns(conn, "default", "held-out-0-0")
        routing = io.BytesIO()
        np.save(routing, np.zeros((9, 1, 2), np.int16))
        other = {"turn_id": "other-t0", "chain_id": "other-t0", "session_id": "other"}
        turn = dataclasses.replace(view.turn, **other, parts={ROUTING: routing.getvalue()})
        sessions.create_session(conn, Session(session_id="other", split=Split.EVAL))
        turns.append_turns(conn, [turn])
        rewards.add_rewards(conn, [Reward(session_id="other", value=1.0)])
        sessions.end_session(conn, "default", "other")
    gate = {"gate_sessions": 64, "gate_good_reward": -1.0, "gate_drop": 9.0}
    state = train(settings_for(tmp_path, experts, total_batches=1, learning_rate=1e-4, **gate))
    assert state.progress.policy_version == 1
    assert state.metrics["gate_num_good"] == 4
    assert "leaves out 1 of 5 chains" in caplog.text


def test_what_is_marked_or_deleted_between_the_claim_and_the_batch_is_not_trained_and_the_rest_of_its_batch_is(
    tmp_path, model, ledger, monkeypatch
):
    """One session of one group, and all four of another, are marked once the trainer has read them; one is deleted."""
    Rollouts(ledger, load_model(model)).play("g", num_groups=3)
    denied = {"g-0-1", *(f"g-1-{run}" for run in range(4))}
    read = Claims._experiences

    def read_and_mark(claims, claim):
        found = read(claims, claim)
        with ledger.write() as conn:
            for session_id in denied:
                consent.restrict_session(conn, "default", session_id, f"{session_id}~", True)
            retention.delete_session(conn, "default", "g-2-3")
        return found

    monkeypatch.setattr(Claims, "_experiences", read_and_mark)
    train(settings_for(tmp_path, model, total_batches=1))
    with ledger.read() as conn:
        joined = sa.select(schema.sessions.c.session_id).join(schema.trained_sessions)
        trained = set(conn.execute(joined).scalars())
        found = conn.execute(sa.select(schema.groups.c.group_id, schema.groups.c.status)).all()
        status = {row.group_id: row.status for row in found}
        num_trained = conn.execute(sa.select(lineage.version_lineages.c.num_sessions)).scalar_one()
    assert trained == {f"g-{group}-{run}" for group in (0, 2) for run in range(4)} - denied - {"g-2-3"}
    assert num_trained == len(trained)
    assert status == {"g-0": "trained", "g-1": "dropped", "g-2": "trained"}
