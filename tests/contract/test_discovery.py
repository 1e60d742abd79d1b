"""Engines that join and leave while the proxy serves: each gets calls once it is proven, and no call is lost."""

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from support.in_process import served
from support.migrated import migrated
from support.tiny_checkpoints import write_weights
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import running_fake_engine
from turnwise_fake_engine.script import Reply, Rule, Script

from proxy import features
from proxy.engines.engine import Engine
from proxy.features.discovery import fleet
from proxy.features.discovery.sources import reader
from turnwise.commands.cli import main
from turnwise.errors import SettingsError


@pytest.fixture
def named(tmp_path):
    """Names engines in a file, as whoever starts them would."""
    path = tmp_path / "engines.json"

    def name(*engines):
        path.with_suffix(".new").write_text(json.dumps([each.url for each in engines]))
        path.with_suffix(".new").replace(path)

    name.path = path
    return name


@contextlib.contextmanager
def proxy_of(source, tmp_path, monkeypatch, **settings):
    from support.warm_writers import fork_writers

    monkeypatch.setattr(fleet, "WATCH_SECONDS", 0.05)
    fork_writers()
    url = migrated(f"sqlite:///{tmp_path}/turnwise.db")
    given = features.Settings(engines=source, database=url, **settings)
    with served(given, routes=features.ROUTES, features=features.served()) as http:
        yield http


@contextlib.contextmanager
def engines(number, **script):
    with contextlib.ExitStack() as running:
        yield [running.enter_context(running_fake_engine(Script(**script))) for _ in range(number)]


def ask(http, session, text="hi"):
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
    return http.post(f"/sessions/{session}/v1/chat/completions", json=body)


def reports(http):
    return {each["url"]: each for each in http.get("/readyz").json()["engines"]}


def wait_ready(http, *expected):
    urls = {each.url for each in expected}
    wait_until(
        lambda: {url for url, each in reports(http).items() if each["ready"]} == urls,
        f"{urls} serve",
    )


def publish(http, path, version):
    http.post("/v1/policies", json={"path": str(path), "version": version}).raise_for_status()


def served_versions(http):
    return {each["policy_version"] for each in http.get("/readyz").json()["engines"] if each["ready"]}


def metric(http, name):
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in http.get("/metrics").text.splitlines() if line.startswith(name)
    )


def up_gauges(http):
    lines = [each for each in http.get("/metrics").text.splitlines() if each.startswith("turnwise_engine_up{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_engines_join_leave_and_come_back_under_calls_and_none_fails(named, tmp_path, monkeypatch):
    with engines(3) as (one, two, three):
        named(one)
        with proxy_of(f"file://{named.path}", tmp_path, monkeypatch) as http:
            wait_ready(http, one)
            stop, statuses = threading.Event(), []

            def call(worker):
                number = 0
                while not stop.is_set():
                    number += 1
                    statuses.append(ask(http, f"s{worker}-{number % 7}").status_code)

            with ThreadPoolExecutor(3) as pool:
                running = [pool.submit(call, worker) for worker in range(3)]
                try:
                    for now in ((one, two, three), (two, three), (three,), (one, three), (one, two)):
                        named(*now)
                        wait_ready(http, *now)
                        before = len(statuses)
                        wait_until(lambda: len(statuses) > before + 6, "calls go on")  # noqa: B023
                finally:
                    stop.set()
                [each.result() for each in running]
            assert set(statuses) == {200}
            assert all(each.calls for each in (one, two, three))
            assert metric(http, 'turnwise_engine_changes_total{change="joined"}') == 5
            assert metric(http, 'turnwise_engine_changes_total{change="left"}') == 3
            wait_until(
                lambda: up_gauges(http) == {one.url: 1, two.url: 1},
                "only engines that are named have a gauge: neither the default address nor those that left",
            )
            named(one, three)
            wait_until(lambda: up_gauges(http) == {one.url: 1, three.url: 1}, "one that comes back has it again")


def test_an_engine_that_leaves_finishes_its_call_and_gets_no_other(named, tmp_path, monkeypatch):
    with engines(2) as (leaving, staying):
        leaving.answer(Rule(contains="slow", reply=Reply(text="a long reply " * 8, pace_seconds=0.05)))
        named(leaving)
        with proxy_of(f"file://{named.path}", tmp_path, monkeypatch) as http, ThreadPoolExecutor(1) as pool:
            wait_ready(http, leaving)
            reply = pool.submit(ask, http, "slow", "slow please")
            wait_until(lambda: any("slow" in json.dumps(call.body) for call in leaving.calls), "the call runs")
            named(staying)
            wait_ready(http, staying)
            assert ask(http, "other").status_code == 200
            assert len([call for call in leaving.calls if "hi" in json.dumps(call.body)]) == 0
            assert reply.result().json()["choices"][0]["message"]["content"] == "a long reply " * 8


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ({"model": "another"}, "has model 'another'"),
        ({"default_temperature": 0.5}, "has defaults {'temperature': 0.5}"),
        ({}, "both say that they have version 0, and differ by 1 nats"),
    ],
)
def test_an_engine_of_another_model_defaults_or_weights_is_refused_by_name(
    named, tmp_path, monkeypatch, caplog, script, problem
):
    with engines(1) as (right,), engines(1, **script) as (wrong,):
        if "default_temperature" in script:
            (Path(wrong.state.model_path) / "generation_config.json").write_text('{"temperature": 0.5}')
        if not script:
            wrong.state.script.logprob_shifts[Path(wrong.state.weights_path).name] = 1.0
        named(right)
        with proxy_of(f"file://{named.path}", tmp_path, monkeypatch) as http:
            wait_ready(http, right)
            named(right, wrong)
            wait_until(lambda: (reports(http).get(wrong.url) or {}).get("error"), "the engine is refused")
            assert problem in reports(http)[wrong.url]["error"]
            assert {ask(http, f"s{number}").status_code for number in range(8)} == {200}
            assert not any("hi" in json.dumps(call.body) for call in wrong.calls)
            num_checks = len(wrong.calls)
            wait_until(lambda: len(wrong.calls) >= num_checks + 4, "it is checked again")
            assert (caplog.text.count(problem), metric(http, "turnwise_background_errors_total")) == (1, 0)


