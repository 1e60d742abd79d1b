"""A real vLLM says which ids could be sampled, and over these the model's own logits give the stored logprobs."""

import httpx2
import numpy as np
import pytest
import torch
from support.engines import RunningEngine, running_engine
from support.proxies import StartProxy
from support.tiny_models import load_model

from turnwise.engine_plugin.features.supports import FIELD
from turnwise.features.supports import SUPPORT, unpack
from turnwise.store.turns import TurnView

pytestmark = pytest.mark.engine

SAMPLINGS = [
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "min_p": 0.02, "top_p": 0.97, "top_k": 40},
]
ROUTES = {
    "chat/completions": {"messages": [{"role": "user", "content": "Which city? 誰が社長ですか。"}]},
    "completions": {"prompt": "Kim's boss is"},
}
LARGEST_GAP = 1e-4
"""Nats between the engine's logprobs and those of another implementation in float32."""


@pytest.mark.parametrize("has_plugin", [True, False], ids=["with the plug-in", "by alternatives"])
def test_the_models_logits_over_the_stored_ids_give_the_stored_logprobs(engine, start_proxy, tmp_path, has_plugin):
    if has_plugin:
        run(engine, start_proxy, least_known=1.0)
        return
    environment = {"VLLM_PLUGINS": "none"}
    flags = ("--weight-transfer-config", '{"backend": "ipc"}')
    with running_engine(engine.model_dir, tmp_path / "log", *flags, environment=environment) as plain:
        run(plain, start_proxy, least_known=0.8)


def run(engine: RunningEngine, start_proxy: StartProxy, *, least_known: float) -> None:
    proxy, model = start_proxy(engine.url), load_model(engine.model_dir)
    views: list[TurnView] = []
    for number, sampling in enumerate(SAMPLINGS):
        for stream in (False, True):
            session = f"s{number}-{stream}"
            for path, body in ROUTES.items():
                asked = {"model": "small", "n": 2, "max_tokens": 48, "stream": stream, **body, **sampling}
                answer = httpx2.post(f"{proxy.session_v1(session)}/{path}", json=asked)
                assert FIELD not in answer.raise_for_status().text
                assert "token_id:" not in answer.text
            views += proxy.turns(session)
    assert len(views) == 2 * len(ROUTES) * 2 * len(SAMPLINGS)
    num_tokens = num_known = 0
    gaps = []
    for view in views:
        support = unpack(view.turn.parts[SUPPORT])
        assert len(support) == view.turn.token_ids.size
        logits = logits_of(model, view)
        for place, ids in enumerate(support):
            num_tokens += 1
            if ids is None:
                continue
            num_known += 1
            scaled = (logits[place, ids] / view.turn.sampling["temperature"]).log_softmax(-1)
            [own] = np.flatnonzero(ids == view.turn.token_ids[place])
            gaps.append(abs(float(scaled[own]) - float(view.turn.logprobs[place])))
    print(f"{num_known} of {num_tokens} tokens known, largest gap {max(gaps):.2e}")
    assert num_known >= least_known * num_tokens
    assert max(gaps) < LARGEST_GAP


def logits_of(model: torch.nn.Module, view: TurnView) -> torch.Tensor:
    """Return the logits that each sampled token was sampled by. [R, V]."""
    ids = np.concatenate([view.prompt_token_ids, view.turn.token_ids])
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    return logits[len(view.prompt_token_ids) - 1 : -1].double()


def test_a_call_without_supports_shows_its_own_alternatives_beside_one_with_many(engine):
    """In one batch all calls get as many alternatives as the one that wants most."""
    body = {"model": "small", "prompt": ["Kim's boss is"] * 4, "max_tokens": 32, "seed": 0, "logprobs": 3, "n": 2}
    url = f"{engine.url}/v1/completions"
    with httpx2.Client() as client:
        plain = client.post(url, json=body).json()
        wanted = client.post(url, json={**body, "top_p": 0.95, "vllm_xargs": {FIELD: 512}}).json()
    for reply in (plain, wanted):
        for choice in reply["choices"]:
            assert {len(top) for top in choice["logprobs"]["top_logprobs"]} <= {3, 4}
    assert all(FIELD in choice["logprobs"] for choice in wanted["choices"])
    assert all(FIELD not in choice["logprobs"] for choice in plain["choices"])
