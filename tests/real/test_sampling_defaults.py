"""Sampling parameters that a request does not set: the probe detects the engine's, and each turn stores them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from support.engines import running_engine
from turnwise_fake_engine import Script, running_fake_engine

from proxy.engines.engine import Engine
from proxy.features.engine_checks import find_sampling_defaults
from turnwise.errors import EngineUnsuitable
from turnwise.features.verify.known_tokens import logprobs_request, read_logprobs
from turnwise.processes.engine_checks import read_sampling_defaults
from turnwise.processes.installation import Severity, engine_findings
from turnwise.sampling import TOOL_GRAMMAR

GENERATION_CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 0}
EFFECTIVE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_only_parameters_that_change_the_distribution_are_read(tmp_path):
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG | {"repetition_penalty": 1.0}))
    assert read_sampling_defaults(tmp_path) == EFFECTIVE


async def defaults_of(url: str) -> dict:
    engine = Engine(url, timeout_seconds=60)
    try:
        await engine.fetch_models()
        return await find_sampling_defaults(engine)
    finally:
        await engine.close()


async def test_an_engine_without_defaults_has_neutral_ones():
    with running_fake_engine() as engine:
        assert await defaults_of(engine.url) == {}


async def test_an_engine_with_unreadable_defaults_is_unsuitable():
    """The trainer would assume temperature 1 and silently train on wrong importance ratios."""
    with running_fake_engine(Script(default_temperature=0.6)) as engine:
        with pytest.raises(EngineUnsuitable, match="--generation-config vllm"):
            await defaults_of(engine.url)
        findings = {found.check: found.verdict for found in engine_findings(engine.url)}
        assert findings["sampling defaults"] is Severity.FAIL


def test_each_turn_is_stored_with_the_parameters_that_it_was_sampled_with(start_proxy):
    """The client's own parameter wins; a null counts as unset."""
    with running_fake_engine(Script(default_temperature=0.6)) as engine:
        Path(engine.state.model_path, "generation_config.json").write_text('{"temperature": 0.6}')
        proxy = start_proxy(engine.url)
        for name, given in (("none", {}), ("null", {"temperature": None}), ("own", {"temperature": 0.9})):
            body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}], **given}
            httpx2.post(f"{proxy.session_v1(name)}/chat/completions", json=body).raise_for_status()
        stored = {view.turn.session_id: view.turn.sampling["temperature"] for view in proxy.turns()}
        assert stored == {"none": 0.6, "null": 0.6, "own": 0.9}


TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
GRAMMARS = {
    "strict": ({"tools": [TOOL, STRICT]}, True),
    "single": ({"tools": [TOOL], "parallel_tool_calls": False}, True),
    "several": ({"tools": [TOOL], "parallel_tool_calls": True}, False),
    "none": ({"tools": [STRICT], "tool_choice": "none"}, False),
    "plain": ({}, False),
}
"""Fields of a request, and whether a vLLM with its default environment samples the reply under a grammar."""


def play_grammars(url_of: Callable[[str], str]) -> None:
    for name, (fields, _) in GRAMMARS.items():
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 24, **fields}
        httpx2.post(f"{url_of(name)}/chat/completions", json=body).raise_for_status()


def test_a_grammar_that_the_request_does_not_name_is_stored_with_the_turn(start_proxy):
    """The trainer cannot compute the logprobs of tokens that a grammar constrained."""
    with running_fake_engine(Script(enforces_strict_tools=True)) as engine:
        proxy = start_proxy(engine.url)
        play_grammars(proxy.session_v1)
        stored = {view.turn.session_id: TOOL_GRAMMAR in view.turn.sampling for view in proxy.turns()}
        assert stored == {name: is_constrained for name, (_, is_constrained) in GRAMMARS.items()}


def test_a_temperature_that_vllm_raises_is_stored_as_it_was_used(start_proxy):
    with running_fake_engine() as engine:
        proxy = start_proxy(engine.url)
        body = {"messages": [{"role": "user", "content": "Hello."}], "temperature": 0.001}
        httpx2.post(f"{proxy.session_v1('low')}/chat/completions", json=body).raise_for_status()
        assert [view.turn.sampling["temperature"] for view in proxy.turns()] == [0.01]


def test_a_session_pins_only_what_affects_the_sampling_of_a_reply(start_proxy):
    """With another number of choices, or other tools, than the call names, captured replies would be mixed up."""
    with running_fake_engine() as engine:
        proxy = start_proxy(engine.url)
        for refused in ({"n": 3}, {"stream": True}, {"tools": [TOOL]}, {"chat_template": "x"}, {"vllm_xargs": {}}):
            answer = httpx2.post(f"{proxy.v1}/sessions", json={"sampling": refused})
            assert answer.status_code == 422, refused
            assert f"{next(iter(refused))} cannot be set for a whole session" in answer.json()["error"]["message"]
        httpx2.post(f"{proxy.v1}/sessions", json={"session_id": "s", "sampling": {"top_k": 7}}).raise_for_status()
        body = {"messages": [{"role": "user", "content": "Hello."}], "top_k": 3}
        httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body).raise_for_status()
        assert engine.calls[-1].body["top_k"] == 7
        assert [view.turn.sampling["top_k"] for view in proxy.turns("s")] == [7]


@pytest.mark.engine
def test_our_vllm_samples_strict_and_single_tool_calls_without_a_grammar(engine, start_proxy):
    """The stored logprobs are those of the model: the engine computes the same for the same tokens as a prompt."""
    proxy = start_proxy(engine.url)
    play_grammars(proxy.session_v1)
    views = proxy.turns()
    assert len(views) == len(GRAMMARS)
    for view in views:
        assert TOOL_GRAMMAR not in view.turn.sampling
        ids = [*view.prompt_token_ids.tolist(), *view.turn.token_ids.tolist()]
        positions = list(range(len(view.prompt_token_ids), len(ids)))
        asked = logprobs_request(engine.model, ids, positions, {})
        reply = httpx2.post(f"{engine.url}/v1/completions", json=asked).raise_for_status().json()
        assert read_logprobs(reply, ids, positions) == pytest.approx(view.turn.logprobs.tolist(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.engine
async def test_a_real_vllm_reports_the_defaults_of_its_generation_config_and_none_with_our_flags(
    small_model_dir, tmp_path
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