def test_a_list_that_names_no_engines_keeps_the_last_good_one_and_is_counted(named, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", fleet.__name__)
    with engines(1) as (one,):
        named(one)
        with proxy_of(f"file://{named.path}", tmp_path, monkeypatch) as http:
            wait_ready(http, one)
            for text, said in (
                ("[", "it is no JSON: "),
                ("[]", "names 0 engines"),
                ('["ftp://nowhere"]', "'ftp://nowhere', which is no URL of an engine"),
                ('{"engines": 3}', 'it is no JSON list of URLs, such as ["http://10.0.0.1:8000"]'),
                ('[{"name": "x"}]', "{'name': 'x'} has no 'url'"),
                ("x" * (2**20 + 1), "more than 1048576 bytes"),
            ):
                failures = metric(http, "turnwise_engine_source_failures_total")
                named.path.write_text(text)
                wait_until(
                    lambda: metric(http, "turnwise_engine_source_failures_total") > failures + 1,  # noqa: B023
                    f"{text[:20]!r} is counted",
                )
                assert ask(http, "s").status_code == 200
                problem = http.get("/readyz").json()["engines_error"]
                assert said in problem
                assert "the last list of engines is kept" in problem
            named.path.unlink()
            wait_until(lambda: "No such file" in caplog.text, "a file that is gone is said")
            assert ask(http, "s").status_code == 200
            named(one)
            wait_until(lambda: http.get("/readyz").json()["engines_error"] is None, "the file is read again")
            assert "is read again and names 1 engines" in caplog.text
    assert caplog.text.count("names 0 engines") == 1, "a problem is said once, however often it is found"


def test_calls_wait_for_the_first_engine_of_a_source_that_names_none_yet(named, tmp_path, monkeypatch):
    source, waits = f"file://{named.path}", {"engine_wait_seconds": 300.0}
    with (
        engines(1) as (one,),
        ThreadPoolExecutor(1) as pool,
        proxy_of(source, tmp_path, monkeypatch, **waits) as http,
    ):
        reply = pool.submit(ask, http, "early")
        wait_until(lambda: metric(http, "turnwise_engine_source_failures_total") > 2, "the source was read")
        assert http.get("/readyz").json()["engines_error"].endswith("): it has named none yet")
        named(one)
        assert reply.result().status_code == 200


def test_weights_are_loaded_into_all_engines_at_the_same_time_when_they_join_and_when_a_version_comes(
    named, tmp_path, monkeypatch
):
    """Each load waits for those of all others; a new version is loaded into one engine alone before."""
    loading, labels, together = [], set(), [1]

    async def load(self, path, *, seconds):
        loading.append(self.url)
        while len(loading) not in {1, *together}:  # noqa: ASYNC110  a deadline ends the wait
            await asyncio.sleep(0.01)
        await load_weights(self, path, seconds=seconds)

    async def read(self):
        labels.add(self.url)
        while len(labels) not in together:  # noqa: ASYNC110  the same
            await asyncio.sleep(0.01)
        await read_label(self)

    with engines(5) as (first, *others):
        named(first)
        with proxy_of(f"file://{named.path}", tmp_path, monkeypatch, reload_timeout_seconds=WAIT_SECONDS) as http:
            wait_ready(http, first)
            load_weights, read_label = Engine.load_weights, Engine.read_label
            monkeypatch.setattr(Engine, "load_weights", load)
            publish(http, write_weights(tmp_path / "v1"), 1)
            wait_until(lambda: served_versions(http) == {1}, "version 1 is served")
            loading.clear()
            together[:] = [4, 5]
            loading.append("nobody is first where a version is served already")
            named(first, *others)
            wait_ready(http, first, *others)
            assert {each.state.reloads[-1] for each in (first, *others)} == {str(tmp_path / "v1")}

            loading.clear()
            together[:] = [5]
            monkeypatch.setattr(Engine, "read_label", read)
            publish(http, write_weights(tmp_path / "v2"), 2)
            wait_until(lambda: served_versions(http) == {2}, "version 2 is served")
            assert len(set(loading)) == 5


@pytest.mark.parametrize("is_listed_too", [False, True])
def test_the_doctor_checks_the_engines_that_a_source_names(named, tmp_path, monkeypatch, is_listed_too):
    monkeypatch.setenv("TURNWISE_PROXY_ENGINES", f"file://{named.path}")
    database = migrated(f"sqlite:///{tmp_path}/turnwise.db")

    def examined():
        result = CliRunner().invoke(main, ["doctor", "--database", database, "--json"])
        return [each["text"] for each in json.loads(result.output) if each["check"].startswith("engine")]

    with engines(2) as (one, two):
        listed = [two.url] if is_listed_too else []
        if is_listed_too:
            monkeypatch.setenv("TURNWISE_PROXY_ENGINE", json.dumps(listed))
        named(one)
        found = [f"{url} serves 'fake'" for url in (*listed, one.url)]
        assert [text for text in examined() if "serves" in text] == found
        named.path.unlink()
        problem, *rest = examined()
        assert "No such file" in problem
        assert problem.endswith("; a running proxy keeps the last list that it read")
        assert [text for text in rest if "serves" in text] == [f"{url} serves 'fake'" for url in listed]


def test_the_page_examines_the_engines_that_a_source_names(named, tmp_path, monkeypatch):
    with engines(1) as (one,):
        named(one)
        with proxy_of(f"file://{named.path}", tmp_path, monkeypatch) as http:
            wait_ready(http, one)
            found = [each for each in http.get("/v1/doctor").json()["data"] if each["check"] == "engine"]
    assert [(each["verdict"], each["text"]) for each in found] == [("ok", f"{one.url} serves 'fake'")]


def test_dns_names_all_addresses_of_a_host(monkeypatch):
    async def read():
        loop = asyncio.get_running_loop()

        async def lookup(host, port, **_):
            assert (host, port) == ("engines.ns.svc", 8000)
            return [
                (None, None, None, "", (address, port)) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")
            ]

        monkeypatch.setattr(loop, "getaddrinfo", lookup)
        return await reader("dns://engines.ns.svc:8000")()

    assert asyncio.run(read()) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]


@pytest.mark.parametrize("status", [200, 503])
def test_dynamo_names_the_system_urls_of_its_workers(status):
    class Listener(BaseHTTPRequestHandler):
        def do_GET(self):
            found = (
                {"workers": [{"instance_id": 7, "system_url": "http://10.0.0.7:9090/"}]}
                if self.path == "/v1/rl/workers"
                else {}
            )
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        read = reader(f"dynamo+http://127.0.0.1:{server.server_port}")
        if status == 200:
            assert asyncio.run(read()) == ["http://10.0.0.7:9090"]
        else:
            with pytest.raises(SettingsError, match="answers 503"):
                asyncio.run(read())
        server.shutdown()


@pytest.mark.parametrize("source", ["engines.json", "dns://engines", "http://engine:8000", "file://", "dynamo+http://"])
def test_a_source_that_names_nothing_is_refused(source):
    with pytest.raises(ValidationError, match="names no engines"):
        features.Settings(engines=source)
