"""Several proxies converge on one version: one drives, the others follow, and a bad version is tried once."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.control_plane import ask, policy, publish
from support.proxies import RunningProxy, running_proxy
from support.tiny_checkpoints import FACTORS, write_adapter, write_weights
from support.waiting import assert_stays, wait_until
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine
from turnwise_fake_engine.script import Fault, FaultKind

from turnwise.processes.installation import strange_adapters


@pytest.fixture
def fake_engine() -> Iterator[RunningFakeEngine]:
    with running_fake_engine(Script(lora=True)) as running:
        yield running


@pytest.fixture
def two_proxies(fake_engine: RunningFakeEngine, tmp_path: Path) -> Iterator[list[RunningProxy]]:
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with (
        running_proxy(fake_engine.url, url, tmp_path) as first,
        running_proxy(fake_engine.url, url, tmp_path) as second,
    ):
        yield [first, second]


def status(proxy: RunningProxy, version: int) -> str:
    return policy(proxy, version)["status"]


def served(proxy: RunningProxy) -> int | None:
    return ask(proxy.url, "/readyz")["policy_version"]


def test_one_of_two_proxies_drives_and_the_other_follows(two_proxies, fake_engine, tmp_path):
    """Each version is loaded once; both proxies then store it with their turns, weights and adapters alike."""
    paths = [str(write_weights(tmp_path / f"v{number}")) for number in range(3)]
    for number, path in enumerate(paths):
        version = publish(two_proxies[number % 2], Path(path))
        wait_until(lambda version=version: status(two_proxies[0], version) == "active", "it is served")
        wait_until(lambda version=version: [served(p) for p in two_proxies] == [version] * 2, "both serve it")
    assert fake_engine.state.reloads == paths
    version = publish(two_proxies[0], write_adapter(tmp_path / "adapter"), kind="lora")
    wait_until(lambda: [served(p) for p in two_proxies] == [version] * 2, "both serve the adapter")
    for number, proxy in enumerate(two_proxies):
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
        reply = ask(proxy.url, f"/sessions/s{number}/v1/chat/completions", body)
        assert reply["model"] == "fake"
        assert fake_engine.calls[-1].body["model"].startswith(f"policy-v{version}-")
    assert {view.turn.policy_version_first for view in two_proxies[0].turns()} == {version}


def test_two_databases_with_a_policy_of_the_same_name_each_sample_with_their_own_adapter(fake_engine, tmp_path):
    """The engine knew the other one's adapter under the name of the version, so it was not loaded; doctor names it."""
    paths = {}
    with contextlib.ExitStack() as running:
        for name in ("first", "second"):
            url = f"sqlite:///{tmp_path}/{name}.db"
            proxy = running.enter_context(running_proxy(fake_engine.url, url, tmp_path))
            paths[name] = write_adapter(
                tmp_path / name, FACTORS | {"layer.lora_A.weight": np.full((1, 1), len(paths) + 1.0)}
            )
            version = publish(proxy, paths[name], kind="lora")
            wait_until(lambda proxy=proxy, version=version: status(proxy, version) == "active", "it is served")
            body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
            assert ask(proxy.url, "/v1/chat/completions", body)["model"] == "fake"
            sampled = fake_engine.calls[-1].body["model"]
            assert fake_engine.state.adapters[sampled] == str(paths[name])
            assert [model["id"] for model in ask(proxy.url, "/v1/models")["data"]] == ["fake"]
        (found,) = strange_adapters([fake_engine.url], url)
        other, own = fake_engine.state.adapters
        assert (other in found.text, own in found.text) == (True, False)


