"""Limits of a real proxy: sizes, nesting, counts, time, and clients that disconnect."""

import asyncio
import contextlib
import dataclasses
import json
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import httpx2
import numpy as np
import pytest
from support.control_plane import metric
from support.ledger_samples import finish, make_turn
from support.migrated import migrated
from support.proxies import ProxyAndEngine, RunningProxy, running_proxy
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Rule, Script, running_fake_engine
from turnwise_fake_engine.script import Fault, FaultKind, Reply

from turnwise.store import keys, sessions
from turnwise.store.database import Database
from turnwise.store.turns import append_turns
from turnwise.types import Session

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
WHOLE_SECONDS = 1.0
FLAGS = {
    "--max-body-bytes": "100000",
    "--max-json-string-bytes": "20000",
    "--max-concurrent-calls": "4",
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Iterator[ProxyAndEngine]:
    yield from serving(tmp_path_factory.mktemp("limited"), FLAGS)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory) -> Iterator[ProxyAndEngine]:
    yield from serving(tmp_path_factory.mktemp("impatient"), {"--header-timeout-seconds": str(WHOLE_SECONDS)})


def serving(directory: Path, given: dict[str, str]) -> Iterator[ProxyAndEngine]:
    flags = [word for flag in given.items() for word in flag]
    with (
        running_fake_engine(Script(rules=[Rule(contains="slowly", reply=Reply(text="a" * 60, pace_seconds=0.1))])) as e,
        running_proxy(e.url, f"sqlite:///{directory}/turnwise.db", directory, *flags) as proxy,
    ):
        e.calls.clear()
        yield ProxyAndEngine(proxy, e)


