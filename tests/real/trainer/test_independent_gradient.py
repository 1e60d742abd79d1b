"""The trainer's gradient beside that in float64 of code that shares none of its own (`support.float64_gradient`)."""

import pytest
import torch
from support import trainer_ledger
from support.float64_gradient import NUM_GROUPS, TOLERANCE, Recipe, apart, blur, by_token, cispo, dpo, grpo, gspo, sft
from support.migrated import new_database
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts

pytestmark = pytest.mark.usefixtures("one_thread")

PROCESSED = {"temperature": 0.8, "top_k": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.3}
CISPO = {"algorithm": {"name": "cispo", "clip_high": 0.1}}
GSPO = {"algorithm": {"name": "gspo", "clip_low": 0.02, "clip_high": 0.02}}
LORA = {"kind": "lora", "lora_rank": 4}
RECIPES = {
    "grpo": Recipe({"algorithm": "grpo"}, by_token(grpo)),
    "gspo": Recipe(GSPO, gspo),
    "cispo": Recipe(CISPO, by_token(cispo)),
    "dpo": Recipe({"algorithm": "dpo"}, dpo, is_plain=True),
    "sft": Recipe({"algorithm": {"name": "sft"}}, sft, is_plain=True),
    "gamma_steps": Recipe({"algorithm": "grpo"}, by_token(grpo), gamma=0.7),
    "supports_and_penalties": Recipe({"algorithm": "grpo"}, by_token(grpo), play="processed"),
    "sft_of_processed": Recipe({"algorithm": {"name": "sft"}}, sft, play="processed", is_plain=True),
    "lora": Recipe({"algorithm": "grpo"}, by_token(grpo), lora=LORA),
    "two_minibatches": Recipe({"algorithm": "grpo"}, by_token(grpo), num_minibatches=2),
    "dpo_two_minibatches": Recipe({"algorithm": "dpo"}, dpo, is_plain=True, num_minibatches=2),
}
COMPACTED = {
    "grpo_of_summaries": Recipe({"algorithm": "grpo"}, by_token(grpo), play="compacted"),
    "gamma_steps_of_summaries": Recipe({"algorithm": "grpo"}, by_token(grpo), play="compacted", gamma=0.9),
    "gspo_of_summaries": Recipe(GSPO, gspo, play="compacted"),
    "dpo_of_summaries": Recipe({"algorithm": "dpo"}, dpo, play="compacted", is_plain=True),
}
"""Sessions with two summaries, in branches."""
TOLERANCE_OF_SUMMARIES = 1e-5


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory, model):
    """The ledgers of both kinds of sampling, played once."""
    torch.set_num_threads(1)
    found = {}
    for name, sampling in (("plain", {"temperature": 0.9}), ("processed", PROCESSED)):
        found[name] = tmp_path_factory.mktemp(name) / "ledger.db"
        database = new_database(found[name])
        Rollouts(database, load_model(model), sampling=sampling).play("a", num_groups=NUM_GROUPS)
        database.close()
        blur(found[name])
    found["compacted"] = tmp_path_factory.mktemp("compacted") / "ledger.db"
    database = new_database(found["compacted"])
    Rollouts(database, load_model(model), sampling={"temperature": 0.9}).play_compacted("a", num_groups=NUM_GROUPS)
    database.close()
    blur(found["compacted"])
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_the_published_weights_have_moved_by_the_gradient_of_the_stored_rows(tmp_path, model, ledgers, name):
    recipe = RECIPES[name]
    assert apart(recipe, tmp_path, model, ledgers[recipe.play]) < TOLERANCE


@pytest.mark.parametrize("name", COMPACTED)
def test_summaries_and_the_contexts_after_them_move_the_weights_by_the_gradient_of_their_rows(
    tmp_path, model, ledgers, name
):
    recipe = COMPACTED[name]
    assert apart(recipe, tmp_path, model, ledgers[recipe.play]) < TOLERANCE_OF_SUMMARIES


@pytest.mark.parametrize("name", RECIPES)
def test_a_factor_of_1_001_in_the_loss_is_seen(tmp_path, model, ledgers, name, monkeypatch):
    recipe = RECIPES[name]
    settings = trainer_ledger.settings_for(tmp_path, model, **recipe.settings)
    kind = type(settings.algorithm)
    right = kind.loss
    monkeypatch.setattr(kind, "loss", lambda self, tokens: 1.001 * right(self, tokens))
    assert apart(recipe, tmp_path, model, ledgers[recipe.play]) > 5 * TOLERANCE