def test_no_published_version_has_the_number_of_an_engines_own_model_that_has_sampled(proxy, tmp_path):
    """The fake engine's model has no weights here, so the ledger has no version 0 of its own."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
    ask(proxy.url, "/v1/chat/completions", body)
    assert publish(proxy, write_weights(tmp_path / "v1")) == 1
    wait_until(lambda: served(proxy) == 1, "it is served")
    ask(proxy.url, "/v1/chat/completions", body)
    assert sorted(view.turn.policy_version_first for view in proxy.turns()) == [0, 1]


def test_a_call_that_is_aborted_before_its_first_token_has_the_served_version(proxy, fake_engine, tmp_path):
    """`turnwise verify` reports a turn whose last version is below its first one."""
    for number in range(2):
        publish(proxy, write_weights(tmp_path / f"v{number}"))
    wait_until(lambda: served(proxy) == 1, "it is served")
    fake_engine.calls.clear()
    fake_engine.fail_next(Fault(kind=FaultKind.HANG))
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "Hello."}]})
    client = http.client.HTTPConnection(proxy.url.removeprefix("http://"))
    client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    wait_until(lambda: fake_engine.calls, "the engine has the call")
    client.close()
    (view,) = wait_until(proxy.turns, "the call is stored")
    assert view.turn.outcome == "aborted"
    assert (view.turn.policy_version_first, view.turn.policy_version_last) == (1, 1)


def test_a_pinned_version_that_fails_is_tried_once_and_again_on_request(proxy, fake_engine, tmp_path):
    """While the pinned version cannot be served, the active one stays; a new activation after its repair serves it."""
    paths = [write_weights(tmp_path / f"v{number}") for number in range(3)]
    for path in paths:
        version = publish(proxy, path)
        wait_until(lambda version=version: status(proxy, version) == "active", "it is served")
    weights = paths[1] / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    ask(proxy.url, "/v1/policies/1/activate", {})
    wait_until(lambda: status(proxy, 1) == "failed", "it has failed")
    loads = len(fake_engine.state.reloads)
    assert_stays(
        lambda: (status(proxy, 2), len(fake_engine.state.reloads)) == ("active", loads),
        "the version is not tried again",
    )
    weights.write_bytes(whole)
    ask(proxy.url, "/v1/policies/1/activate", {})
    wait_until(lambda: status(proxy, 1) == "active", "it is served")
    assert fake_engine.state.reloads[-1] == str(paths[1])


def test_an_adapter_after_whole_weights_is_served_on_its_own_base_model(proxy, fake_engine, tmp_path):
    """The engine loads its original model before it serves the adapter; later whole weights are loaded again."""
    weights = write_weights(tmp_path / "weights")
    versions = [publish(proxy, write_weights(tmp_path / "first")), publish(proxy, weights)]
    wait_until(lambda: status(proxy, versions[1]) == "active", "the weights are served")
    adapter = publish(proxy, write_adapter(tmp_path / "adapter"), kind="lora")
    wait_until(lambda: status(proxy, adapter) == "active", "the adapter is served")
    assert fake_engine.state.weights_path == fake_engine.state.model_path
    ask(proxy.url, f"/v1/policies/{versions[1]}/activate", {})
    wait_until(lambda: status(proxy, versions[1]) == "active", "the weights are served again")
    assert fake_engine.state.weights_path == str(weights)


def test_a_proxy_refuses_an_engine_of_another_model_than_its_database_belongs_to(tmp_path):
    """Its sessions would be continued with token ids that mean something else; `--engine-check warn` allows it."""
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with running_fake_engine() as engine:
        model = Path(engine.state.model_path)
        (model / "model.safetensors").write_bytes(b"one")
        with running_proxy(engine.url, url, tmp_path) as proxy:
            assert policy(proxy, 0)["path"] == str(model)
        with running_proxy(engine.url, url, tmp_path):
            pass
        (model / "model.safetensors").write_bytes(b"two")
        with (
            pytest.raises(pytest.fail.Exception, match=f"the database belongs to the model '{model}'"),
            running_proxy(engine.url, url, tmp_path),
        ):
            pass
        with running_proxy(engine.url, url, tmp_path, "--engine-check", "warn") as proxy:
            assert "the database belongs to the model" in proxy.log.read_text()
