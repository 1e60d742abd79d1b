"""A version is estimated from sessions that did not train it before engines get it, and fails if it is worse."""

import pytest
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train

from turnwise.store import versions
from turnwise.types import PolicyStatus, Split


@pytest.mark.parametrize("is_flipped", [False, True], ids=["what is wanted", "the opposite of what is wanted"])
def test_a_version_that_certainly_earns_less_is_kept_and_not_served(tmp_path, model, ledger, is_flipped):
    Rollouts(ledger, load_model(model), num_turns=1).play("a", num_groups=40)
    held_out = Rollouts(ledger, load_model(model), split=Split.EVAL, num_turns=1, is_flipped=is_flipped)
    held_out.play("held-out", num_groups=60, seed=1)
    settings = settings_for(tmp_path, model, total_batches=1, groups_per_batch=40, estimate_sessions=240)
    state = train(settings)
    with ledger.read() as conn:
        (version, _), _ = versions.list_versions(conn)
    estimated = version.metrics["estimate"]
    assert estimated["num_sessions"] == 240
    assert estimated["versions"] == {"0": 240}
    assert state.metrics["estimate_change"] == estimated["change"]
    if is_flipped:
        assert estimated["high"] < 0
        assert version.status is PolicyStatus.FAILED
        assert version.error.startswith("refused by the publishing gate: estimated: mean reward -0.")
    else:
        assert estimated["low"] > 0
        assert version.status is PolicyStatus.PUBLISHED
        assert train(settings).metrics["estimate"] == estimated | {"seconds": state.metrics["estimate"]["seconds"]}
