"""The trainer's weight server on its own port: who has no key is not read, and nobody is read without an end."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx2
import pytest
import torch
from support.waiting import WAIT_SECONDS, wait_until

from trainer.features.transfers import HeldVersions
from trainer.features.transfers import server as weight_server
from trainer.features.transfers.server import WeightServer
from turnwise.engine_plugin import channel as channels
from turnwise.engine_plugin.channel import Channel, TransferFailed
from turnwise.engine_plugin.receiver import Receiver, TransferInfo


@pytest.fixture
def server() -> Iterator[WeightServer]:
    server = WeightServer(HeldVersions())
    yield server
    server.close()


def connect(server: WeightServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(server.url).port), timeout=120)


def answer(peer: socket.socket) -> bytes:
    received = b""
    while data := peer.recv(65536):
        received += data
    return received


@pytest.mark.parametrize(
    "head",
    [
        b"POST /wrong/transfers HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /wrong/transfers HTTP/1.1\r\ncontent-length: 300000000\r\n\r\n",
        b"GET / HTTP/1.1\r\n",
        b"POST /wrong HTTP/1.1\r\nx-half: a hea",
        b"nothing\r\n",
        b"\x16\x03\x01\r\n",
    ],
    ids=["no length", "long", "no headers", "half a header", "one word", "no HTTP"],
)
def test_a_request_without_the_key_is_answered_after_its_first_line(server, head):
    with connect(server) as peer:
        peer.sendall(head)
        assert answer(peer).startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("length", ["-1", "65537", "300000000", "+1", "1e3", "١"])
def test_a_body_of_no_length_or_a_long_one_is_not_read(server, length):
    with connect(server) as peer:
        path = urlsplit(server.url).path
        peer.sendall(f"POST {path}/transfers HTTP/1.1\r\ncontent-length: {length}\r\n\r\n".encode())
        received = answer(peer)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"is no number up to 65536" in received


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST ", b" HTTP/1.1\r\nx: y\r\n", b" HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"],
    ids=["", "word", "head", "body"],
)
def test_a_request_that_does_not_become_whole_is_closed(monkeypatch, server, sent):
    monkeypatch.setattr(weight_server, "READ_SECONDS", 0.2)
    with connect(server) as peer:
        peer.sendall(f"POST {urlsplit(server.url).path}/engines".encode() + sent if sent[:1] == b" " else sent)
        answer(peer)  # which ends when the connection is closed


def test_connections_beyond_the_most_are_closed_and_their_places_come_back(monkeypatch):
    monkeypatch.setattr(weight_server, "MAX_CONNECTIONS", 3)
    server = WeightServer(HeldVersions())
    try:
        with contextlib.ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(connect(server))
            with connect(server) as late:
                assert answer(late) == b""
        with httpx2.Client(base_url=server.url, transport=httpx2.HTTPTransport(retries=0)) as http:

            def is_answered() -> bool:
                with contextlib.suppress(httpx2.TransportError):
                    return http.get(f"{server.url}/engines").json() == {"sleep_level": 0}
                return False

            wait_until(is_answered, "a place comes back")
    finally:
        server.close()


def test_a_request_with_the_key_is_answered_and_its_connection_is_used_again(server):
    with connect(server) as peer:
        path, body = urlsplit(server.url).path, json.dumps({"sleeping": True}).encode()
        for _ in range(2):
            peer.sendall(f"POST {path}/engines HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            received = b""
            while not received.endswith(b"{}"):
                received += peer.recv(65536)
            assert received.startswith(b"HTTP/1.1 200 ")
    assert httpx2.get(f"{server.url}/versions/1").json() == {"error": "version 1 is not in memory"}
    assert httpx2.post(f"{server.url}/transfers", json={"version": "x"}).status_code == 422


def test_a_server_that_is_closed_sends_what_it_has_begun_and_begins_nothing_more(monkeypatch):
    """A trainer that ended meanwhile was aborted by the thread that sent (SIGABRT), and its engine got nothing."""
    monkeypatch.setattr(weight_server, "COMING_SECONDS", weight_server.CLOSE_SECONDS)
    server, weights = WeightServer(HeldVersions()), {"a.weight": torch.arange(8.0)}
    server.held.hold(1, weights, None)
    asked = {"version": 1, "num_workers": 1}
    info = httpx2.post(f"{server.url}/transfers", json=asked).json()["init_info"]
    closing = threading.Thread(target=server.close)
    closing.start()
    wait_until(lambda: httpx2.get(f"{server.url}/versions/1").status_code == 404, "nothing more is offered")
    assert httpx2.post(f"{server.url}/transfers", json=asked).status_code == 404
    assert closing.is_alive()
    received = torch.zeros(server.held.find(1).layout.num_bytes, dtype=torch.uint8)
    channel = Channel.join(info["host"], info["port"], rank=1, size=2, seconds=60)
    channel.broadcast(received, info["chunk_bytes"])
    assert channel.agree(is_good=True)
    closing.join()
    assert torch.equal(received.view(torch.float32), weights["a.weight"])
    assert not [each for each in threading.enumerate() if each.name == "weights"]


def test_a_server_that_is_closed_calls_off_what_an_engine_does_not_come_to(monkeypatch):
    """Python aborts (SIGABRT) if it ends while a thread asks torch whether the engines have come."""
    monkeypatch.setattr(weight_server, "COMING_SECONDS", 0.0)
    server = WeightServer(HeldVersions())
    server.held.hold(1, {"a.weight": torch.arange(8.0)}, None)
    httpx2.post(f"{server.url}/transfers", json={"version": 1, "num_workers": 2}).raise_for_status()
    server.close()
    assert not [each for each in threading.enumerate() if each.name == "weights"]


def test_an_engine_that_comes_to_a_transfer_that_was_called_off_is_told_so(server, monkeypatch):
    """Where nobody listened any more, torch tried for two minutes, and the engine could receive nothing else."""
    is_off, is_told = threading.Event(), threading.Event()

    def wait_for_late(_seconds: float) -> None:
        is_off.set()
        is_told.wait(WAIT_SECONDS)

    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait_for_late))
    server.held.hold(1, {"a.weight": torch.arange(8.0)}, None)
    started = httpx2.post(f"{server.url}/transfers", json={"version": 1, "num_workers": 2}).json()
    httpx2.post(f"{server.url}/transfers/{started['transfer_id']}/end").raise_for_status()
    assert is_off.wait(WAIT_SECONDS)
    with pytest.raises(TransferFailed, match="it was called off"):
        Channel.join("127.0.0.1", started["init_info"]["port"], rank=1, size=3, seconds=60)
    is_told.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_all_workers_of_several_engines_receive_together_at_addresses_of_both_kinds(host):
    server, sizes = WeightServer(HeldVersions(), host), [2, 1, 2]
    server.held.hold(1, {"a.weight": torch.arange(9.0)}, None)
    info = httpx2.post(f"{server.url}/transfers", json={"version": 1, "num_workers": sum(sizes)}).json()["init_info"]
    receivers, first_rank = [Receiver() for _ in range(sum(sizes))], 1
    for size in sizes:
        for worker in range(size):
            receivers[first_rank - 1 + worker].begin(TransferInfo(**info, first_rank=first_rank), worker)
        first_rank += size
    for receiver in receivers:
        ((name, weight),) = receiver.take(1, WAIT_SECONDS)
        assert name == "a.weight"
        assert torch.equal(weight, torch.arange(9.0))
    server.close()
