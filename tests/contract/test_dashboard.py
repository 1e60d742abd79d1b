"""The page at `/`: the same files for everyone, which hold no data; tests/real/test_page.py has its views."""

import hashlib
import importlib.resources
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI
from support.migrated import migrated, writing
from support.proxies import ProxyAndEngine, RunningProxy, running_proxy
from turnwise_fake_engine import running_fake_engine

from proxy.features.page.turns import Characters, characters
from turnwise.store import keys
from turnwise.store.trainer_reports import TrainerState, report_status

PUBLIC = {"readyz"}
WEB = importlib.resources.files("proxy.features.page.web")
FILES = {file.name for file in WEB.iterdir() if file.name.endswith((".html", ".css", ".js"))}
VENDOR = importlib.resources.files("proxy.features.page.web").joinpath("vendor")
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
ODD = "<img src=x onerror=alert(1)> שלום 🙂"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    directory = tmp_path_factory.mktemp("keyed")
    url = migrated(f"sqlite:///{directory}/turnwise.db")
    with writing(url) as connection:
        keys.create_key(connection, "default", keys.KeyRole.ADMIN, "me")
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, url, directory) as proxy,
        httpx2.Client(base_url=proxy.url) as client,
    ):
        yield client


def test_a_trainer_that_died_is_seen_where_an_operator_looks_and_calls_are_served_meanwhile(tmp_path):
    url = migrated(f"sqlite:///{tmp_path}/turnwise.db")
    with writing(url) as connection:
        report_status(connection, "t", "IndexError: 7", TrainerState.DIED)
    with running_fake_engine() as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        ready = httpx2.get(f"{proxy.url}/readyz")
        assert ready.status_code == 200
        assert ready.json()["trainers"] == [{"trainer_id": "t", "state": "died", "text": "IndexError: 7"}]
        (counted,) = httpx2.get(f"{proxy.url}/v1/counts").json()["trainers"]
        assert counted["state"] == "died"
        metrics = httpx2.get(f"{proxy.url}/metrics").text
        assert {'turnwise_trainers{state="died"} 1.0', 'turnwise_trainers{state="running"} 0.0'} <= set(
            metrics.splitlines()
        )
        finding = httpx2.get(f"{proxy.url}/v1/doctor").json()["data"][-1]
        assert (finding["check"], finding["verdict"]) == ("trainer t", "fail")
        assert "IndexError: 7" in finding["text"]


def test_the_page_needs_no_key_but_its_data_does(http):
    """Every route that its scripts read exists and refuses a caller without a key."""
    page = http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    scripts = "".join(http.get(f"/web/{name}").text for name in SCRIPTS)
    read = set(re.findall(r'(?:request|optional)\(["`]([^"`?$]+)', scripts)) | set(
        re.findall(r"= `(v1/[^`$]+)\$", scripts)
    )
    routes = (
        "budget consent counts doctor events examples/ experiences feedback images/ keys policies policies/ ratings"
    )
    routes += " ratings/next rewards sessions sessions/ turns/ updates/summaries"
    assert read | {"v1/events"} == {"readyz", "metrics", *(f"v1/{route}" for route in routes.split())}
    for path in sorted(read | {"v1/events"}):
        method = {"v1/rewards": "POST", "v1/policies/": "POST", "v1/examples/": "PUT"}.get(path, "GET")
        tails = {"v1/turns/": "x/tokens", "v1/policies/": "1/activate"}
        tail = tails.get(path, "x" if path.endswith("/") else "")
        assert http.request(method, f"/{path}{tail}").status_code == (200 if path in PUBLIC else 401), path


def test_only_files_of_this_origin_run_or_load(http):
    """Every file has a strict content policy; no inline script or style, no other origin, no markup made from text."""
    for path in ["/", *(f"/web/{name}" for name in FILES)]:
        file = http.get(path)
        assert file.status_code == 200
        policy = dict(part.strip().split(" ", 1) for part in file.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "data:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert file.headers["x-content-type-options"] == "nosniff"
        text = file.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"""https?:|["'(]//|innerHTML|outerHTML|insertAdjacent|document\.write|\son\w+=["']""", text
        )
    assert "<style" not in http.get("/").text
    assert not re.search(r"<script(?![^>]*src=)", http.get("/").text)


def test_vendored_files_are_those_of_the_pinned_release_and_include_their_licence(http):
    """uPlot 1.6.32, as npm has it."""
    digests = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    assert {file.name for file in VENDOR.iterdir()} == {*digests, "README.md"}
    for name, digest in digests.items():
        sent = http.get(f"/web/vendor/{name}")
        assert (sent.status_code, hashlib.sha256(sent.content).hexdigest()) == (200, digest)
        assert sent.headers["content-security-policy"]
    assert "MIT" in http.get("/web/vendor/uPlot.LICENSE.txt").text


