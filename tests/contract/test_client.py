"""The client against a proxy over real HTTP."""

import asyncio
import dataclasses
import inspect
import subprocess
import sys
import time

import httpx2
import pytest
from support.tiny_checkpoints import write_weights

from proxy.routes.rewards import RewardLine
from proxy.routes.sessions import NewSession
from turnwise import errors
from turnwise.client import AsyncClient, AsyncSessionHandle, Client, SessionHandle, wire
from turnwise.types import Session


@pytest.fixture
def proxy(empty_proxy):
    return empty_proxy


@pytest.fixture
def client(proxy, monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_BASE_SECONDS", 0.001)
    with Client(proxy.url) as made:
        yield made


def ask(openai_client, text="hi", **kwargs):
    return openai_client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **kwargs)


def refusal(status, retry_after):
    error = {"message": "too much at once", "type": "rate_limit_error", "param": None, "code": None}
    return httpx2.Response(status, headers={"retry-after": retry_after}, json={"error": error})


def test_a_key_that_was_not_copied_whole_is_refused_before_it_is_sent(proxy):
    with pytest.raises(errors.InvalidRequest, match="ASCII"):
        Client(proxy.url, "tw-12ab…")


def test_creating_a_session_again_after_a_lost_answer_returns_the_existing_one(proxy, client, gateway):
    gateway.num_lost = 1
    session = client.create_session(task_id="t")
    assert [stored.session_id for stored in proxy.sessions()] == [session.session_id]


def test_a_reward_whose_answer_was_lost_is_written_once(proxy, client, gateway):
    """The generated idempotency key stays the same over the retries of one call."""
    session = client.create_session()
    ask(session.openai())
    gateway.num_lost = 2
    assert session.reward(1.0) == 1
    assert [(line.session_id, line.value) for line in proxy.rewards()] == [(session.session_id, 1.0)]


def test_lists_are_read_page_by_page_in_order(client, monkeypatch):
    monkeypatch.setattr(wire, "PAGE_SIZE", 2)
    made = [client.create_session().session_id for _ in range(5)]
    assert [session["session_id"] for session in client.sessions()] == made[::-1]


def test_a_turn_id_with_a_choice_number_is_escaped_in_the_url(client):
    session = client.create_session()
    turn_id = f"{ask(session.openai(), n=2).id}#1"
    assert client.turn(turn_id)["turn_id"] == turn_id


def test_a_refusal_with_retry_after_is_retried_after_that_time(client, gateway):
    """The server's value, in seconds, is the minimum time before the next attempt."""
    gateway.refusals = [refusal(429, "0.3")]
    began = time.monotonic()
    client.create_session()
    assert time.monotonic() - began >= 0.3


def test_retries_are_limited_and_the_last_refusal_is_the_error(gateway, monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_BASE_SECONDS", 0.001)
    gateway.refusals = [refusal(429, "0") for _ in range(3)]
    with Client(max_retries=2) as client, pytest.raises(errors.Overloaded, match="too much at once"):
        client.create_session()
    assert len(gateway.requests) == 3


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, None, errors.InvalidRequest),
        (401, None, errors.Unauthorized),
        (403, None, errors.Forbidden),
        (404, None, errors.NotFound),
        (409, None, errors.Conflict),
        (413, None, errors.TooLarge),
        (422, None, errors.InvalidRequest),
        (422, "bad_checkpoint", errors.BadCheckpoint),
        (429, None, errors.Overloaded),
        (503, "engine_unavailable", errors.EngineUnavailable),
        (503, "store_unavailable", errors.StoreUnavailable),
        (500, "internal_error", errors.ProxyUnavailable),
    ],
)
def test_an_answer_becomes_the_error_of_its_boundary_with_the_servers_sentence(status, code, kind):
    body = wire.json.dumps({"error": {"message": "do this", "param": "p", "code": code}}).encode()
    error = wire.error_of(status, body)
    assert type(error) is kind
    assert str(error) == "do this"


def test_the_error_for_an_unreachable_proxy_names_its_address_and_the_remedy(monkeypatch):
    monkeypatch.setattr(wire, "BACKOFF_BASE_SECONDS", 0.001)
    with Client("http://127.0.0.1:9", max_retries=1) as client:
        with pytest.raises(errors.ProxyUnavailable, match="turnwise up"):
            client.session("s")
        with pytest.raises(errors.ProxyUnavailable, match="not ready"):
            client.wait_until_ready(timeout_seconds=0.0)


