"""What a proxy that `warm_commands.py` forks gets from its parent: a writing process, and a checked chat template.

Both are the real ones, only made earlier. The writing process is forked before the proxy has threads and connections,
and becomes the proxy's first one; a later one is started as always. The stand-in engine's template is loaded and
checked once, before the forks. A proxy with `cold=True` has neither.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

WRITER_NAME = "writing-process"
"""The name of a forked writing process in `/proc/PID/comm`; its command line is its parent's."""


def share_template() -> None:
    """Load the stand-in engine's chat template here, for each later fork whose engine has the same files."""
    from proxy.engines import probe
    from turnwise.fake_engine.tokens import write_tokenizer

    load = probe.load_chat_template
    with tempfile.TemporaryDirectory() as directory:
        files = {path.name: path.read_bytes() for path in write_tokenizer(Path(directory)).iterdir()}
        template = load(directory, "string")

    def load_chat_template(path: str, content_format: Any) -> Any:
        is_same = content_format == "string" and _holds(Path(path), files)
        return template if is_same else load(path, content_format)

    probe.load_chat_template = load_chat_template


def _holds(directory: Path, files: dict[str, bytes]) -> bool:
    """Return whether a directory holds exactly these files."""
    if not directory.is_dir() or {path.name for path in directory.iterdir()} != files.keys():
        return False
    return all((directory / name).read_bytes() == content for name, content in files.items())


def fork_writing_process() -> None:
    """Fork the process that becomes the first writing process of this one, a proxy without threads."""
    from proxy.writer import client

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_writing_process(theirs)
    theirs.close()

    class FirstForked(subprocess.Popen[bytes]):
        """Gives the forked process its link instead of starting another one."""

        def _execute_child(self, *given: Any) -> None:
            (descriptor,) = given[4]  # pass_fds
            socket.send_fds(ours, [b"-"], [descriptor])
            ours.close()
            self.pid, self._child_created = pid, True
            client.subprocess.Popen = subprocess.Popen

    client.subprocess = _Namespace(subprocess, Popen=FirstForked)


class _Namespace:
    """A module with other values for some of its names."""

    def __init__(self, module: Any, **values: Any) -> None:
        self.__dict__.update(vars(module) | values)


def _become_writing_process(link: socket.socket) -> None:
    """Wait for the link to the proxy, then run as `proxy.writer.process` until the end."""
    status = 1
    try:
        received, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        link.close()
        if received:
            from proxy.writer.process import main

            Path("/proc/self/comm").write_text(WRITER_NAME)
            sys.argv = ["-c", str(descriptors[0])]
            main()
        status = 0
    except BaseException:  # noqa: BLE001  the outermost edge of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
