"""What a policy is compared with, and chains that its model has no positions for."""

from pathlib import Path

import peft
import pytest
import torch
from support import trainer_ledger
from support.commands import invoke
from support.experience_factory import experience
from support.migrated import new_database
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, train_policies

from trainer.features import Settings
from trainer.features.policies import make_parts
from trainer.model.model import Policy
from turnwise.features import policies
from turnwise.features.page.updates import list_updates
from turnwise.store import versions
from turnwise.store.database import Database

DPO = {"name": "dpo", "pairs": "all"}


def settings_for(directory: Path, model: Path, **changes: object) -> Settings:
    shape = {"kind": "lora", "lora_rank": 4, "lora_targets": ("q_proj", "v_proj"), "max_logprob_gap": 100.0}
    return trainer_ledger.settings_for(directory, model, **(shape | {"learning_rate": 1e-2, "seed": 3} | changes))


def start_policy(db: Database, directory: Path, model: Path) -> int:
    """Create a policy that starts from an adapter with large random values; return its number."""
    shape = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(load_model(model), peft.LoraConfig(**shape))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(directory / "adapter")
    place = ["--database", f"sqlite:///{directory / 'ledger.db'}"]
    made = invoke("policies", "create", "brought", "--adapter", str(directory / "adapter"), *place)
    assert made.exit_code == 0, made.output
    with db.read() as conn:
        brought = policies.find_policy(conn, "default", "brought")
    Rollouts(db, load_model(model), policy_id=brought.policy_id, version=brought.base_version).play("a", num_groups=6)
    Rollouts(db, load_model(model)).play("b", num_groups=6)  # the default policy's, which the trainer waits for
    return brought.policy_id


def losses(db: Database, policy_id: int) -> list[float]:
    with db.read() as conn:
        return [one.metrics["loss"] for one in reversed(list_updates(conn)[0]) if one.policy_id == policy_id]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_dpos_loss_of_a_policy_that_starts_from_an_adapter_starts_at_log_2(tmp_path, model, ledger, num_steps):
    """Policy and reference are equal before the first step: -log sigmoid(0) = log 2 for each pair.

    They stay equal over steps that are too small to change a weight, and a batch's loss is the mean of its steps.
    """
    number = start_policy(ledger, tmp_path, model)
    steps = {"num_minibatches": num_steps, "learning_rate": 1e-12}
    train_policies(settings_for(tmp_path, model, algorithm=DPO, total_batches=1, **steps))
    assert losses(ledger, number) == [pytest.approx(0.693147, abs=1e-6)]


def test_after_a_restart_the_reference_is_still_the_adapter_that_the_policy_started_from(tmp_path, model):
    """Of two batches in one process and in two, the weights are equal bit for bit; so is the KL in the loss."""
    weights = []
    for name, ends in {"once": (2,), "twice": (1, 2)}.items():
        directory = tmp_path / name
        directory.mkdir()
        db = new_database(directory / "ledger.db")
        number = start_policy(db, directory, model)
        for end in ends:
            settings = settings_for(directory, model, algorithm={"name": "grpo", "kl_coef": 0.5}, total_batches=end)
            states = train_policies(settings)
        with db.read() as conn:
            path = versions.get_version(conn, states[number].progress.policy_version).path
        weights.append(peft.load_peft_weights(path, device="cpu"))
        assert losses(db, number)[1] != losses(db, number)[0]
        db.close()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_chain_beyond_the_models_positions_is_refused_by_name(tmp_path, model, ledger):
    settings = settings_for(tmp_path, model, kind="full")
    _, learner, *_ = make_parts(settings)
    learner.load(0)
    positions = learner.policy.num_positions
    assert positions == learner.policy.config.max_position_embeddings
    learner.policy.config.max_position_embeddings = 9
    assert learner.policy.why_unfit(experience(turns=3)) is None  # 3 tokens a turn
    assert learner.policy.why_unfit(experience(turns=4)) == (
        "beyond_positions: a chain has 12 tokens, and the model 9 positions: train the model that was served, or set "
        "max_chain_tokens=9"
    )


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
    ],
)
def test_stretched_positions_count_as_far_as_they_reach(model, scaling, positions):
    policy = Policy(Settings(model=str(model), device="cpu"))
    policy.load(0)
    policy.config.max_position_embeddings = 1024
    policy.config.rope_parameters = scaling
    assert policy.num_positions == positions
