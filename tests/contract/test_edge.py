"""The outermost layer of each request: host and origin checks, request ids and traces, CORS, TLS, the access log."""

import asyncio
import gzip
import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from support.commands import invoke
from support.migrated import migrated, writing
from support.proxies import RunningProxy
from support.servers import serving
from support.waiting import WAIT_SECONDS, wait_until

from proxy.engines.engine import Engine
from proxy.engines.http_client import Access
from proxy.settings import ProxySettings
from turnwise.errors import EngineUnavailable, SettingsError
from turnwise.store import keys

BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def proxy(empty_proxy: RunningProxy) -> RunningProxy:
    return empty_proxy


def chat(proxy: RunningProxy, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{proxy.v1}/chat/completions", json=BODY, headers=headers)


def test_a_proxy_without_keys_refuses_foreign_origins_rebound_hosts_and_forms(proxy):
    """Without the checks, each of these is an administrator's request."""
    port = proxy.url.rpartition(":")[2]
    refused = [
        (chat(proxy, host="evil.example"), 403, "unknown_host"),
        (chat(proxy, origin="https://evil.example"), 403, "foreign_origin"),
        (chat(proxy, origin="null"), 403, "foreign_origin"),
        (chat(proxy, origin=f"https://127.0.0.1:{port}"), 403, "foreign_origin"),
        (chat(proxy, origin=f"ftp://127.0.0.1:{port}"), 403, "foreign_origin"),
        (chat(proxy, origin=f"://127.0.0.1:{port}"), 403, "foreign_origin"),
        (chat(proxy, origin=f"http://127.0.0.1:{port}/"), 403, "foreign_origin"),
        (chat(proxy, **{"content-type": "text/plain"}), 415, "unsupported_media_type"),
        (chat(proxy, **{"content-type": "application/x-www-form-urlencoded"}), 415, "unsupported_media_type"),
        (httpx2.get(f"{proxy.v1}/sessions", headers={"host": "evil.example"}), 403, "unknown_host"),
    ]
    for answer, status, code in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.headers["x-request-id"]
    served = [
        chat(proxy),
        chat(proxy, host=f"localhost:{port}", origin=f"http://localhost:{port}"),
        chat(proxy, host="[::1]:80"),
        chat(proxy, **{"content-type": "application/json; charset=utf-8"}),
    ]
    assert [answer.status_code for answer in served] == [200] * 4


@pytest.mark.parametrize("kind", ["application/octet-stream", "text/plain", "application/x-www-form-urlencoded"])
def test_a_post_without_a_body_is_served_whatever_type_its_client_names(proxy, kind):
    """aiohttp, fetch and Ruby name these types for an empty body. PHP's curl sends an empty one in chunks."""
    bodies: tuple[bytes | Iterator[bytes], ...] = (b"", iter([]))
    for number, content in enumerate(bodies):
        session = f"{kind[:4]}-{number}"
        httpx2.post(f"{proxy.v1}/sessions", json={"session_id": session}).raise_for_status()
        ended = httpx2.post(f"{proxy.v1}/sessions/{session}/end", content=content, headers={"content-type": kind})
        assert (ended.status_code, ended.json()["status"]) == (200, "ended")
    missing = httpx2.post(f"{proxy.v1}/rewards", content=b"", headers={"content-type": kind})
    assert (missing.status_code, missing.json()["error"]["message"]) == (422, "`body` is missing.")
    for body in (b"{}", iter([b"{}"])):
        refused = httpx2.post(f"{proxy.v1}/sessions", content=body, headers={"content-type": kind})
        assert refused.status_code == 415


def test_with_keys_only_the_key_decides_and_anonymous_callers_see_no_engine_address(fake_engine, start_proxy):
    """A proxy that starts before the first key is created, and one that starts after that."""
    proxy = start_proxy(fake_engine.url)
    assert httpx2.get(f"{proxy.url}/readyz").json()["engines"][0]["url"] == fake_engine.url
    with writing(proxy.database_url) as connection:
        _, secret = keys.create_key(connection, "default", "admin", "me")
    proxy = start_proxy(fake_engine.url, database_url=proxy.database_url)
    with httpx2.Client() as http:
        assert http.get(f"{proxy.v1}/sessions").status_code == 401
        anonymous = http.get(f"{proxy.url}/readyz")
        assert (anonymous.status_code, anonymous.json()["engines"][0]["url"]) == (200, None)
        assert anonymous.json()["engines"][0]["error"] is None
        assert fake_engine.url not in anonymous.text
        mine = http.get(f"{proxy.url}/readyz", headers={"authorization": f"Bearer {secret}"})
        assert mine.json()["engines"][0]["url"] == fake_engine.url
        made = http.post(f"{proxy.v1}/sessions", json={}, headers={"authorization": f"Bearer {secret}"}).json()
        of_session = http.get(f"{proxy.url}/readyz", headers={"authorization": f"Bearer {made['api_key']}"})
        assert fake_engine.url not in of_session.text
        answer = chat(proxy, host="proxy.example", authorization=f"Bearer {secret}")
        assert answer.status_code == 200


def test_request_ids_and_traces_are_taken_from_the_caller_passed_to_the_engine_and_logged(
    fake_engine, start_proxy, tmp_path
):
    access = tmp_path / "access.jsonl"
    proxy = start_proxy(fake_engine.url, "--access-log", str(access), "--log-format", "json")
    fake_engine.calls.clear()
    parent = "b7ad6b7169203331"
    answer = chat(proxy, **{"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-{parent}-01"})
    assert answer.headers["x-request-id"] == "mine-1"
    version, trace, span, flags = fake_engine.calls[0].headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert span != parent
    made = chat(proxy, **{"x-request-id": "two words", "traceparent": "00-xyz"})
    assert made.headers["x-request-id"] not in ("", "two words")
    assert httpx2.get(f"{proxy.url}/nowhere?key=secret").status_code == 404
    wait_until(lambda: '"/nowhere"' in access.read_text(), "the last request is logged, which is after its answer")
    lines = [json.loads(line) for line in access.read_text().splitlines() if '"/readyz"' not in line]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 200),
        ("GET", "/nowhere", 404),
    ]
    assert (lines[0]["request_id"], lines[0]["trace_id"]) == ("mine-1", TRACE)
    assert lines[0]["bytes"] == len(answer.content)
    assert "secret" not in access.read_text()
    records = [json.loads(line) for line in proxy.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= records[0].keys()


def test_a_page_of_the_public_url_may_call_a_proxy_without_keys(fake_engine, start_proxy):
    """A server in front of the proxy ends TLS; the proxy itself is called by http."""
    proxy = start_proxy(fake_engine.url, "--public-url", "https://front.example/turnwise")
    assert chat(proxy, host="front.example", origin="https://front.example").status_code == 200
    assert chat(proxy, host="front.example", origin="https://other.example").status_code == 403


def test_a_request_that_is_refused_by_its_head_is_in_the_access_log(fake_engine, start_proxy, tmp_path):
    access = tmp_path / "access.jsonl"
    proxy = start_proxy(fake_engine.url, "--access-log", str(access), "--header-timeout-seconds", "1")
    heads = [
        (b"GET /old?key=secret HTTP/1.0\r\nhost: a\r\n\r\n", ("GET", "/old", 505)),
        (b"POST /no-host HTTP/1.1\r\n\r\n", ("POST", "/no-host", 400)),
        (b"POST /coded HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", ("POST", "/coded", 501)),
        (b"GET /long HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", ("GET", "/long", 431)),
        (b"\x16\x03\x01\r\n", (None, None, 400)),
        (b"PUT /half HTTP/1.1\r\nhost: a\r\nx-ha", ("PUT", "/half", 408)),
    ]
    for sent, _ in heads:
        with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=120) as peer:
            peer.sendall(sent)
            answered = b""
            while data := peer.recv(65536):
                answered += data
            request_id = re.search(rb"x-request-id: (\S+)", answered)[1].decode()
        wait_until(lambda name=request_id: name in access.read_text(), "its line is written")
    lines = [json.loads(line) for line in access.read_text().splitlines() if '"/readyz"' not in line]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [expected for _, expected in heads]
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    assert "secret" not in access.read_text()


