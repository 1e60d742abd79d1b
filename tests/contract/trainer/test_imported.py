"""Imported conversations are trained by SFT and DPO, and left alone by every other loss."""

import json
from pathlib import Path

import pytest
import torch
from support import trainer_ledger
from support.commands import invoke
from support.tiny_models import load_model, logprobs_of, make_model
from support.trainer_ledger import settings_for
from turnwise_fake_engine import tokens

from turnwise.store import claims
from turnwise.store.database import Database

PROMPT = [{"role": "user", "content": "Say it."}]
GOOD, BAD = "yes", "no!"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = make_model(tmp_path_factory.mktemp("model"), vocab_size=tokens.VOCABULARY_SIZE)
    config = (directory / "config.json").read_text()
    tokens.write_tokenizer(directory)
    (directory / "config.json").write_text(config)
    return directory


def import_lines(tmp_path: Path, model: Path, lines: list[dict]) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["import", str(tmp_path / "lines.jsonl"), "--format", "openai", "--tokenizer", str(model)]
    result = invoke(*command, "--database", f"sqlite:///{tmp_path / 'ledger.db'}")
    assert result.exit_code == 0, result.output


def train(tmp_path: Path, model: Path, **changes: object) -> dict:
    settings = settings_for(tmp_path, model, total_batches=1, groups_per_batch=4, reuse_epochs=4, **changes)
    return trainer_ledger.train(settings).metrics


def logprob(directory: Path, reply: str) -> float:
    prompt, ids = tokens.encode(tokens.render(PROMPT, None)), tokens.encode(f"{reply}<|im_end|>")
    return float(logprobs_of(load_model(directory), prompt + ids)[-len(ids) :].sum())


def newest(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "policies").glob("*1")
    return path


def test_sft_makes_imported_replies_more_probable(tmp_path, model):
    """4 replies of 4 tokens in 4 passes: 16 trained tokens a pass, none of which an engine could be compared with."""
    import_lines(tmp_path, model, [{"messages": [*PROMPT, {"role": "assistant", "content": GOOD}]}] * 4)
    metrics = train(tmp_path, model, algorithm="sft")
    assert (metrics["num_sessions"], metrics["num_groups"]) == (4, 4)
    assert metrics["tokens"] == 4 * 4 * 4
    assert metrics["logprob_gap"] is None
    assert logprob(newest(tmp_path), GOOD) > logprob(model, GOOD) + 1.0


def test_dpo_prefers_the_imported_preferred_output(tmp_path, model):
    outputs = {
        "preferred_output": [{"role": "assistant", "content": GOOD}],
        "non_preferred_output": [{"role": "assistant", "content": BAD}],
    }
    import_lines(tmp_path, model, [{"input": {"messages": PROMPT}, **outputs}] * 4)
    metrics = train(tmp_path, model, algorithm="dpo")
    assert metrics["num_sessions"] == 8
    before = logprob(model, GOOD) - logprob(model, BAD)
    assert logprob(newest(tmp_path), GOOD) - logprob(newest(tmp_path), BAD) > before + 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": "reinforce"},
        {"algorithm": {"name": "dpo", "reference": "behaviour"}},
    ],
)
def test_a_trainer_with_a_loss_over_behaviour_logprobs_claims_no_imports(changes, tmp_path, model):
    assert settings_for(tmp_path, model, **changes).algorithm.needs_behaviour
    import_lines(tmp_path, model, [{"messages": [*PROMPT, {"role": "assistant", "content": GOOD}]}])
    database = Database(f"sqlite:///{tmp_path / 'ledger.db'}")
    with database.read() as conn:
        assert (claims.num_claimable(conn), claims.num_claimable(conn, with_imported=True)) == ((0, 0), (1, 0))
    database.close()
