"""The certificate of a model."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from click.testing import CliRunner, Result
from support.tiny_checkpoints import write_weights
from support.tiny_models import make_model

from turnwise.commands import certify
from turnwise.commands.certify import FILE, Certificate, KindResult, gaps_of
from turnwise.commands.preflight import check_trained
from turnwise.commands.verify import doctor
from turnwise.errors import BadCheckpoint, ChildFailed, ProxyUnavailable, SettingsError
from turnwise.types import PolicyKind
from turnwise.verify.records import Verification
from turnwise.version_directory import base_version


def stage(largest: float, mean: float = 0.0) -> dict[str, object]:
    return {"versions": [1], "max": largest, "mean": mean, "tokens": 5}


def certificate(model: Path, *kinds: KindResult) -> Certificate:
    digest = str(base_version(str(model)).model_digest)
    return Certificate(digest, "Qwen3ForCausalLM", {"torch": "2.13.0"}, list(kinds))


def test_a_certificate_is_read_as_it_was_written_and_belongs_to_these_weights(tmp_path):
    model = write_weights(tmp_path / "model")
    made = certificate(model, KindResult("full", {"base": stage(1e-6)}, {"rows": "shared"}))
    made.write(str(model))
    assert Certificate.read(str(model)) == made
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert Certificate.read(str(model)) is None
    (model / FILE).unlink()
    assert Certificate.read(str(model)) is None


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (KindResult("full", {"base": stage(1e-6), "dpo": stage(9e-5)}), "right"),
        (KindResult("full", {"base": stage(1e-6), "dpo": stage(2e-4)}), "wrong"),
        (KindResult("full", {"base": stage(0.7, 0.07)}, dtype="bfloat16"), "right"),
        (KindResult("full", {"base": stage(0.7, 0.2)}, dtype="bfloat16"), "wrong"),
        (KindResult("full", {"base": stage(0.7, 0.07)}, dtype="float16"), "right"),
        (KindResult("full", {"base": stage(0.7, 0.2)}, dtype="float16"), "wrong"),
        (KindResult("full", {"base": stage(1e-6)}, refused="no kernel"), "refused"),
        (KindResult("full"), "wrong"),
        (KindResult("full", unfinished="out of memory"), "not measured"),
        (KindResult("full", {"base": stage(1e-6)}, unfinished="out of memory"), "not measured"),
        (KindResult("full", {"base": stage(2e-4)}, unfinished="out of memory"), "wrong"),
    ],
)
def test_what_the_certificate_says_decides_whether_a_kind_is_trained(tmp_path, result, verdict):
    """Numbers of 16 bits differ by rounding, and a router may choose other experts: their mean counts."""
    model = write_weights(tmp_path / "model")
    made = certificate(model, result)
    assert result.verdict() == verdict
    made.check(PolicyKind.LORA)  # it says nothing of adapters
    if verdict in {"right", "not measured"}:
        made.check(PolicyKind.FULL)
        return
    with pytest.raises(SettingsError, match=rf"says that kind='full' is {verdict}: .*run `turnwise certify` again"):
        made.check(PolicyKind.FULL)


def test_a_certificate_of_one_dtype_for_all_kinds_is_still_read(tmp_path):
    model = write_weights(tmp_path / "model")
    path = certificate(model, KindResult("full", {"base": stage(0.7, 0.07)})).write(str(model))
    old = json.loads(path.read_text()) | {"dtype": "bfloat16"}
    for each in old["kinds"]:
        del each["dtype"], each["unfinished"]
    path.write_text(json.dumps(old))
    found = Certificate.read(str(model))
    assert [each.verdict() for each in found.kinds] == ["right"]


Certify = Callable[..., Result]


@pytest.fixture
def run_certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certify:
    """Run `turnwise certify`; `play` and `dtype` stand in for the processes, `stages` for what was compared."""

    def run(model: Path, *, play: Callable[[], None], dtype: str | None = None, stages: Any = None) -> Result:
        @contextmanager
        def stack(*_: object) -> Iterator[tuple[object, ...]]:
            yield None, None, ""

        def play_all(*_: object) -> None:
            for kind in ("full", "lora"):
                place = tmp_path / "runs" / model.name / kind
                place.mkdir(parents=True, exist_ok=True)
                (place / "store.db").touch()
            play()

        (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
        monkeypatch.setattr(certify, "_stack", stack)
        monkeypatch.setattr(certify, "_command", lambda *_: "{}")
        monkeypatch.setattr(certify, "_play_all", play_all)
        monkeypatch.setattr(certify, "engine_dtype", lambda _: dtype)
        monkeypatch.setattr(certify, "_compare", lambda _: stages or {})
        return CliRunner().invoke(certify.certify, [str(model), "--runs-dir", str(tmp_path / "runs")])

    return run


def test_the_engine_says_by_which_limit_it_is_judged(tmp_path, run_certify):
    """On a GPU it computes in the format of the weights, whatever it would do on a CPU."""
    model = write_weights(tmp_path / "model")
    result = run_certify(model, play=lambda: None, dtype="bfloat16", stages={"base": stage(0.7, 0.07)})
    assert (result.exit_code, result.exception) == (0, None)
    assert "full: right: largest gap 0.07 nats in bfloat16 (base)" in result.output


def answered(status: int, message: str) -> openai.APIStatusError:
    request = httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions")
    return openai.APIStatusError(message, response=httpx2.Response(status, request=request), body=None)


NO_ANSWER = openai.APITimeoutError(httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions"))


@pytest.mark.parametrize(
    ("error", "verdict", "text"),
    [
        (answered(400, "tools are not supported"), "refused", "tools are not supported"),
        (answered(500, "EngineDeadError: KeyError: 'qkv'"), "refused", "EngineDeadError: KeyError: 'qkv'"),
        (ChildFailed("version 1: the probe differs\nby 0.3"), "refused", "version 1: the probe differs"),
        (ChildFailed("died; its log:\n  turnwise: a mixture\n  end"), "refused", "turnwise: a mixture"),
        (RuntimeError("CUDA error: an illegal memory access"), "refused", "CUDA error: an illegal memory access"),
        (answered(503, "the engine cannot be reached"), "not measured", "the engine cannot be reached"),
        (answered(500, "EngineDeadError: CUDA out of memory"), "not measured", "EngineDeadError: CUDA out of memory"),
        (NO_ANSWER, "not measured", "Request timed out."),
        (TimeoutError("version 1 did not come within 900 s"), "not measured", "version 1 did not come within 900 s"),
        (ProxyUnavailable("not ready within 900 s"), "not measured", "not ready within 900 s"),
        (MemoryError(), "not measured", "MemoryError"),
        (ChildFailed("engine died, last with signal SIGKILL; its log:\n  x"), "not measured", "engine died, last"),
    ],
)
def test_each_kind_is_tried_and_a_cause_that_is_not_the_model_s_refuses_nothing(
    tmp_path, run_certify, error, verdict, text
):
    from trainer.features import Settings

    def play() -> None:
        raise error

    model = write_weights(tmp_path / "model")
    result = run_certify(model, play=play)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    for kind in ("full", "lora"):
        assert f"{kind}: {verdict}: {text}" in result.output
    found = Certificate.read(str(model))
    if verdict == "refused":
        with pytest.raises(SettingsError, match=text.split("'")[0]):
            check_trained(Settings(model=str(model)))
    else:
        found.check(PolicyKind.FULL)


def test_every_difference_counts_and_one_that_is_no_number_is_infinite():
    report = Verification()
    for now in (-1.0, -1.5, -0.75):
        report.compare_logprobs(-1.0, now, math.inf, "place", "source")
    assert gaps_of(report) == {"max": 0.5, "mean": 0.25, "tokens": 3}  # 0, 0.5 and 0.25
    report.compare_logprobs(-1.0, math.nan, math.inf, "place", "source")
    assert gaps_of(report)["max"] == math.inf
    assert gaps_of(Verification())["mean"] == math.inf


def test_up_refuses_a_model_whose_certificate_says_that_it_went_wrong(tmp_path):
    from trainer.features import Settings

    model = write_weights(tmp_path / "model")
    certificate(model, KindResult("full", refused="version 1: the probe differs")).write(str(model))
    with pytest.raises(SettingsError, match="refused: version 1: the probe differs"):
        check_trained(Settings(model=str(model)))
    assert json.loads((model / FILE).read_text())["kinds"][0]["kind"] == "full"


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("chat_template.jinja", "has no chat template, so no agent can call it"),
        ("model.safetensors", "is incomplete: no model.safetensors"),
        ("config.json", "is incomplete: no config.json"),
    ],
)
def test_doctor_says_what_a_model_lacks_that_up_would_refuse(tmp_path, without, words):
    model = make_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / without).unlink()
    result = CliRunner().invoke(doctor, ["--model", str(model)])
    assert result.exit_code == 1
    assert result.output.count(words) == 2  # for whole weights and for adapters


def test_certify_starts_nothing_for_a_model_without_a_chat_template(tmp_path):
    model = write_weights(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    result = CliRunner().invoke(certify.certify, [str(model), "--runs-dir", str(tmp_path / "runs")])
    assert isinstance(result.exception, BadCheckpoint)
    assert not (tmp_path / "runs").exists()
