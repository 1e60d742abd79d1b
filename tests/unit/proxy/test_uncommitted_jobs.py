"""What the writing process has not committed when its proxy dies."""

import itertools
import os
import socket
import time

import pytest

from proxy.fault import FaultPoints
from proxy.writer.process import Committer, Job
from turnwise.errors import NotFound
from turnwise.store.sessions import read_session
from turnwise.types import Session


class Ended(BaseException):
    pass


def test_a_job_is_not_stored_when_its_proxy_has_died_before_the_commit(database, monkeypatch):
    """The proxy is alive as the transaction begins, and at its end another process has adopted the writer.

    By then another proxy may serve the client's next try.
    """
    parents = itertools.chain([os.getpid()], itertools.repeat(1))
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    monkeypatch.setattr("os._exit", lambda _: (_ for _ in ()).throw(Ended))
    ours, theirs = socket.socketpair()
    committer = Committer(database, FaultPoints(), os.getpid(), ours)
    with ours, theirs, pytest.raises(Ended):
        committer.write([Job(1, time.monotonic() + 60.0, Session(session_id="s"))])
    with database.read() as connection, pytest.raises(NotFound):
        read_session(connection, "default", "s")
