"""Session affinity: the requests of a session are served by one of the workers, over whatever connection they come.

The kernel gives each new connection to some worker, and clients open new ones or choose any of a pool. A worker that
does not know a conversation reads and decodes it again. So a worker that receives the first bytes of a request looks
for the session's name in the head, and hands the whole connection, with these bytes, to the worker whose number the
name hashes to. The connection stays there until a request of another session comes. A request that names no session
in its head is served where it arrives, and so is every request over HTTPS, and one whose worker does not take it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

from proxy.http.asgi import SESSION_HEADERS
from proxy.http.connections import LimitedHttp

log = logging.getLogger(__name__)

SESSIONS_PATH = b"/sessions/"
SESSION_KEY = b"Bearer tws-"
"""Begin of the `authorization` header with a key of one session."""
MAX_HEAD_BYTES = 16 * 2**10
"""Names are looked for in so many bytes."""


def session_name(data: bytes) -> bytes | None:
    """Return what names the session in the head of a call; None if nothing does, or if it is not a call."""
    if not data.startswith(b"POST "):
        return None
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    line, *lines = data[:end].split(b"\r\n")
    path = b"/" + line[len(b"POST ") :].lstrip(b"/")
    if path.startswith(SESSIONS_PATH):
        return path[len(SESSIONS_PATH) :].split(b"/", 1)[0]
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(b":") for each in lines)}
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return value
    key = headers.get(b"authorization", b"")
    return key if key.startswith(SESSION_KEY) else None


class SessionAffinity:
    """Hands connections to the other workers, and takes those that they hand over."""

    def __init__(self, directory: Path, index: int, num_workers: int, *, count: Callable[[], None]) -> None:
        """Prepare.

        Args:
            directory: Of this proxy alone; each worker has a socket in it.
            index: The number of this worker.
            num_workers: How many workers there are.
            count: Called for each connection that another worker has taken.
        """
        self._directory = directory
        self._index = index
        self._num_workers = num_workers
        self._count = count
        self._socket: socket.socket | None = None
        self._taking: set[asyncio.Task[object]] = set()

    def start(self, make_protocol: Callable[[bytes], LimitedHttp]) -> None:
        """Take connections from now on.

        Args:
            make_protocol: Returns the protocol of a connection whose first bytes another worker has read.
        """
        path, self._make_protocol = self._path(self._index), make_protocol
        path.unlink(missing_ok=True)  # a killed worker leaves its socket
        taking = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            taking.bind(str(path))
        except OSError as error:
            taking.close()
            log.warning("sessions are not kept on one worker, because %s cannot be a socket: %s", path, error)
            return
        self._socket = taking
        asyncio.get_running_loop().add_reader(taking.fileno(), self._take, taking)

    def close(self) -> None:
        """Take no more connections; those that were handed over before are served."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._path(self._index).unlink(missing_ok=True)
        self._take(self._socket)
        self._socket.close()
        self._socket = None

    def hand_over(self, transport: asyncio.Transport, data: bytes) -> bool:
        """Hand a connection to the worker of the session that its next request names; return whether that took it.

        Args:
            transport: The connection, between two requests.
            data: The first bytes of the request.
        """
        name = session_name(data)
        if name is None or self._socket is None:
            return False
        owner = zlib.crc32(name) % self._num_workers
        if owner == self._index:
            return False
        try:
            with os.fdopen(os.memfd_create("request"), "wb", buffering=0) as request:
                request.write(data)
                descriptors = array("i", [transport.get_extra_info("socket").fileno(), request.fileno()])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                self._socket.sendmsg([b"\0"], ancillary, 0, str(self._path(owner)))
        except OSError as error:  # it has died, does not keep up, or no file can be opened: this worker serves it
            log.debug("worker %d does not take a connection: %s", owner, error)
            return False
        self._count()
        return True

    def _path(self, index: int) -> Path:
        return self._directory / f"connections-{index}"

    def _take(self, taking: socket.socket) -> None:
        """Serve the connections that other workers have handed over."""
        while True:
            try:
                _, descriptors, _, _ = socket.recv_fds(taking, 1, 2, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            if len(descriptors) < 2:
                log.error("a connection is lost: this process has too many open files; raise `ulimit -n`")
                for each in descriptors:
                    os.close(each)
                continue
            connection = socket.socket(fileno=descriptors[0])
            with os.fdopen(descriptors[1], "rb") as request:
                request.seek(0)
                data = request.read()
            task = asyncio.ensure_future(self._serve(connection, data))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    async def _serve(self, connection: socket.socket, data: bytes) -> None:
        """Serve a connection whose first bytes another worker has read."""
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.connect_accepted_socket(lambda: self._make_protocol(data), connection)
        except OSError as error:  # the client has left
            log.debug("a connection that was handed over is closed: %s", error)
            connection.close()
            return
        if protocol.flow.read_paused and not transport.is_closing():
            transport.pause_reading()  # uvloop starts to read after `connection_made`, whatever that has done
        if self._socket is None:  # uvicorn has told the other connections before this one was there
            protocol.shutdown()