def test_without_cors_origins_no_reply_permits_a_page(proxy):
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = httpx2.options(f"{proxy.v1}/chat/completions", headers=asked)
    assert preflight.status_code >= 400
    replies = [preflight, chat(proxy, origin="https://app.example"), chat(proxy)]
    assert not [name for reply in replies for name in reply.headers if name.startswith("access-control-")]


def test_only_pages_of_a_permitted_origin_may_call_the_proxy(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--cors-origins", "https://app.example")
    asked = {"origin": "https://app.example", "access-control-request-headers": "authorization"}
    preflight = httpx2.options(f"{proxy.v1}/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    answer = chat(proxy, origin="https://app.example")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    refused = chat(proxy, origin="https://other.example")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", str(paths[0]), "-keyout", str(paths[1])], check=True, capture_output=True)
    return paths


def test_clients_reach_the_proxy_over_tls(fake_engine, start_proxy, certificate, monkeypatch):
    monkeypatch.setattr("support.servers.is_ready", lambda url: is_open(url, certificate[0]))
    proxy = start_proxy(fake_engine.url, "--tls-certificate", str(certificate[0]), "--tls-key", str(certificate[1]))
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    url = proxy.v1.replace("http:", "https:")
    answer = httpx2.post(f"{url}/chat/completions", json=BODY, verify=trusted)
    assert answer.status_code == 200


@pytest.mark.parametrize("names", [("tls_certificate", "tls_key"), ("engine_certificate", "engine_certificate_key")])
@pytest.mark.parametrize("wrong", ["no certificate", "no such key", "not PEM"])
def test_tls_files_that_cannot_be_used_are_named(certificate, tmp_path, wrong, names):
    """Those of the proxy, and those that it presents to engines."""
    named, key = certificate[0], tmp_path / "wrong.pem"
    if wrong == "not PEM":
        key.write_text("no key")
    settings = ProxySettings(**dict(zip(names, (None if wrong == "no certificate" else named, key), strict=True)))
    with pytest.raises(SettingsError, match=r"name (a PEM file|PEM files)") as raised:
        settings.load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *names)
    assert f"{names[1]}={str(key)!r}" in str(raised.value)
    if names[0] == "engine_certificate":
        with pytest.raises(SettingsError, match=re.escape(str(raised.value))):
            settings.engine_tls()


def is_open(url: str, authority: Path) -> bool:
    try:
        verify = ssl.create_default_context(cafile=str(authority))
        return httpx2.get(url.replace("http:", "https:"), verify=verify, timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


async def test_an_engine_with_tls_is_verified_by_its_own_authority_and_may_require_a_client_certificate(certificate):
    """The self-signed certificate serves as authority, server and client certificate."""
    offered = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificate[0])
    offered.load_cert_chain(*certificate)
    offered.verify_mode = ssl.CERT_REQUIRED
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=offered)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    authority, own = certificate[0], {"engine_certificate": certificate[0], "engine_certificate_key": certificate[1]}
    for settings, is_served in (
        ({"engine_ca": authority, **own}, True),
        ({"engine_ca": authority}, False),
        (own, False),
    ):
        engine = Engine(url, timeout_seconds=WAIT_SECONDS, access=Access(tls=ProxySettings(**settings).engine_tls()))
        if is_served:
            assert await engine.ask("GET", "/health") == {}
        else:
            with pytest.raises(EngineUnavailable):
                await engine.ask("GET", "/health")
        await engine.close()
    server.close()


