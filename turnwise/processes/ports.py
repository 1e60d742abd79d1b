"""Ports of this machine: which are free, and which process listens on them."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from turnwise.errors import SettingsError

_LISTENING = "0A"


def check_port_is_free(who: str, host: str, port: int) -> None:
    """Refuse an address that cannot be listened on; `who` would listen there, and port 0 is any free one.

    Raises:
        SettingsError: the port is taken, or the address is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise SettingsError(
            f"{who} cannot listen on {host}:{port}: {error.strerror}; stop the process that does, "
            "or choose another port"
        ) from error


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def session_listens(session: int, port: int) -> bool:
    """Return whether a process of a session listens on a port of any address; only Linux can say no.

    The session's id is the process id of the guard that leads it.
    """
    if sys.platform != "linux":
        return True
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    return any(target in sockets for process in processes_of(session) for target in _open_files(process))


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def processes_of(session: int) -> Iterator[Path]:
    """Yield the directory in /proc of each process of a session; there is none but on Linux."""
    for process in Path("/proc").glob("*"):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # The program's name, in brackets, may hold spaces; state, parent, group and session follow it.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield process


def _open_files(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(descriptor.readlink())
