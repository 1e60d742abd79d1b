"""Real vLLMs that a file names: each serves the proxy's version or is refused, and none of its calls is lost."""

import contextlib
import json
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI
from support.checkpoints import forward_of, with_probe, write_perturbed
from support.control_plane import ask, metric, publish, wait_for_status
from support.engines import RunningEngine, running_engine
from support.proxies import RunningProxy, running_proxy
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.engine]

TOLERANCE = 1e-3
NUM_TOKENS = 400


def num_calls(proxy: RunningProxy, engine: RunningEngine) -> float:
    return metric(proxy, "turnwise_engine_head_seconds_count", engine=engine.url)


def listed(proxy: RunningProxy) -> list[dict]:
    """Return the engines as the proxy reports them, also while none of them serves."""
    return httpx2.get(f"{proxy.url}/readyz").json()["engines"]


def label(engine: RunningEngine) -> str:
    return str(ask(engine.url, "/weight_info")["weight_version"])


def load_by_hand(engine: RunningEngine, path: Path) -> None:
    """Replace an engine's weights, not their label, as somebody does who knows of no proxy."""
    ask(engine.url, "/pause?mode=keep", {})
    ask(engine.url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
    ask(engine.url, "/resume", {})


@pytest.mark.usefixtures("base_weights")
def test_a_vllm_that_joins_serves_the_version_and_one_that_leaves_ends_its_calls_and_a_wrong_one_gets_none(
    engine, tmp_path
):
    """Versions are checked against `transformers` itself; one of the engines runs all the time."""
    first, second = (write_perturbed(engine.model_dir, tmp_path / f"v{number}", number) for number in (1, 2))
    forward = forward_of(with_probe(first, forward_of(first)))
    named = tmp_path / "engines.json"

    def name(*engines: RunningEngine) -> None:
        named.with_suffix(".new").write_text(json.dumps([each.url for each in engines]))
        named.with_suffix(".new").replace(named)

    def wait_ready(proxy: RunningProxy, *engines: RunningEngine) -> None:
        wanted = {each.url: 1 for each in engines}
        wait_until(
            lambda: {each["url"]: each["policy_version"] for each in listed(proxy) if each["ready"]} == wanted,
            f"{wanted} serve",
        )

    def call(url: str, **more: object):
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield from client.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": "Which city?"}],
                stream=True,
                extra_body={"ignore_eos": True},
                **more,
            )

    def gap(engine: RunningEngine) -> float:
        ids = list(range(40, 72))
        asked = {"model": "small", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        (choice,) = ask(engine.url, "/v1/completions", asked)["choices"]
        theirs = [next(iter(each.values()))["logprob"] for each in choice["prompt_logprobs"][1:]]
        return max(abs(one - two) for one, two in zip(forward(ids, 1).tolist(), theirs, strict=True))

    name(engine)
    with contextlib.ExitStack() as running:
        flags = ("--engines", f"file://{named}", "--holdout-share", "0")
        proxy = running.enter_context(running_proxy(None, f"sqlite:///{tmp_path}/turnwise.db", tmp_path, *flags))
        wait_for_status(proxy, 0)
        wait_for_status(proxy, publish(proxy, first))
        with running_engine(engine.model_dir, tmp_path / "joins.log") as other:
            name(engine, other)
            wait_ready(proxy, engine, other)
            assert (label(other), gap(other) < TOLERANCE) == ("1", True)

            name(other)
            wait_ready(proxy, other)
            reply = call(proxy.session_v1("leaving"), max_completion_tokens=NUM_TOKENS)
            next(reply)
            name(engine)
            wait_ready(proxy, engine)
            before = num_calls(proxy, other)
            for number in range(8):
                list(call(proxy.session_v1(f"s{number}"), max_completion_tokens=4))
            assert [each.choices[0].finish_reason for each in reply][-1] == "length"
            assert num_calls(proxy, other) == before
            (view,) = proxy.turns("leaving")
            assert (len(view.turn.token_ids), view.turn.policy_version_last) == (NUM_TOKENS, 1)
            prompt, sampled = view.prompt_token_ids.tolist(), view.turn.token_ids.tolist()
            assert forward(prompt + sampled, len(prompt)).tolist() == pytest.approx(
                view.turn.logprobs.tolist(), abs=TOLERANCE
            )

            load_by_hand(other, second)
            assert (label(other), gap(other) < TOLERANCE) == ("1", False)
            name(engine, other)
            wait_ready(proxy, engine, other)
            assert (label(other), gap(other) < TOLERANCE) == ("1", True)
            assert "from the checkpoint's own probe" in proxy.log.read_text()
        wait_ready(proxy, engine)

        with running_engine(engine.model_dir, tmp_path / "other.log", "--served-model-name", "other") as wrong:
            name(engine, wrong)
            wait_until(
                lambda: (
                    f"the engine at {wrong.url} has model 'other', and the one at {engine.url} 'small'"
                    in str([each["error"] for each in ask(proxy.url, "/readyz")["engines"]])
                ),
                "it is refused by name",
            )
            for number in range(8):
                list(call(proxy.session_v1(f"t{number}"), max_completion_tokens=4))
            assert num_calls(proxy, wrong) == 0
            assert proxy.log.read_text().count("has model 'other'") == 1, "a problem is said once"
        assert {view.turn.policy_version_first for view in proxy.turns()} == {1}
