"""The certificate of a model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.tiny_checkpoints import write_weights

from turnwise.commands.certify import FILE, Certificate, KindResult, gaps_of
from turnwise.commands.preflight import check_trained
from turnwise.errors import SettingsError
from turnwise.types import PolicyKind
from turnwise.verify.records import Verification
from turnwise.version_directory import base_version


def stage(largest: float, mean: float = 0.0) -> dict[str, object]:
    return {"versions": [1], "max": largest, "mean": mean, "tokens": 5}


def certificate(model: Path, dtype: str, *kinds: KindResult) -> Certificate:
    digest = str(base_version(str(model)).model_digest)
    return Certificate(digest, "Qwen3ForCausalLM", dtype, {"torch": "2.13.0"}, list(kinds))


def test_a_certificate_is_read_as_it_was_written_and_belongs_to_these_weights(tmp_path: Path):
    model = write_weights(tmp_path / "model")
    made = certificate(model, "float32", KindResult("full", {"base": stage(1e-6)}, {"rows": "shared"}))
    made.write(str(model))
    assert Certificate.read(str(model)) == made
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert Certificate.read(str(model)) is None
    (model / FILE).unlink()
    assert Certificate.read(str(model)) is None


@pytest.mark.parametrize(
    ("dtype", "result", "verdict"),
    [
        ("float32", KindResult("full", {"base": stage(1e-6), "dpo": stage(9e-5)}), "right"),
        ("float32", KindResult("full", {"base": stage(1e-6), "dpo": stage(2e-4)}), "wrong"),
        ("bfloat16", KindResult("full", {"base": stage(0.7, 0.07)}), "right"),
        ("bfloat16", KindResult("full", {"base": stage(0.7, 0.2)}), "wrong"),
        ("float32", KindResult("full", {"base": stage(1e-6)}, refused="no kernel"), "refused"),
        ("float32", KindResult("full"), "wrong"),
    ],
)
def test_what_the_certificate_says_decides_whether_a_kind_is_trained(tmp_path, dtype, result, verdict):
    """Numbers of bfloat16 differ by rounding, and a router may choose other experts: their mean counts."""
    model = write_weights(tmp_path / "model")
    made = certificate(model, dtype, result)
    assert result.verdict(dtype) == verdict
    made.check(PolicyKind.LORA)  # it says nothing of adapters
    if verdict == "right":
        made.check(PolicyKind.FULL)
        return
    with pytest.raises(SettingsError, match=rf"says that kind='full' is {verdict}: .*run `turnwise certify` again"):
        made.check(PolicyKind.FULL)


def test_every_difference_counts_and_one_that_is_no_number_is_infinite():
    report = Verification()
    for now in (-1.0, -1.5, -0.75):
        report.compare_logprobs(-1.0, now, math.inf, "place", "source")
    assert gaps_of(report) == {"max": 0.5, "mean": 0.25, "tokens": 3}  # 0, 0.5 and 0.25
    report.compare_logprobs(-1.0, math.nan, math.inf, "place", "source")
    assert gaps_of(report)["max"] == math.inf
    assert gaps_of(Verification())["mean"] == math.inf


def test_up_refuses_a_model_whose_certificate_says_that_it_went_wrong(tmp_path: Path):
    from trainer.settings import TrainerSettings

    model = write_weights(tmp_path / "model")
    certificate(model, "float32", KindResult("full", refused="version 1: the probe differs")).write(str(model))
    with pytest.raises(SettingsError, match="refused: version 1: the probe differs"):
        check_trained(TrainerSettings(model=str(model)))
    assert json.loads((model / FILE).read_text())["kinds"][0]["kind"] == "full"
