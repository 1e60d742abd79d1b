"""Images of calls: the limits, what the proxy fetches and what it refuses to, and who may read and delete the bytes."""

import base64
import contextlib
import hashlib
import http.server
import ipaddress
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from support.in_process import in_process_proxy
from support.servers import serving

from proxy.features.images import is_public
from turnwise.features import retention
from turnwise.features.images import media
from turnwise.store.database import Database

PNG = b"\x89PNG\r\n\x1a\n" + b"the bytes of a picture " * 9
DIGEST = hashlib.sha256(PNG).hexdigest()
ENCODED = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{ENCODED}"


def part(url: object = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def ask(client: TestClient, *parts: dict[str, Any], session: str = "s", **fields: Any) -> Any:
    body = {"model": "fake", "messages": [{"role": "user", "content": list(parts)}], **fields}
    return client.post(f"/sessions/{session}/v1/chat/completions", json=body)


def stored(client: TestClient, session: str = "s") -> list[dict[str, Any]]:
    return client.get(f"/v1/sessions/{session}/turns").raise_for_status().json()["data"]


class Pictures(http.server.BaseHTTPRequestHandler):
    """Serves a picture, redirects, too many bytes, no end, and an error."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write({"/page": b"<html>", "/large": PNG * 9}.get(self.path, PNG))
            while self.path == "/slow":
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def pictures() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    server.asked = []
    with serving(server):
        yield server


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr("proxy.features.images.FETCH_SECONDS", 1.0)
    limits = {"max_image_bytes": len(PNG) * 2, "max_images": 3}
    with in_process_proxy(tmp_path, fetch_images=True, **limits) as (client, _):
        yield client


def test_an_image_is_stored_once_named_by_its_digest_and_deleted_with_its_session(tmp_path):
    with in_process_proxy(tmp_path) as (client, database):
        for session in ("s", "s", "t"):
            ask(client, {"type": "text", "text": "Look."}, part(), session=session).raise_for_status()
        turn = stored(client)[0]
        assert turn["messages"][0]["content"][1] == part(f"image:{DIGEST}")
        assert (turn["outcome"], turn["reason"], turn["images"]) == ("untrainable", "image_places_unknown", None)
        shown = client.get(f"/v1/images/{DIGEST}")
        assert (shown.content, shown.headers["content-type"]) == (PNG, "image/png")
        assert shown.headers["x-content-type-options"] == "nosniff"
        assert count(database) == 1
        client.delete("/v1/sessions/s").raise_for_status()
        assert client.get(f"/v1/images/{DIGEST}").content == PNG
        client.delete("/v1/sessions/t").raise_for_status()
        assert client.get(f"/v1/images/{DIGEST}").status_code == 404
        retention.delete_all(database, lambda _: retention.Deleted())
        assert count(database) == 0
    assert not any(PNG in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def count(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(media)).scalar_one())


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (part("https://example.com/a.png"), "not_fetched"),
        ({"image_url": "https://example.com/a.png"}, "not_fetched"),
        ({"type": "text", "text": "x", "uuid": "u", "image_url": "https://example.com/a.png"}, "not_fetched"),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, "not_fetched"),
        ({"audio_url": "http://example.com/a.wav"}, "not_fetched"),
        (part("file:///etc/passwd"), "invalid_image_url"),
        (part(f"image:{DIGEST}"), "invalid_image_url"),
        (part("data:image/png;base64,!!!"), "invalid_image_url"),
        (part(f"data:image/png;base64,{ENCODED[:8]}\n{ENCODED[8:]}"), "invalid_image_url"),
        (part(URL.rstrip("=")), "invalid_image_url"),
        (part("data:image/png;base64,iVBORw0KGgo-_w=="), "invalid_image_url"),
        (part("data:image/png,%89PNG"), "invalid_image_url"),
        (part(f" {URL}"), "invalid_image_url"),
        (part("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()), "unknown_image_type"),
        (part(None), None),
    ],
)
def test_what_is_no_image_and_what_the_engine_would_fetch_is_refused_by_name(
    tmp_path: Path, given: dict[str, Any], code: str | None
) -> None:
    with in_process_proxy(tmp_path) as (client, _):
        ask(client, part()).raise_for_status()  # so the digest is stored, which no client may name
        refused = ask(client, given)
        assert (refused.status_code, refused.json()["error"]["code"] in (code, "invalid_request")) == (400, True)
        assert len(stored(client)) == 1


def test_a_file_is_one_image_however_its_data_url_is_written(tmp_path):
    heads = (
        "data:image/png;base64,",
        "DATA:IMAGE/PNG;BASE64,",
        "data:;base64,",
        "data:image/svg+xml;charset=utf-8;base64,",
    )
    with in_process_proxy(tmp_path) as (client, database):
        ask(client, *(part(head + ENCODED + end) for head in heads for end in ("", "\n"))).raise_for_status()
        assert stored(client)[0]["messages"][0]["content"] == [part(f"image:{DIGEST}")] * 8
        assert client.get(f"/v1/images/{DIGEST}").headers["content-type"] == "image/png"
        assert count(database) == 1


def test_what_would_change_an_image_in_the_engine_is_dropped_and_counted(tmp_path):
    with in_process_proxy(tmp_path) as (client, _):
        fields = {"mm_processor_kwargs": {"size": 1}, "chat_template_kwargs": {"turnwise_prompt": {"ids": [1]}, "a": 1}}
        ask(client, part(uuid="known"), **fields).raise_for_status()
        turn = stored(client)[0]
        assert turn["sampling"]["chat_template_kwargs"] == {"a": 1}
        assert "mm_processor_kwargs" not in turn["sampling"]
        assert "uuid" not in str(turn["messages"])
        metrics = client.get("/metrics").text
        for field in ("uuid", "mm_processor_kwargs", "turnwise_prompt"):
            assert f'turnwise_dropped_fields_total{{field="{field}"}} 1.0' in metrics


def test_images_over_the_limits_are_refused(fetching):
    assert ask(fetching, *[part()] * 3).status_code == 200
    assert ask(fetching, *[part()] * 4).json()["error"]["code"] == "too_many_images"
    large = base64.b64encode(PNG * 3).decode()
    assert ask(fetching, part(f"data:image/png;base64,{large}")).status_code == 413


def test_a_fetched_image_is_stored_and_reaches_the_engine_as_a_data_url(fetching, pictures, monkeypatch):
    monkeypatch.setattr("proxy.features.images.is_public", lambda _: True)
    here = f"http://localhost:{pictures.server_port}"
    ask(fetching, part(f"{here}/to//picture")).raise_for_status()
    assert pictures.asked == ["/to//picture", "/picture"]
    assert stored(fetching)[0]["messages"][0]["content"] == [part(f"image:{DIGEST}")]
    assert fetching.get(f"/v1/images/{DIGEST}").content == PNG
    answers = {path: ask(fetching, part(here + path)) for path in ("/missing", "/page", "/large", "/slow")}
    codes = {path: (answer.status_code, answer.json()["error"]["code"]) for path, answer in answers.items()}
    assert codes["/missing"] == (400, "image_not_fetched")
    assert codes["/page"] == (400, "unknown_image_type")
    assert codes["/large"][0] == 413
    assert codes["/slow"][0] in (400, 413)  # its end or its length, whichever comes first
    endless = "/to/" * 5 + "/picture"
    assert ask(fetching, part(here + endless)).json()["error"]["code"] == "image_not_fetched"


def test_no_private_address_is_called_by_name_number_or_redirect(fetching, pictures, monkeypatch):
    port = pictures.server_port
    names = ("localhost", "localhost.", "LOCALHOST", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]")
    numbers = ("2130706433", "0x7f000001", "0x7f.1", "017700000001", "127.1", "0", "0.0.0.0", "[::]", "[::127.0.0.1]")
    for host in (*names, *numbers):
        refused = ask(fetching, part(f"http://{host}:{port}/picture"))
        assert (refused.status_code, host, pictures.asked) == (400, host, [])
    assert ask(fetching, part("http://169.254.169.254/latest")).json()["error"]["code"] == "private_address"
    assert ask(fetching, part(f"http://user:word@localhost:{port}/picture")).status_code == 400
    checked: list[str] = []

    def first_only(address: object) -> bool:
        checked.append(str(address))
        return len(checked) == 1

    monkeypatch.setattr("proxy.features.images.is_public", first_only)
    redirected = ask(fetching, part(f"http://127.0.0.1:{port}/to/http://127.0.0.1:{port}/picture"))
    assert redirected.json()["error"]["code"] == "private_address"
    assert len(pictures.asked) == 1


PUBLIC = """
    93.184.216.34 2606:2800:220:1::1 168.63.129.17 192.0.1.1 ::ffff:93.184.216.34 2001:200::1
"""
PRIVATE = """
    10.1.2.3 100.64.0.1 169.254.169.254 224.0.0.1 ::1 fe80::1 fd00::1 fec0::1 ::ffff:10.0.0.1 64:ff9b::a00:1
    ::a00:1 192.0.0.170 198.18.0.1 240.0.0.1 2002:a00:1:: ::ffff:168.63.129.16 ::ffff:192.88.99.1
    ::ffff:0:93.184.216.34 64:ff9b::5db8:d822 64:ff9b:1::5db8:d822 2001::5db8:d822 2001:20::1 2001:1ff:ffff::1
    2002:5db8:d822:: 2606:2800:220:1:0:5efe:a00:1 2606:2800:220:1:200:5efe:a00:1 2001:db8::1 3fff::1
    2620:4f:8000::1 100::1 100:0:0:1::1 5f00::1 4000::1 ff0e::1 192.31.196.1 192.52.193.1 192.175.48.1
    100.100.100.200 0.0.0.0 255.255.255.255 192.0.0.0 192.0.0.8 192.0.0.9 192.0.0.10 192.0.0.171 192.0.0.192
    192.0.0.255 192.88.99.0 192.88.99.1 168.63.129.16
"""
"""Also the whole block of protocol assignments, with Oracle's metadata; 6to4's relays; Azure's own services."""


@pytest.mark.parametrize(
    ("address", "expected"), [(each, named is PUBLIC) for named in (PUBLIC, PRIVATE) for each in named.split()]
)
def test_only_addresses_of_the_public_internet_are_public(address, expected):
    assert is_public(ipaddress.ip_address(address)) is expected