def test_a_base_url_with_or_without_v1_is_the_same_proxy():
    with Client("http://host:1/v1/") as client:
        assert client.base_url == "http://host:1"


def test_an_asynchronous_client_serves_several_event_loops(proxy):
    """A connection belongs to the loop that opened it; a client created outside any loop may be used in each."""
    with Client(proxy.url) as client:
        openai_client = client.create_session().openai_async()

        async def call():
            reply = await ask(openai_client)
            await client.transport.aclose()
            return reply.choices[0].message.content

        assert [asyncio.run(call()) for _ in range(2)] == ["hi", "hi"]


async def test_the_asynchronous_client_has_the_same_methods(proxy, gateway, monkeypatch, tmp_path):
    monkeypatch.setattr(wire, "BACKOFF_BASE_SECONDS", 0.001)
    monkeypatch.setattr(wire, "PAGE_SIZE", 2)
    async with AsyncClient(proxy.url) as client:
        await client.wait_until_ready(5.0)
        session = await client.create_session(task_id="t")
        turn_ids = [(await ask(session.openai_async(step=step))).id for step in (0, 0, 1)]
        gateway.refusals = [refusal(503, "0")]
        gateway.num_lost = 1
        assert await session.reward(0.5, step=0) == 2
        assert [turn["step"] async for turn in session.turns()] == [0, 0, 1]
        assert (await client.turn(turn_ids[1]))["step"] == 0
        assert (await session.end(reason="env_done"))["termination_reason"] == "env_done"
        assert [e["turn_ids"] async for e in client.experiences()] == [[turn_id] for turn_id in turn_ids]
        assert (await client.session(session.session_id))["status"] == "ended"
        assert [s["session_id"] async for s in client.sessions()] == [session.session_id]
        weights = write_weights(tmp_path / "weights")
        version = (await client.publish_policy(str(weights)))["version"]
        assert str(weights) in [policy["path"] async for policy in client.policies()]
        assert (await client.activate(version))["version"] == version
        assert [await client.served_model() for _ in range(2)] == ["fake", "fake"]
        with pytest.raises(errors.NotFound):
            await client.session("nobody")
    assert [line.value for line in proxy.rewards()] == [0.5]


@pytest.mark.parametrize(("synchronous", "asynchronous"), [(Client, AsyncClient), (SessionHandle, AsyncSessionHandle)])
def test_both_clients_have_the_same_calls_with_the_same_arguments_and_descriptions(synchronous, asynchronous):
    """Their modules are read alone: what one of them says is true of the other."""
    alone = {"asynchronous", "close", "aclose"}

    def calls(client: type) -> dict[str, tuple[list[inspect.Parameter], str | None]]:
        named = {name: call for name, call in vars(client).items() if callable(call) and not name.startswith("_")}
        return {
            name: (list(inspect.signature(call).parameters.values()), call.__doc__)
            for name, call in named.items()
            if name not in alone
        }

    assert calls(synchronous) == calls(asynchronous)


def test_the_sdk_and_its_command_import_few_modules_and_nothing_heavy():
    """No framework, driver, torch or engine: the SDK has some 370 modules with Python's own, most of them numpy's."""
    code = """
import sys
import turnwise.client, turnwise.workflows, turnwise.workflows.trinity
num_modules = len(sys.modules)
import turnwise.commands.cli
heavy = ("fastapi", "starlette", "torch", "sqlalchemy", "vllm", "verl", "openai")
print(num_modules, [name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_modules, loaded = done.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert int(num_modules) < 500


def test_a_session_is_created_with_the_fields_that_the_route_takes():
    assert set(wire.SessionFields.__annotations__) == set(NewSession.model_fields)
    records = {field.name for field in dataclasses.fields(Session)} | {"key_may", "key_expires_seconds"}
    assert set(NewSession.model_fields) <= records | {"policy"}, "a record has the policy's number"
    assert set(wire.RewardFields.__annotations__) == set(RewardLine.model_fields) - {"session_id", "value"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_invalid_request(value):
    with Client("http://127.0.0.1:9", "key") as client, pytest.raises(errors.InvalidRequest, match="finite number"):
        client.reward(value, session_id="s")
    with Client("http://127.0.0.1:9", "key") as client, pytest.raises(errors.InvalidRequest, match="finite number"):
        client.end_session("s", reward=value)
