"""Sampling parameters that a request does not set: the probe detects the engine's, and each turn stores them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx2
import pytest
from support.engines import running_engine

from proxy.engines.engine import Engine
from proxy.engines.probe import find_sampling_defaults
from turnwise.commands.doctor import Verdict, engine_findings
from turnwise.engine_requirements import read_sampling_defaults
from turnwise.errors import EngineUnsuitable
from turnwise.fake_engine import Script, running_fake_engine

GENERATION_CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 0}
EFFECTIVE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_only_parameters_that_change_the_distribution_are_read(tmp_path: Path):
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG | {"repetition_penalty": 1.0}))
    assert read_sampling_defaults(tmp_path) == EFFECTIVE


async def defaults_of(url: str) -> dict:
    """Probe an engine as the proxy does."""
    engine = Engine(url, timeout_seconds=60)
    try:
        await engine.fetch_models()
        return await find_sampling_defaults(engine)
    finally:
        engine.close()


async def test_an_engine_without_defaults_has_neutral_ones():
    with running_fake_engine() as engine:
        assert await defaults_of(engine.url) == {}


async def test_an_engine_with_unreadable_defaults_is_unsuitable():
    """The trainer would assume temperature 1 and silently train on wrong importance ratios."""
    with running_fake_engine(Script(default_temperature=0.6)) as engine:
        with pytest.raises(EngineUnsuitable, match="--generation-config vllm"):
            await defaults_of(engine.url)
        findings = {found.check: found.verdict for found in engine_findings(engine.url)}
        assert findings["sampling defaults"] is Verdict.FAIL


def test_each_turn_is_stored_with_the_parameters_that_it_was_sampled_with(start_proxy):
    """The client's own parameter wins; a null counts as unset."""
    with running_fake_engine(Script(default_temperature=0.6)) as engine:
        Path(engine.state.model_path, "generation_config.json").write_text('{"temperature": 0.6}')
        proxy = start_proxy(engine.url)
        for name, given in (("none", {}), ("null", {"temperature": None}), ("own", {"temperature": 0.9})):
            body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}], **given}
            httpx2.post(f"{proxy.session_v1(name)}/chat/completions", json=body, timeout=60).raise_for_status()
        stored = {view.turn.session_id: view.turn.sampling["temperature"] for view in proxy.turns()}
        assert stored == {"none": 0.6, "null": 0.6, "own": 0.9}


@pytest.mark.slow
@pytest.mark.engine
async def test_a_real_vllm_reports_the_defaults_of_its_generation_config_and_none_with_our_flags(
    small_model_dir: Path, tmp_path: Path
):
    model = shutil.copytree(small_model_dir, tmp_path / "small")
    (model / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    for extra, expected in ((("--generation-config", "auto"), EFFECTIVE), ((), {})):
        with running_engine(model, tmp_path / "engine.log", *extra) as engine:
            assert await defaults_of(engine.url) == expected
            if expected:
                (model / "generation_config.json").unlink()
                with pytest.raises(EngineUnsuitable, match="cannot be read"):
                    await defaults_of(engine.url)
                (model / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