def code_of(reply: httpx2.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions"])
def test_a_body_that_is_too_large_is_refused(limited, path):
    body = b'{"metadata": {"a": "' + b"x" * 100_000 + b'"}}'
    headers = {"content-type": "application/json"}
    with httpx2.Client(base_url=limited.proxy.url) as http:
        assert code_of(http.post(path, content=body, headers=headers)) == (413, "too_large")
        assert code_of(http.post(path, content=iter([body[:60_000], body[60_000:]]), headers=headers)) == (
            413,
            "too_large",
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/sessions"])
def test_a_body_that_is_nested_too_deep_is_refused(limited, path):
    deep = b'{"metadata": {"a": ' + b"[" * 50_000 + b"}}"
    fine = (
        b'{"metadata": {"a": "' + b"[" * 500 + b'"}, "messages": [{"role": "user", "content": "x"}], "model": "fake"}'
    )
    headers = {"content-type": "application/json"}
    with httpx2.Client(base_url=limited.proxy.url) as http:
        assert code_of(http.post(path, content=deep, headers=headers)) == (413, "too_large")
        if path == "/v1/chat/completions":
            assert http.post(path, content=fine, headers=headers).status_code == 200


def test_a_string_that_is_too_long_is_refused_in_a_short_body_too(limited):
    with httpx2.Client(base_url=limited.proxy.url) as http:
        for num_bytes, status in ((20_001, 413), (20_000, 200)):
            messages = [{"role": "user", "content": "x" * num_bytes}]
            assert http.post("/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == status


def test_too_many_messages_and_choices_are_refused(limited):
    with httpx2.Client(base_url=limited.proxy.url) as http:
        many = http.post("/v1/chat/completions", json={**CHAT, "messages": [{}] * 10_001})
        assert many.status_code == 400
        assert "`messages` has 10001 entries; at most 10000 are served" in many.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json={**CHAT, "n": 129}).json()["error"]["param"] == "n"


def test_headers_that_are_too_long_are_refused(limited):
    with httpx2.Client(base_url=limited.proxy.url) as http:
        assert code_of(http.get("/healthz", headers={"x-long": "y" * 66_000})) == (431, "headers_too_large")
        assert http.get("/healthz", headers={"x-long": "y" * 60_000}).status_code == 200
    for piece in (b"x-a: " + b"b" * 95 + b"\r\n", b"c" * 100):
        # The last of three pieces passes the limit, so nothing is sent after the answer.
        answer = talk(limited.proxy, [b"GET /healthz HTTP/1.1\r\nhost: x\r\n", piece * 350, piece * 350], pause=0.05)
        assert answer.startswith(b"HTTP/1.1 431 ")


def address_of(proxy: RunningProxy) -> tuple[str, int]:
    return "127.0.0.1", int(proxy.url.rpartition(":")[2])


def talk(proxy: RunningProxy, pieces: Iterable[bytes], pause: float = 0.0) -> bytes:
    received = b""
    with socket.create_connection(address_of(proxy), timeout=WAIT_SECONDS) as peer:
        # After its answer the proxy reads no more, and data that is sent after that resets the connection.
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                if select.select([peer], [], [], pause)[0]:
                    break
                peer.sendall(piece)
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(65536):
                received += data
    return received


JSON_HEAD = b"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
HALF_SENT = {
    "nothing": [],
    "half a line": [b"POST /v1/chat/comp"],
    "half its headers": [b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-le"],
    "half a body": [b"POST /v1/chat/completions HTTP/1.1\r\n", JSON_HEAD, b'{"model":'],
    "half a body of the control plane": [b"POST /v1/sessions HTTP/1.1\r\n", JSON_HEAD, b"{"],
    "a body in drops": [b"POST /v1/sessions HTTP/1.1\r\n", JSON_HEAD.replace(b"100", b"90000"), *[b" "] * 80_000],
    "half a second request": [b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /hea"],
}


def test_a_request_that_never_completes_is_closed(impatient):
    """After `header_timeout_seconds`, also when single bytes keep arriving: all of them would take hours."""

    def closed(pieces: list[bytes]) -> tuple[bytes, float]:
        started = time.monotonic()
        return talk(impatient.proxy, pieces, pause=0.2), time.monotonic() - started

    with ThreadPoolExecutor(len(HALF_SENT)) as clients:
        closings = dict(zip(HALF_SENT, clients.map(closed, HALF_SENT.values()), strict=True))
    for sent, (answer, took) in closings.items():
        assert took > WHOLE_SECONDS * 0.9, sent
        assert b"408 Request Timeout" in answer, sent
        assert b'"code":"request_timeout"' in answer, sent


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize("num_bytes", [10_000, 50, 1])
def test_a_request_that_offers_another_protocol_is_served_with_its_body(limited, num_bytes):
    """As the JDK's client offers HTTP/2; a second request on the connection is served too."""
    body = b'{"session_id": "offered"}'
    head = b"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    offering = b"POST /v1/sessions HTTP/1.1\r\n" + head + OFFER + b"\r\n" + body
    pieces = [offering[at : at + num_bytes] for at in range(0, len(offering), num_bytes)]
    pieces[-1] += b"GET /v1/sessions/offered HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    answer = talk(limited.proxy, pieces)
    assert answer.count(b"HTTP/1.1 200 OK") == 2, answer
    assert answer.count(b'"session_id":"offered"') == 2


def test_a_length_with_a_space_after_it_is_read(limited):
    body = b'{"session_id": "spaced"}'
    head = b"POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    answer = talk(limited.proxy, [head + b"content-length: %d \r\n\r\n" % len(body) + body])
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer


POSTED = b"POST /v1/sessions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: "
WEBSOCKET = b"connection: Keep-Alive, Upgrade\r\nupgrade: WebSocket\r\n"
REFUSED_HEADS: dict[tuple[int, str], dict[str, bytes]] = {
    (501, "method_not_served"): {
        "a tunnel to a path": b"CONNECT /x HTTP/1.1\r\nhost: x\r\n",
        "a tunnel to a host": b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n",
        "a tunnel that offers a protocol": b"CONNECT /x HTTP/1.1\r\nhost: x\r\n" + OFFER,
    },
    (426, "websocket_not_served"): {
        "a WebSocket": b"GET /v1/responses HTTP/1.1\r\nhost: x\r\n" + WEBSOCKET,
        "one or another": b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket, h2c\r\n",
    },
    (400, "invalid_host"): {
        "no host": b"GET /healthz HTTP/1.1\r\n",
        "two hosts": b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n",
        "one host twice": b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: x\r\n",
        "two hosts in one line": b"GET /healthz HTTP/1.1\r\nhost: x, y\r\n",
        "a host with a user": b"GET /healthz HTTP/1.1\r\nhost: x@y\r\n",
        "a host with a path": b"GET /healthz HTTP/1.1\r\nhost: x/y\r\n",
        "a port that is none": b"GET /healthz HTTP/1.1\r\nhost: x:y\r\n",
        "another host in the line": b"GET http://x/healthz HTTP/1.1\r\nhost: y\r\n",
        "another port in the line": b"GET http://x:81/healthz HTTP/1.1\r\nhost: x:82\r\n",
        "a user in the line": b"GET http://u@x/healthz HTTP/1.1\r\nhost: x\r\n",
        "no host in the line": b"GET http:///healthz HTTP/1.1\r\nhost: x\r\n",
    },
    (501, "transfer_encoding_not_served"): {
        "a compressed body": POSTED + b"gzip, chunked\r\n",
        "a compressed body in two lines": POSTED + b"gzip\r\ntransfer-encoding: chunked\r\n",
        "a compressed body without an end": POSTED + b"gzip\r\n",
    },
    (400, "invalid_http"): {
        "chunks twice": POSTED + b"chunked, chunked\r\n",
        "chunks and a length": POSTED + b"chunked\r\ncontent-length: 5\r\n",
    },
    (505, "http_version_not_served"): {
        "HTTP/1.0": b"GET /healthz HTTP/1.0\r\nhost: x\r\n",
        "HTTP/1.0 with an offer": b"GET /healthz HTTP/1.0\r\nhost: x\r\n" + OFFER,
        "no version": b"GET /healthz\r\n",
        "a later version": b"GET /healthz HTTP/2.0\r\nhost: x\r\n",
    },
}


@pytest.mark.parametrize(
    ("status", "code", "head"),
    [pytest.param(*refusal, head, id=sent) for refusal, heads in REFUSED_HEADS.items() for sent, head in heads.items()],
)
def test_a_head_that_the_proxy_does_not_serve_is_refused_once_and_its_connection_closed(limited, status, code, head):
    """As RFC 9112 says of hosts (3.2) and transfer encodings (6.1), and RFC 9110 of methods, versions and 426."""
    before = metric(limited.proxy, "turnwise_refused_total", code=code)
    answer = talk(limited.proxy, [head + b"\r\n"])
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"\r\n\r\n") == 1
    assert b'"code":"%b"' % code.encode() in answer
    assert (b"\r\nupgrade: HTTP/1.1\r\n" in answer) == (status == 426)
    assert metric(limited.proxy, "turnwise_refused_total", code=code) == before + 1


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://127.0.0.1/healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        b"GET HTTP://LocalHost:80/healthz HTTP/1.1\r\nhost: localhost:80\r\n",
        b"GET http://[::1]:8100/healthz HTTP/1.1\r\nHOST: [::1]:8100\r\n",
        b"GET /healthz HTTP/1.1\r\nhost:  127.0.0.1 \r\n",
    ],
)
def test_a_host_that_is_the_same_in_line_and_header_is_served(limited, head):
    assert talk(limited.proxy, [head + b"connection: close\r\n\r\n"]).startswith(b"HTTP/1.1 200 OK")


def test_many_requests_in_one_piece_that_each_offer_another_protocol_are_all_served(limited):
    """Each takes a new parser; 1,500 are more than Python's limit of recursion."""
    request = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n" + OFFER + b"\r\n"
    last = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    assert talk(limited.proxy, [request * 1500 + last]).count(b"HTTP/1.1 200 OK") == 1501


def test_trailers_are_no_headers(limited):
    """A server in front checks and replaces headers, and passes trailers on."""
    body = json.dumps(CHAT).encode()
    head = b"host: 127.0.0.1\r\nx-session-id: header\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    chunks = b"%x\r\n%s\r\n0\r\nx-session-id: trailer\r\n\r\n" % (len(body), body)
    answer = talk(limited.proxy, [b"POST /v1/chat/completions HTTP/1.1\r\n" + head + chunks])
    assert b"x-session-id: header\r\n" in answer


def test_data_that_is_not_http_gets_a_400(limited):
    before = metric(limited.proxy, "turnwise_refused_total", code="invalid_http")
    answer = talk(limited.proxy, [b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n"])
    assert b'"code":"invalid_http"' in answer
    assert b"x-request-id: " in answer
    assert metric(limited.proxy, "turnwise_refused_total", code="invalid_http") == before + 1


def test_half_sent_bodies_delay_no_large_call_and_are_closed(fake_engine, start_proxy):
    """Eight that announce the longest body and send 180 bytes; they once held all places for the header's time."""
    proxy = start_proxy(fake_engine.url, "--max-body-bytes", "200000", "--header-timeout-seconds", "600")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 200000\r\n\r\n"
    with contextlib.ExitStack() as opened:
        peers = [
            opened.enter_context(
                socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=300)
            )
            for _ in range(8)
        ]
        for peer in peers:
            peer.sendall(head + b"{" + b" " * 100)
        large = {**CHAT, "messages": [{"role": "user", "content": "word " * 25_000}], "max_tokens": 1}
        assert httpx2.post(f"{proxy.v1}/chat/completions", json=large, timeout=120).status_code in (200, 400)
        for peer in peers:
            received = b""
            while data := peer.recv(65536):
                received += data
            assert received.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"request_timeout"' in received


def test_a_reply_may_take_longer_than_a_request(impatient):
    asked = {**CHAT, "messages": [{"role": "user", "content": "slowly"}], "max_tokens": 20}
    with httpx2.Client(base_url=impatient.proxy.url) as http:
        # On a busy machine a request may itself be late, which is refused.
        replies = iter(lambda: http.post("/v1/chat/completions", json=asked), None)
        reply = wait_until(lambda: next(each for each in replies if each.status_code != 408), "a request is in time")
    assert reply.status_code == 200
    assert reply.elapsed.total_seconds() > 1.5 * WHOLE_SECONDS  # 20 tokens, 0.1 s each


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_the_engines_call(limited, stream):
    session_id = f"left-{stream}"
    asked = {**CHAT, "stream": stream}
    limited.engine.fail_next(Fault(kind=FaultKind.HANG_STREAM if stream else FaultKind.HANG, after_chunks=4))

    async def leave() -> None:
        url = f"{limited.proxy.url}/sessions/{session_id}/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(http.post(url, json=asked))
            if stream:
                reply = await request
                while not re.search(rb'"content":"[^"]', await reply.content.readline()):
                    pass  # the first chunk tells the role, before anything is sampled
                reply.close()
            else:
                await asyncio.to_thread(wait_until, lambda: len(limited.engine.calls) > before, "the engine is called")
                request.cancel()

    before = len(limited.engine.calls)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(leave())
    wait_until(lambda: limited.engine.calls[before].outcome == "aborted", "the engine's call is aborted")
    wait_until(lambda: limited.proxy.turns(session_id), "the turn is stored")
    turns = limited.proxy.turns(session_id)
    assert [view.turn.outcome for view in turns] == ["aborted"]
    assert bool(len(turns[0].turn.token_ids)) == stream


@pytest.mark.parametrize("limit", ["--max-concurrent-calls", "--key-max-calls"])
def test_a_call_over_the_limit_is_refused_before_its_body_is_read(fake_engine, start_proxy, limit):
    """Also a retry, unless it has an `Idempotency-Key`: its answer may be stored."""
    proxy = start_proxy(fake_engine.url, limit, "1")
    fake_engine.fail_next(Fault(kind=FaultKind.HANG_STREAM))
    asked = {**CHAT, "stream": True}

    def post_half(**headers: str) -> tuple[int, str]:
        content = {"content-type": "application/json"}
        return code_of(httpx2.post(f"{proxy.v1}/chat/completions", content=b"{", headers=content | headers))

    with httpx2.stream("POST", f"{proxy.v1}/chat/completions", json=asked) as running:
        lines = running.iter_lines()  # closing it would end the call
        assert next(lines)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        with socket.create_connection(address_of(proxy), timeout=WAIT_SECONDS) as peer:
            peer.sendall(head + b"content-length: 5000000\r\n\r\n")
            assert peer.recv(65536).startswith(b"HTTP/1.1 429 Too Many Requests")
        assert post_half() == (429, "overloaded")
        assert post_half(**{"x-stainless-retry-count": "1"}) == (429, "overloaded")
        assert post_half(**{"idempotency-key": "k"}) == (400, "invalid_json")


@pytest.mark.parametrize(("most", "warning"), [(3000, ""), (500, "may open 500 files, and 1024 concurrent calls need")])
def test_the_proxy_takes_the_open_files_that_the_system_allows_and_warns_if_they_are_too_few(most, warning):
    """Shells and systemd start processes with a soft limit of 1,024: less than 1,024 calls need."""
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, int(sys.argv[1])))\n"
        "from proxy.main import allow_open_files\n"
        "allow_open_files(1024)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(most)], capture_output=True, check=True, text=True)
    assert int(done.stdout) == most
    assert warning in done.stderr
    assert bool(done.stderr) == bool(warning)


