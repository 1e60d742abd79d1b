"""A turn with top-k, top-p or min-p has the ids that could be sampled, in every dialect, and no client gets them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from turnwise_fake_engine import Script, running_fake_engine
from turnwise_fake_engine.sampling import truncated

from proxy.features.supports import truncates
from turnwise.engine_plugin.__main__ import write_plugin
from turnwise.engine_plugin.features.supports import FIELD
from turnwise.features.supports import SUPPORT, as_json, unpack

TOP_K = 5
SAY = {"role": "user", "content": "Hello."}
ASKED = {
    "chat": ("chat/completions", {"messages": [SAY], "top_k": TOP_K, "n": 2}),
    "completions": ("completions", {"prompt": "Hello.", "top_k": TOP_K}),
    "messages": ("messages", {"messages": [SAY], "top_k": TOP_K, "max_tokens": 20}),
    "responses": ("responses", {"input": "Hello.", "top_k": TOP_K}),
    "gemini": (
        "models/fake",
        {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}], "generationConfig": {"topK": TOP_K}},
    ),
}


@pytest.mark.parametrize("has_plugin", [True, False], ids=["with the plug-in", "by alternatives"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_stored_ids_are_those_that_could_be_sampled_and_reach_no_client(start_proxy, has_plugin, stream):
    with running_fake_engine(Script(returns_supports=has_plugin)) as engine:
        proxy = start_proxy(engine.url)
        for dialect, (path, body) in ASKED.items():
            url, sent = f"{proxy.session_v1(dialect)}/{path}", {"model": "fake", "stream": stream} | body
            if dialect == "gemini":
                url = url.replace("/v1/", "/v1beta/") + (
                    ":streamGenerateContent?alt=sse" if stream else ":generateContent"
                )
                sent = body
            shown = httpx2.post(url, json=sent).raise_for_status().text
            assert FIELD not in shown, dialect
            assert "token_id:" not in shown, dialect
            views = proxy.turns(dialect)
            assert len(views) == body.get("n", 1)
            for view in views:
                turn = view.turn
                expected = [
                    sorted(each for each, value in truncated(token, 1.0, TOP_K).items() if value > -9999)
                    for token in turn.token_ids.tolist()
                ]
                assert as_json(unpack(turn.parts[SUPPORT])) == expected, dialect
    calls = engine.state.calls[-len(ASKED) :]
    by_alternatives = [bool(call.body.get("return_tokens_as_token_ids")) for call in calls]
    # The first reply of an engine with the plug-in shows that it needs no alternatives.
    assert by_alternatives == [True, *[not has_plugin] * (len(ASKED) - 1)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_gets_the_alternatives_that_it_asked_for_by_their_texts(start_proxy, stream):
    asked = {"model": "fake", "messages": [SAY], "logprobs": True, "top_logprobs": 2, "top_k": TOP_K, "stream": stream}
    shown = []
    for script in (Script(returns_supports=True), Script()):
        with running_fake_engine(script) as engine:
            proxy, name = start_proxy(engine.url), f"s{script.returns_supports}"
            text = httpx2.post(f"{proxy.session_v1(name)}/chat/completions", json=asked).text
            shown.append(entries(text))
            [view] = proxy.turns(name)
            # Texts do not name ids: without the plug-in nothing is known.
            assert (SUPPORT in view.turn.parts) == script.returns_supports
            [call] = [call.body for call in engine.state.calls if call.body.get("top_logprobs") == 2]
            assert call["vllm_xargs"] == {FIELD: TOP_K + 8}
    assert shown[0] == shown[1]
    assert {len(entry["top_logprobs"]) for entry in shown[0]} == {2}


def entries(text: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.removeprefix("data: ").startswith("{")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]


def test_a_token_with_more_possible_ids_than_were_returned_is_stored_as_unknown(start_proxy):
    """Twenty-one ids are possible without top-k; min-p leaves all of them here."""
    with running_fake_engine(Script(max_logprobs=10)) as engine:
        proxy = start_proxy(engine.url)
        body = {"model": "fake", "messages": [SAY], "min_p": 0.0001}
        httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body).raise_for_status()
        [view] = proxy.turns("s")
    assert view.turn.outcome == "exact"
    assert SUPPORT not in view.turn.parts


def test_a_call_that_leaves_nothing_out_asks_for_nothing_and_stores_nothing(start_proxy):
    with running_fake_engine(Script(returns_supports=True)) as engine:
        proxy = start_proxy(engine.url)
        body = {"model": "fake", "messages": [SAY], "top_p": 1.0, "top_k": -1, "min_p": 0}
        httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body).raise_for_status()
        [view] = proxy.turns("s")
    assert SUPPORT not in view.turn.parts
    assert "vllm_xargs" not in engine.state.calls[-1].body


def test_the_text_of_a_number_is_the_number_for_the_engine_and_for_what_is_stored(start_proxy):
    with running_fake_engine(Script(returns_supports=True)) as engine:
        proxy = start_proxy(engine.url)
        body = {"model": "fake", "messages": [SAY], "temperature": "1", "top_k": str(TOP_K)}
        httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body).raise_for_status()
        [view] = proxy.turns("s")
        httpx2.post(f"{proxy.url}/v1/sessions/s/end").raise_for_status()
    assert (view.turn.sampling["temperature"], view.turn.sampling["top_k"]) == (1.0, TOP_K)
    assert engine.state.calls[-1].body["top_k"] == TOP_K
    assert SUPPORT in view.turn.parts


@pytest.mark.parametrize(
    ("sampling", "defaults", "expected"),
    [
        ({}, {}, False),
        ({"top_p": 0.9}, {}, True),
        ({"top_p": 0.9, "temperature": 0}, {}, False),
        ({"top_p": None, "top_k": 0}, {"top_p": 0.95}, True),
        ({"top_p": 1}, {"top_p": 0.95}, False),
        ({"top_k": -1, "min_p": 0.0}, {}, False),
        ({"min_p": 0.01}, {"temperature": 0.0}, False),
        ({"top_p": "0.5"}, {}, False),
    ],
)
def test_a_call_truncates_by_its_own_parameters_and_by_the_engines_defaults(sampling, defaults, expected):
    assert truncates(sampling, defaults) is expected


def test_the_plugin_that_is_copied_to_another_vllm_needs_no_other_module_of_ours(tmp_path):
    write_plugin(tmp_path)
    needed = "from turnwise.engine_plugin.features import cpu_kernels as a, images as b; print(a.__file__, b.__file__)"
    alone = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", needed]
    ran = subprocess.run(command, check=True, env=alone, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert [Path(each).parents[2] for each in ran.stdout.split()] == [tmp_path / "turnwise"] * 2