@pytest.mark.parametrize("command", ["doctor", "verify"])
def test_commands_call_an_engine_with_the_authority_and_the_key_that_the_proxy_has(
    certificate, tmp_path, monkeypatch, command
):
    """The engine answers 503 to whoever presents its key, so no check goes further than that."""

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503 if self.headers["authorization"] == "Bearer engine-secret" else 401)

    offered = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    offered.load_cert_chain(*certificate)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNWISE_PROXY_ENGINE_CA", str(certificate[0]))
    monkeypatch.setenv("TURNWISE_PROXY_ENGINE_API_KEY", "engine-secret")
    database = migrated(f"sqlite:///{tmp_path}/store.db")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.socket = offered.wrap_socket(server.socket, server_side=True)
    with serving(server):
        url = f"https://127.0.0.1:{server.server_port}"
        done = invoke(command, "--engine", url, "--database", database)
    assert re.search(rf"{url} answer(s|ed) 503 to GET", done.output), done.output
    assert "engine-secret" not in done.output


def test_the_engine_is_called_with_its_key(fake_engine, start_proxy, tmp_path):
    proxy = start_proxy(fake_engine.url, environment={"TURNWISE_PROXY_ENGINE_API_KEY": "engine-secret"})
    assert chat(proxy).status_code == 200
    assert {call.headers["authorization"] for call in fake_engine.calls} == {"Bearer engine-secret"}
    assert "engine-secret" not in proxy.log.read_text()


