"""The page at `/`: the same files for everyone, which hold no data, and its views in a real Chromium."""

from __future__ import annotations

import importlib.resources
import re
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI
from support.proxies import RunningProxy, StartProxy

from turnwise.fake_engine import RunningFakeEngine
from turnwise.store import keys
from turnwise.store.database import Database

PUBLIC = {"readyz"}
WEB = importlib.resources.files("proxy.routes.web")
FILES = {file.name for file in WEB.iterdir() if file.name.endswith((".html", ".css", ".js"))}
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=8000",
    "--dump-dom",
]
ODD = "<img src=x onerror=alert(1)> שלום 🙂"


@pytest.fixture
def http(fake_engine: RunningFakeEngine, start_proxy: StartProxy, tmp_path):
    """A client without a key, and a proxy that requires one."""
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(url)
    database.upgrade()
    with database.write() as connection:
        keys.create_key(connection, "default", keys.Role.ADMIN, "me")
    database.close()
    with httpx2.Client(base_url=start_proxy(fake_engine.url, database_url=url).url) as client:
        yield client


def test_the_page_needs_no_key_but_its_data_does(http: httpx2.Client):
    """Every route that its scripts read exists and refuses a caller without a key."""
    page = http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    scripts = "".join(http.get(f"/web/{name}").text for name in SCRIPTS)
    read = set(re.findall(r'(?:request|optional)\(["`]([^"`?$]+)', scripts)) | set(
        re.findall(r"= `(v1/[^`$]+)\$", scripts)
    )
    assert read == {
        "readyz",
        "v1/policies",
        "v1/counts",
        "metrics",
        "v1/sessions",
        "v1/sessions/",
        "v1/rewards",
        "v1/turns/",
    }
    for path in read:
        method = "POST" if path == "v1/rewards" else "GET"
        tail = "x/tokens" if path == "v1/turns/" else "x" if path.endswith("/") else ""
        assert http.request(method, f"/{path}{tail}").status_code == (200 if path in PUBLIC else 401), path


def test_only_files_of_this_origin_run_or_load(http: httpx2.Client):
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


def test_an_unknown_file_of_the_page_is_404(http: httpx2.Client):
    for name in ("other.js", "__init__.py", "..%2fauth.py"):
        assert http.get(f"/web/{name}").status_code == 404


@pytest.fixture
def played(proxy: RunningProxy) -> tuple[RunningProxy, str]:
    """A group of two sessions that edit a reply, with odd text; the id of the turn that lost its chain in the first."""
    turn_id = ""
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


def dom(proxy: RunningProxy, address: str, profile: Path) -> str:
    """Return the page's elements once its script has finished; the console must stay empty."""
    command = [str(CHROMIUM), *CHROMIUM_FLAGS, f"--user-data-dir={profile}", f"{proxy.url}/{address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
def test_every_view_shows_what_is_stored(played: tuple[RunningProxy, str], tmp_path: Path):
    """Text that looks like markup is shown as text; a branch shows its reason and both texts."""
    proxy, turn_id = played
    overview = dom(proxy, "", tmp_path)
    assert "version 0" in overview
    assert "&lt;img src=x onerror=alert(1)&gt; שלום 🙂" in overview
    assert "<img" not in overview
    group = dom(proxy, "#sessions/group_id=g", tmp_path)
    assert "Group: mean reward 0.5 of 2 sessions" in group
    session = dom(proxy, f"#session/s0/{turn_id}", tmp_path)
    assert "Why this is a branch: " in session
    assert "What the client sent in this turn" in session
    assert "Over 0 policy versions" in dom(proxy, "#runs", tmp_path)
    assert "Metrics of this proxy that are not zero" in dom(proxy, "#health", tmp_path)


def test_a_turns_tokens_are_listed_one_by_one(played: tuple[RunningProxy, str]):
    """The whole sequence without gaps: each token's text, and a logprob for each sampled one."""
    proxy, turn_id = played
    with httpx2.Client(base_url=proxy.url) as http:
        found = http.get(f"/v1/turns/{turn_id}/tokens").json()
        turn = http.get(f"/v1/turns/{turn_id}", params={"prompt": "whole"}).json()
    assert found["token_ids"] == turn["prompt_token_ids"] + turn["token_ids"]
    edges = [0, *(segment["end"] for segment in found["segments"])]
    assert [segment["start"] for segment in found["segments"]] == edges[:-1]
    assert edges[-1] == len(found["token_ids"])
    for segment in found["segments"]:
        logprobs = found["logprobs"][segment["start"] : segment["end"]]
        assert all((logprob is None) == (segment["kind"] == "prompt") for logprob in logprobs)
    assert set(found["pieces"]) == {str(token) for token in found["token_ids"]} or found["pieces"] == {}