def test_exports_that_are_read_slowly_delay_no_call_and_no_other_tenant_and_hold_no_snapshot(
    fake_engine, start_proxy, tmp_path
):
    """40 sessions of 30,000 tokens are more than sockets buffer. Each export stands still after its first bytes."""
    database, secrets = Database(migrated(f"sqlite:///{tmp_path}/exports.db")), {}
    for tenant in ("mine", "theirs"):
        with database.write() as conn:
            secrets[tenant] = keys.create_key(conn, tenant, keys.KeyRole.ADMIN, "")[1]
        for number in range(40 if tenant == "mine" else 1):
            name = f"{tenant}-{number}"
            with database.write() as conn:
                sessions.create_session(conn, Session(session_id=name, tenant=tenant))
                tokens = {"token_ids": np.ones(30_000, np.int32), "logprobs": np.full(30_000, -0.123, np.float32)}
                turn = make_turn("t1", session_id=name, tenant=tenant, **tokens)
                append_turns(conn, [dataclasses.replace(turn, turn_id=name, chain_id=name)])
            finish(database, name, tenant=tenant)
    proxy = start_proxy(fake_engine.url, database_url=f"sqlite:///{tmp_path}/exports.db")

    def read(tenant: str) -> httpx2.Response:
        headers = {"authorization": f"Bearer {secrets[tenant]}"}
        return httpx2.get(f"{proxy.v1}/experiences", headers=headers)

    host, port = proxy.url.removeprefix("http://").split(":")
    head = f"GET /v1/experiences HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {secrets['mine']}\r\n\r\n"
    with contextlib.ExitStack() as slow:
        for _ in range(4):
            client = slow.enter_context(socket.create_connection((host, int(port)), WAIT_SECONDS))
            client.sendall(head.encode())
            assert client.recv(12) == b"HTTP/1.1 200"
        refused = read("mine")
        assert code_of(refused) == (429, "overloaded"), refused.text
        assert "retry-after" in refused.headers
        assert "4 clients of this tenant read exports" in refused.json()["error"]["message"]
        assert len(read("theirs").text.splitlines()) == 1
        mine = {"authorization": f"Bearer {secrets['mine']}"}
        assert httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT, headers=mine).status_code == 200
        assert httpx2.get(f"{proxy.v1}/sessions", headers=mine).status_code == 200

        def is_log_emptied() -> bool:
            database.truncate_log()
            return (tmp_path / "exports.db-wal").stat().st_size == 0

        wait_until(is_log_emptied, "no export holds a snapshot")
    wait_until(lambda: read("mine").status_code == 200, "the places of clients that left are free")
    assert len(read("mine").text.splitlines()) == 40
    database.close()