@pytest.fixture(scope="module")
def played(shared_proxy: ProxyAndEngine) -> tuple[RunningProxy, str]:
    """A group of two sessions that edit a reply, with odd text; the id of the turn that lost its chain in the first."""
    proxy, turn_id = shared_proxy.proxy, ""
    with httpx2.Client(base_url=proxy.url) as http:
        for run in range(2):
            wanted = {"session_id": f"s{run}", "task_id": ODD, "group_id": "g", "group_size": 2, "run": run}
            session = http.post("/v1/sessions", json=wanted).json()
            client = OpenAI(base_url=session["base_url"], api_key=session["api_key"])
            messages: list = [{"role": "user", "content": ODD}]
            for number in range(2):
                reply = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=12)
                messages += [
                    {"role": "assistant", "content": reply.choices[0].message.content if number == run else "edited"},
                    {"role": "user", "content": "Go on."},
                ]
            last = client.chat.completions.create(model="fake", messages=messages).id
            turn_id = turn_id or last
            http.post(f"/v1/sessions/s{run}/end", json={"reward": run})
    return proxy, turn_id


def test_a_turns_tokens_are_listed_one_by_one(played):
    """The whole sequence without gaps: each token's text, and a logprob for each sampled one."""
    proxy, turn_id = played
    with httpx2.Client(base_url=proxy.url) as http:
        found = http.get(f"/v1/turns/{turn_id}/tokens").json()
        turn = http.get(f"/v1/turns/{turn_id}", params={"prompt": "whole"}).json()
    assert found["token_ids"] == turn["prompt_token_ids"] + turn["token_ids"]
    edges = [0, *(segment["end"] for segment in found["segments"])]
    assert [segment["start"] for segment in found["segments"]] == edges[:-1]
    assert edges[-1] == len(found["token_ids"])
    sampled = [segment for segment in found["segments"] if segment["kind"] == "sampled"]
    credit = {(segment["is_trainable"], segment["reward"], segment["turn_return"]) for segment in sampled}
    assert credit == {(True, 0.0, 0.0)}, "run 0 has the reward 0, which each turn gets"
    assert {segment["reward"] for segment in found["segments"] if segment["kind"] != "sampled"} == {None}
    for segment in found["segments"]:
        logprobs = found["logprobs"][segment["start"] : segment["end"]]
        assert all((logprob is None) == (segment["kind"] != "sampled") for logprob in logprobs)
    assert set(found["pieces"]) == {str(token) for token in found["token_ids"]} or found["pieces"] == {}


def test_the_tokens_of_the_chat_template_are_distinguished_from_those_of_messages(played):
    proxy, turn_id = played
    with httpx2.Client(base_url=proxy.url) as http:
        found = http.get(f"/v1/turns/{turn_id}/tokens").json()
    listed = [
        (segment["kind"], bytes(found["token_ids"][segment["start"] : segment["end"]]).decode())
        for segment in found["segments"]
        if segment["kind"] == "prompt"
    ]
    assert listed == [("prompt", ODD), ("prompt", "Go on."), ("prompt", "edited"), ("prompt", "Go on.")]
    kinds = [segment["kind"] for segment in found["segments"]]
    assert (kinds[0], kinds[-2:]) == ("scaffold", ["scaffold", "sampled"])


def test_a_character_of_several_tokens_is_listed_as_a_whole():
    """Bytes as tokens: 🙂 is F0 9F 99 82, é is C3 A9. The last byte belongs to no character and stays alone."""
    ids = [*b"a", *"🙂é".encode(), 0xFF]
    pieces = {each: bytes([each]).decode(errors="replace") for each in ids}
    found = list(characters(ids, pieces, lambda some: bytes(some).decode(errors="replace")))
    assert found == [Characters(1, 5, "🙂"), Characters(5, 7, "é")]


def test_a_turns_logprobs_are_recomputed_under_the_served_version(played, shared_engine, monkeypatch):
    proxy, turn_id = played
    name = Path(shared_engine.state.weights_path).name
    monkeypatch.setitem(shared_engine.state.script.logprob_shifts, name, -0.5)
    with httpx2.Client(base_url=proxy.url) as http:
        found = http.get(f"/v1/turns/{turn_id}/logprobs").raise_for_status().json()
        assert http.get("/v1/turns/nobodys/logprobs").status_code == 404
    assert found["policy_version"] == found["policy_version_first"] == 0
    assert len(found["after"]) == len(found["before"]) > 0
    assert [after - before for before, after in zip(found["before"], found["after"], strict=True)] == pytest.approx(
        [-0.5] * len(found["before"]), abs=1e-5
    )


def test_a_script_imports_what_it_calls_of_another_one():
    """A missing name ends a view with an error, and only a browser would find it."""
    scripts = {name: re.sub(r"(?m)^//.*$", "", WEB.joinpath(name).read_text()) for name in SCRIPTS}
    exported = {
        name
        for text in scripts.values()
        for name in re.findall(r"(?m)^export (?:async )?(?:function|const) (\w+)", text)
    }
    missing = {}
    for file, text in scripts.items():
        known = set(re.findall(r"\b(?:function|const|let) (\w+)", text))
        known |= {name for names in re.findall(r"(?m)^import \{(.*)\} from", text) for name in names.split(", ")}
        called = {name for name in exported - known if re.search(rf"(?:(?<![\w.])|(?<=\.\.\.)){name}\(", text)}
        if called:
            missing[file] = called
    assert missing == {}
