"""What a proxy refuses from outside: addresses beyond loopback without keys, and injections."""

import json
import random
import urllib.parse
from collections.abc import Iterator

import httpx2
import pytest
from support.commands import run_turnwise
from support.proxies import running_proxy

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def turnwise(proxy_database: str, *arguments: str) -> dict:
    done = run_turnwise(*arguments, "--database", proxy_database, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_the_proxy_refuses_to_listen_beyond_loopback(tmp_path, fake_engine, host):
    url = f"sqlite:///{tmp_path}/turnwise.db"
    turnwise(url, "db", "upgrade")
    done = run_turnwise("proxy", "--engine", fake_engine.url, "--database", url, "--host", host, "--port", "0")
    assert done.returncode != 0
    assert "turnwise keys create" in done.stderr


FRAGMENTS = [
    "' OR 1=1 --", '"; DROP TABLE turns; --', "../../etc/passwd", "..", "\x00", "%00", "\u202e", "{{7*7}}", "${jndi:x}",
    "\r\nX-Admin: 1", "a" * 5000, "*", "_%", "\ud7ff", "<script>", "tw-", "tws-", "tw--", "tws-.", "\\", "\x7f", "😀",
]  # fmt: skip


def payloads(count: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 3)))


def test_a_thousand_injections_are_answered_without_a_5xx(tmp_path, fake_engine):
    """In keys, ids and filters: each is refused with a 4xx or finds nothing; none authenticates, none causes a 5xx."""
    url, statuses = f"sqlite:///{tmp_path}/turnwise.db", []
    key = turnwise(url, "keys", "create", "--role", "admin", "--name", "test", "--yes")["key"]
    headers = {"authorization": f"Bearer {key}"}
    with (
        running_proxy(fake_engine.url, url, tmp_path) as proxy,
        httpx2.Client(base_url=proxy.url) as nobody,
        httpx2.Client(base_url=proxy.url, headers=headers) as http,
    ):
        http.post("/sessions/bystander/v1/chat/completions", json=CHAT).raise_for_status()
        for number, text in enumerate(payloads(1000)):
            match number % 6:
                case 0:
                    raw = text.encode().replace(b"\x00", b"").replace(b"\r\n", b"").replace(b"\x7f", b"")
                    reply = nobody.get("/v1/sessions", headers={b"authorization": (b"Bearer " + raw).strip()})
                case 1:
                    reply = http.get(f"/v1/sessions/{urllib.parse.quote(text, safe='')}")
                case 2:
                    reply = http.get("/v1/sessions", params={"after": text})
                case 3:
                    reply = http.post("/v1/rewards", json={"turn_id": text, "value": 1.0})
                case 4:
                    named = urllib.parse.quote(f"{text} ", safe="")
                    reply = http.post(f"/sessions/{named}/v1/chat/completions", json=CHAT)
                case _:
                    reply = http.post("/v1/sessions", json={"session_id": f"{text}\n"})
            statuses.append((reply.status_code, number % 6, text))
            for path in ("/v1/sessions", "/v1/experiences"):
                if number % 20 == 0:
                    found = http.get(path, params={"task_id": text})
                    assert found.status_code == 422 or found.content == b"" or found.json()["data"] == []
        assert [each for each in statuses if not 400 <= each[0] < 500] == []
        assert http.get("/v1/sessions/bystander").json()["num_turns"] == 1
