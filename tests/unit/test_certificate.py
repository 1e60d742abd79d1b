"""The certificate of a model."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from click.testing import CliRunner, Result
from support.tiny_checkpoints import write_weights
from support.tiny_models import make_model

from turnwise.commands.features.certify import command as certify
from turnwise.commands.features.certify.certificate import FILE, Certificate, Computed, KindResult, ingredients
from turnwise.commands.features.certify.command import why_untrained
from turnwise.commands.features.certify.engine_text import EngineText
from turnwise.commands.features.doctor import doctor
from turnwise.commands.preflight import check_trained
from turnwise.errors import BadCheckpoint, ChildFailed, ProxyUnavailable, SettingsError
from turnwise.types import PolicyKind


def stage(largest: float, mean: float = 0.0, **more: float) -> dict[str, object]:
    return {"versions": [1], "max": largest, "mean": mean, "tokens": 5, **more}


def certificate(model: Path, *kinds: KindResult) -> Certificate:
    return Certificate("Qwen3ForCausalLM", ingredients(model), list(kinds))


def overwrite_the_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    third = len(data) // 3
    data[third : 2 * third] = bytes(third)
    file.write_bytes(data)


def set_key(name: str, value: object) -> Callable[[Path], None]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {name: value})) and None


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model.safetensors", overwrite_the_middle),
        ("config.json", set_key("rope_theta", 123.0)),
        ("config.json", set_key("rms_norm_eps", 0.1)),
        ("config.json", set_key("sliding_window", 16)),
        ("config.json", set_key("architectures", ["LlamaForCausalLM"])),
        ("generation_config.json", set_key("eos_token_id", [7])),
        ("chat_template.jinja", lambda file: file.write_text("{{ messages[0] }}")),
        ("added.jinja", lambda file: file.write_text("{{ messages }}")),
    ],
)
def test_a_certificate_belongs_to_the_whole_files_of_its_model_and_names_what_changed(tmp_path, file, change):
    model = make_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "generation_config.json").write_text("{}")
    made = certificate(model, KindResult("full", {"base": stage(1e-6)}, {"rows": "shared"}))
    made.write(str(model))
    (model / "README.md").write_text("of no effect")
    assert Certificate.valid(str(model)) == (made, [])
    change(model / file)
    assert Certificate.valid(str(model)) == (None, [file])
    result = CliRunner().invoke(doctor, ["--model", str(model)])
    assert f"certificate: was made with another {file}, and says nothing any more" in result.output
    (model / FILE).unlink()
    assert Certificate.valid(str(model)) == (None, [])


def test_a_certificate_of_another_vllm_says_nothing_any_more(tmp_path):
    """Also what it refused then is tried again."""
    from trainer.features import Settings

    model = make_model(tmp_path / "model")
    made = certificate(model, KindResult("full", refused="no kernel"))
    made.made_with |= {"vllm": "0.1", "torch": "1.0"}
    made.write(str(model))
    assert Certificate.valid(str(model)) == (None, ["torch", "vllm"])
    check_trained(Settings(model=str(model)))


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (KindResult("full", {"base": stage(1e-6), "dpo": stage(9e-5)}), "right"),
        (KindResult("full", {"base": stage(1e-6), "dpo": stage(2e-4)}), "wrong"),
        (KindResult("full", {"base": stage(0.7, 0.015, noise=0.01)}, dtype="bfloat16"), "right"),
        (KindResult("full", {"base": stage(0.7, 0.025, noise=0.01)}, dtype="bfloat16"), "wrong"),
        (KindResult("full", {"base": stage(0.7, 0.015)}, dtype="bfloat16"), "wrong"),
        (KindResult("full", {"dpo": stage(0.7, 0.015, noise=0.01, slope=0.95)}, dtype="float16"), "right"),
        (KindResult("full", {"dpo": stage(0.7, 0.015, noise=0.01, slope=0.8)}, dtype="float16"), "wrong"),
        (KindResult("full", {"base": stage(1e-6), "dpo": stage(1e-6, moved=True)}), "right"),
        (KindResult("full", {"base": stage(1e-6), "dpo": stage(1e-6, moved=False)}), "wrong"),
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
        monkeypatch.setattr("trainer.model.loading.described", lambda _: {})
        monkeypatch.setattr(certify, "_play_all", play_all)
        monkeypatch.setattr(certify, "engine_dtype", lambda _: dtype)
        monkeypatch.setattr(certify, "_compare", lambda *_: (stages or {}, "1 of 1 turns extend their chain"))
        monkeypatch.setattr(EngineText, "longest", lambda *_: None)
        for text in ("_long_text", "_changed_weights"):
            monkeypatch.setattr(certify, text, lambda *_: stage(1e-6, 1e-6, noise=1e-6))
        return CliRunner().invoke(certify.certify, [str(model), "--runs-dir", str(tmp_path / "runs")])

    return run


def test_the_engine_says_by_which_limit_it_is_judged(tmp_path, run_certify):
    """On a GPU it computes in the format of the weights, whatever it would do on a CPU."""
    model = write_weights(tmp_path / "model")
    result = run_certify(model, play=lambda: None, dtype="bfloat16", stages={"base": stage(0.7, 0.07, noise=0.05)})
    assert (result.exit_code, result.exception) == (0, None)
    assert "full: right: largest gap 0.07 nats in bfloat16 (long, changed, base); chains: 1 of 1" in result.output


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
    computed = Computed(engine=[-1.0, -1.5, -0.75], exact=[-1.0] * 3)
    assert computed.gaps() == {"max": 0.5, "mean": 0.25, "tokens": 3}  # 0, 0.5 and 0.25
    assert Computed(engine=[-1.0, math.nan], exact=[-1.0] * 2).gaps()["max"] == math.inf
    assert Computed().gaps()["mean"] == math.inf


@pytest.mark.parametrize(
    ("share", "shift", "verdict"),
    [
        (1.0, 0.0, "right"),
        (0.7, 0.0, "wrong"),  # an engine that leaves out a part of an adapter
        (0.0, 0.0, "wrong"),  # one that serves the base
        (1.0, 0.08, "wrong"),  # another norm, or another rotary base
    ],
)
def test_in_16_bits_rounding_passes_and_a_part_that_is_ignored_does_not(share, shift, verdict):
    """The rounding is 0.02 nats a token, and the version changes 0.1: the former limit of 0.1 let all of these pass."""
    generator = np.random.default_rng(0)
    base = -generator.exponential(1.0, 200)
    changed, rounding, other = (generator.normal(0, scale, 200) for scale in (0.1, 0.02, 0.02))
    computed = Computed(
        engine=list(base + share * changed + rounding + shift),
        exact=list(base + changed),
        rounded=list(base + changed + other),
        base=list(base),
    )
    gaps = computed.gaps()
    assert gaps["mean"] < 0.1
    assert KindResult("lora", {"grpo": gaps}, dtype="bfloat16").verdict() == verdict


def test_a_trainer_that_refused_every_group_is_quoted_at_once(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text(
        "INFO not trained: 1 of 2 groups, older\nERROR group base-0 is not trained: its logprobs differ by 0.4\n"
    )
    assert why_untrained(log) == "the trainer trained no group: its logprobs differ by 0.4"
    log.write_text("INFO nothing\n")
    assert str(log) in why_untrained(log)


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
    model = make_model(tmp_path / "model", head_dim=32)
    (model / "tokenizer_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    whole = CliRunner().invoke(doctor, ["--model", str(model)])
    assert (whole.exit_code, whole.output.count("longest chain: about 256 tokens with ")) == (0, 2)
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
