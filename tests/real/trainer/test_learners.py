import contextlib
import sqlite3

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import trainer_ledger
from support.migrated import new_database
from support.tiny_models import load_model, logprobs_of
from support.trainer_ledger import Rollouts

from trainer.features import Settings
from trainer.main import run
from trainer.model.agent import Schedule
from trainer.workflows import OnPolicyWorkflow
from turnwise.errors import SettingsError
from turnwise.store import experiences
from turnwise.store.selection import SessionFilter


def settings_for(tmp_path, model, **changes):
    defaults = {"groups_per_batch": 8, "num_minibatches": 2, "total_batches": 1, "learning_rate": 5e-3}
    return trainer_ledger.settings_for(tmp_path, model, **(defaults | changes))


@pytest.fixture(scope="module")
def played(tmp_path_factory, model):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("played") / "ledger.db"
    db = new_database(path)
    Rollouts(db, load_model(model)).play("a", num_groups=8)
    db.close()
    return path


def train(tmp_path, model, played, **changes):
    with (
        contextlib.closing(sqlite3.connect(played)) as source,
        contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as copy,
    ):
        source.backup(copy)
    return trainer_ledger.train(settings_for(tmp_path, model, **changes))


def preference(tmp_path, before, after):
    """Return how much more probable the tokens of better sessions became than those of worse ones of their group."""
    db = new_database(tmp_path / "ledger.db")
    with db.read() as conn:
        found = list(experiences.experiences(conn, SessionFilter(), experiences.PER_CHAIN))
    db.close()
    gained = 0.0
    for group_id in {experience.group_id for experience in found}:
        group = [experience for experience in found if experience.group_id == group_id]
        mean = np.mean([experience.reward for experience in group])
        gained += sum((e.reward - mean) * (logprob(after, e) - logprob(before, e)) for e in group)
    return gained


def logprob(policy_model, experience):
    found = logprobs_of(policy_model, experience.tokens.tolist())
    return float(found[torch.from_numpy(experience.loss_mask[1:])].sum())


LEARNERS = [
    {"name": "grpo"},
    {"name": "rloo"},
    {"name": "dr_grpo", "session_tokens": 8},
    {"name": "reinforce_plus_plus"},
    {"name": "reinforce_plus_plus_baseline"},
    {"name": "grpo", "aggregation": "session_mean", "correction": "tis"},
    {"name": "gspo"},
    {"name": "cispo"},
    {"name": "masked_is"},
    {"name": "dppo"},
    {"name": "grpo", "kl_coef": 0.01, "entropy_coef": 0.001},
    {"name": "sft", "min_reward": 0.6},
    {"name": "dpo"},
    {"name": "dpo", "reference": "behaviour", "pairs": "all"},
    {"name": "sapo", "correction": "tis"},
    {"name": "topr"},
    {"name": "gdpo"},
    {"name": "grpo", "kl_coef": 0.01, "kl_in": "reward"},
    {"name": "reinforce", "correction": "sequence_mis", "off_policy_mask": 0.5},
]


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: "-".join(map(str, learner.values())))
def test_one_batch_moves_probability_to_the_better_sessions(tmp_path, model, played, learner):
    state = train(tmp_path, model, played, algorithm=learner)
    assert state.progress.num_optimizer_steps == 2
    assert preference(tmp_path, load_model(model), load_model(tmp_path / "policies" / "v000001")) > 0.5


@pytest.mark.parametrize("learner", [{"name": "sft", "min_reward": 0.6}, {"name": "dpo"}], ids=lambda one: one["name"])
def test_sessions_that_left_one_id_at_each_token_are_imitated(tmp_path, model, learner):
    """At top-k 1 the sampled id has the logprob 0 among the ids that were left, whatever the weights are."""
    db = new_database(tmp_path / "ledger.db")
    Rollouts(db, load_model(model), sampling={"top_k": 1}, num_turns=3).play("a", num_groups=8)
    db.close()
    trainer_ledger.train(settings_for(tmp_path, model, algorithm=learner))
    before, after = (
        load_file(directory / "model.safetensors") for directory in (model, tmp_path / "policies" / "v000001")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_lora_publishes_an_adapter_and_does_not_change_the_base(tmp_path, model, played):
    """The adapter on the base gives the logprobs of the probe, and training resumes from its state."""
    from peft import PeftModel

    train(tmp_path, model, played, kind="lora", lora_rank=4, algorithm={"kl_coef": 0.01})
    directory = tmp_path / "policies" / "v000001"
    names = set(load_file(directory / "adapter_model.safetensors"))
    assert names
    assert all("lora_" in name for name in names)
    assert preference(tmp_path, load_model(model), PeftModel.from_pretrained(load_model(model), directory)) > 0.1
    workflow = OnPolicyWorkflow.build_from_config(
        settings_for(tmp_path, model, kind="lora", lora_rank=4), enable_jit=False
    )
    resumed = workflow.setup(0)
    workflow.close()
    assert resumed.progress.policy_version == 1
    saved = {name: value for name, value in resumed.policy.trained_state().items() if "lora_B" in name}
    assert all(value.abs().sum() > 0 for value in saved.values())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 2 warm-up steps from 1/3 up, then 4 of 6 steps: constant; down to 0 in a line; half a cosine.
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_schedules_give_the_numbers_worked_by_hand(schedule, expected):
    settings = Settings(
        model="m", schedule=schedule, num_warmup_updates=2, total_batches=3, num_minibatches=2, learning_rate=1.0
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    found = Schedule(optimizer, settings)
    rates = []
    for update in range(len(expected)):
        found.set(update, update / 2)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected, abs=1e-6)


def test_a_schedule_ends_at_0_with_the_last_batch_whatever_steps_the_batches_took():
    """Of four batches the second takes one step of two, and the third none: in halves 1, 7/8, 6/8, then 2/8 and 1/8.

    A resumed run has the same counts, and so the same rate.
    """
    settings = Settings(model="m", schedule="linear", total_batches=4, num_minibatches=2, learning_rate=1.0)
    found = Schedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), settings)
    at = [(0, 0), (1, 0.5), (2, 1), (3, 3), (4, 3.5), (5, 4)]
    assert [found.factor(*counts) for counts in at] == [1, 7 / 8, 6 / 8, 2 / 8, 1 / 8, 0]


@pytest.mark.parametrize(
    ("num_parameters", "given", "rate"),
    [
        (29_999_999, {}, 3e-4),
        (30_000_000, {}, 1e-5),
        (299_999_999, {"kind": "lora"}, 1e-4),
        (300_000_000, {}, 1e-6),
        (300_000_000, {"kind": "lora"}, 1e-5),
        (300_000_000, {"kind": "lora", "learning_rate": 3e-5}, 3e-5),
        (0, {}, 1e-6),
    ],
)
def test_the_default_learning_rate_follows_size_and_kind_of_the_model(
    tmp_path, monkeypatch, num_parameters, given, rate
):
    monkeypatch.setattr("trainer.settings.num_parameters", lambda _directory: num_parameters)
    assert Settings(model=str(tmp_path), **given).learning_rate == pytest.approx(rate)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"multi_devices": True, "optimizer_state": "host"},
            "multi_devices=true shards float32 weights and moments",
        ),
        (
            {"multi_devices": True, "weights_dtype": "bfloat16"},
            "multi_devices=true shards float32 weights and moments",
        ),
        ({"optimizer_state": "8bit"}, "needs the package 'bitsandbytes', which is not installed"),
        ({"schedule": "cosine"}, "needs total_batches"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_at_the_start(changes, message):
    with pytest.raises(SettingsError, match=message):
        run(Settings(model="m", **changes))
