"""A person's thumbs in a real Open WebUI, in a real browser: clicks become feedback, a version, and new weights."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.browser import running_browser
from support.ports import free_port
from support.proxies import RunningProxy
from support.running_trainer import GROUPS, running_trainer, wait_for_version
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.client import Client
from turnwise.processes.supervisor import is_ready

ROOT = Path(__file__).parents[2]
OPEN_WEBUI = ROOT / ".adapters" / "openwebui" / "bin" / "open-webui"
RATINGS = "/api/v1/evaluations/feedbacks/all/export"
NUM_CHATS = 8
NUM_CLICKED = 2
"""Chats whose thumbs are clicked in a browser; those of the others are posted as the browser does."""

pytestmark = pytest.mark.engine


@contextlib.contextmanager
def running_open_webui(proxy: RunningProxy, directory: Path) -> Iterator[httpx2.Client]:
    """Run Open WebUI with a proxy as its only connection; yield a client that is signed in as its administrator."""
    port = free_port()
    environment = {
        "DATA_DIR": str(directory),
        "OFFLINE_MODE": "true",
        "WEBUI_SECRET_KEY": "of-this-test",
        "OPENAI_API_BASE_URL": proxy.v1,
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "false",
        "RAG_EMBEDDING_ENGINE": "openai",
        "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
        "FORWARD_SESSION_INFO_HEADER_CHAT_ID": "X-Session-Id",
    }
    log = directory / "open-webui.log"
    with log.open("wb") as output:
        serve = [str(OPEN_WEBUI), "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            serve,
            cwd=directory,
            env={"PATH": os.environ["PATH"], "HOME": str(directory)} | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as people:
            wait_until(
                lambda: is_ready(str(people.base_url.join("/health"))), f"Open WebUI answers, see {log}", WAIT_SECONDS
            )
            person = {"name": "Kim", "email": "kim@example.com", "password": "Of-this-test-1"}
            token = people.post("/api/v1/auths/signup", json=person).raise_for_status().json()["token"]
            people.headers["authorization"] = f"Bearer {token}"
            people.get("/api/models").raise_for_status()
            yield people
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def chat(people: httpx2.Client, message_id: str) -> str | None:
    """Ask in a new chat, as the browser does; return its id, None if the reply has no text."""
    asked = {"id": f"asked-{message_id}", "role": "user", "content": "Hello.", "parentId": None}
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "Hello."}],
        "parent_id": None,
        "user_message": asked | {"childrenIds": [message_id]},
        "message_ids": [{"model_id": "small", "message_id": message_id}],
        "params": {"function_calling": "legacy", "max_tokens": 8, "temperature": 1.0},  # no tools of its own
        "session_id": "of-no-browser",
        "stream": True,
    }
    chat_id = people.post("/api/chat/completions", json=body).raise_for_status().json()["chat_id"]
    wait_until(lambda: reply(people, chat_id, message_id).get("done"), "the reply is stored")
    return chat_id if reply(people, chat_id, message_id)["content"].strip() else None


def reply(people: httpx2.Client, chat_id: str, message_id: str) -> dict[str, Any]:
    found = people.get(f"/api/v1/chats/{chat_id}").raise_for_status().json()
    messages: dict[str, dict[str, Any]] = found["chat"]["history"]["messages"]
    return messages.get(message_id, {})


def rated(people: httpx2.Client) -> dict[str, int]:
    found = people.get(RATINGS).raise_for_status().json()
    return {each["meta"]["chat_id"]: int(each["data"]["rating"]) for each in found}


@pytest.mark.skipif(not OPEN_WEBUI.exists(), reason="run extras/adapters/tests/setup.sh first")
def test_a_persons_thumbs_in_open_webui_become_a_served_version(engine, start_proxy, tmp_path, base_weights):
    """Clicks in Chromium on Open WebUI itself: its chats are sessions, and only the thumbs say which were good."""
    proxy = start_proxy(engine.url, "--session-idle-seconds", "2")
    with (
        running_open_webui(proxy, tmp_path) as people,
        Client(proxy.url) as client,
        running_browser() as browser,
    ):
        answered = ((f"reply-{number}", chat(people, f"reply-{number}")) for number in range(10 * NUM_CHATS))
        with_text = ((message_id, chat_id) for message_id, chat_id in answered if chat_id is not None)
        chats = [next(with_text) for _ in range(NUM_CHATS)]
        token = people.headers["authorization"].removeprefix("Bearer ")
        context = browser.new_context()
        context.add_init_script(f"localStorage.setItem('token', {json.dumps(token)})")
        page = context.new_page()
        for number, (message_id, chat_id) in enumerate(chats):
            is_good = bool(number % 2)
            if number < NUM_CLICKED:
                page.goto(str(people.base_url.join(f"/c/{chat_id}")), timeout=WAIT_SECONDS * 1000)
                thumb = f"#message-{message_id} button[aria-label='{'Good' if is_good else 'Bad'} Response']"
                page.wait_for_selector(thumb, state="attached", timeout=WAIT_SECONDS * 1000)
                page.locator(thumb).dispatch_event("click")
                wait_until(lambda chat_id=chat_id: chat_id in rated(people), "the thumb is stored")
            else:
                about = {"chat_id": chat_id, "message_id": message_id}
                given = {"type": "rating", "data": {"rating": 1 if is_good else -1}, "meta": about}
                people.post("/api/v1/evaluations/feedback", json=given).raise_for_status()
        assert rated(people) == {chat_id: 1 if number % 2 else -1 for number, (_, chat_id) in enumerate(chats)}
        poll = [sys.executable, "-m", "turnwise_adapters.open_webui", "--every", "1", "--proxy", proxy.url]
        connector = subprocess.Popen(
            [*poll, "--open-webui", str(people.base_url)],
            env=os.environ | {"OPEN_WEBUI_API_KEY": token, "PYTHONPATH": f"{ROOT}:{ROOT / 'extras' / 'adapters'}"},
        )
        try:
            with running_trainer(proxy, engine.model_dir, tmp_path, "--singles-per-group", str(NUM_CHATS // GROUPS)):
                served = wait_for_version(client, 1, tmp_path / "trainer.log")
        finally:
            connector.kill()
            connector.wait()
        assert [update["num_sessions"] for update in client.updates()] == [NUM_CHATS]
    weights = [directory / "model.safetensors" for directory in (Path(served["path"]), engine.model_dir)]
    assert weights[0].read_bytes() != weights[1].read_bytes()