def test_a_request_with_many_query_parameters_is_refused_by_every_route(proxy):
    """Each parameter takes the time of a dictionary entry, and a head of 64 KiB has room for 20,000."""
    many = "?" + "&".join(f"k{number}=1" for number in range(101))
    for answer in (
        httpx2.post(f"{proxy.v1}/chat/completions{many}", json=BODY),
        httpx2.get(f"{proxy.v1}/sessions{many}"),
        httpx2.get(f"{proxy.url}/metrics{many}"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_parameters")
    few = many[: many.rindex("&")]
    assert httpx2.post(f"{proxy.v1}/chat/completions{few}", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/messages", ("type",)),
        ("/sessions/s/v1/messages/count_tokens", ("type",)),
        ("/v1beta/models/fake:generateContent", ("error", "status")),
        ("/v1/chat/completions", ("error", "code")),
    ],
)
def test_a_refusal_before_any_route_has_the_shape_of_its_client(proxy, path, place):
    """Anthropic's errors have a type, Google's a status, and OpenAI's a code in words."""
    refused = [
        httpx2.post(proxy.url + path, json=BODY, headers={"host": "evil.example"}),
        httpx2.post(proxy.url + path, content=b"x", headers={"content-type": "text/plain"}),
        httpx2.post(proxy.url + path, content=b"x", headers={"content-encoding": "gzip"}),
        httpx2.post(proxy.url + path + "?" + "&" * 100, json=BODY),
    ]
    assert [answer.status_code for answer in refused] == [403, 415, 415, 400]
    for answer in refused:
        value = answer.json()
        for name in place:
            value = value[name]
        assert isinstance(value, str), answer.text


@pytest.mark.parametrize("route", ["/chat/completions", "/sessions"])
def test_a_compressed_body_is_refused_by_every_route_with_the_reason(proxy, route):
    sent = gzip.compress(json.dumps(BODY).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx2.post(proxy.v1 + route, content=sent, headers=headers)
    assert answer.status_code == 415
    assert "content-encoding 'gzip'" in answer.json()["error"]["message"]
    twice = [*headers.items(), ("content-encoding", "identity")]
    assert httpx2.post(proxy.v1 + route, content=sent, headers=twice).status_code == 415
    headers["content-encoding"] = "Identity"
    assert httpx2.post(f"{proxy.v1}/chat/completions", json=BODY, headers=headers).status_code == 200
