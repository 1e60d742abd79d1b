"""What a proxy that `warm_commands.py` forks gets from its parent: its first child processes, and a chat template.

They are the real ones, only made earlier. The writing process, or the workers, are forked before the proxy has threads
and connections; those that replace them are started as always. The stand-in engine's template is loaded and checked
once, before the forks.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from asyncio import unix_events
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WRITER_NAME = "writing-process"
WORKER_NAME = "proxy-worker"
READER_NAME = "reading-process"
"""The names of forked processes in `/proc/PID/comm`; their command line is their parent's."""


def share_template() -> None:
    """Load the stand-in engine's chat template here, for each later fork whose engine has the same files."""
    from turnwise_fake_engine.tokens import write_tokenizer

    from proxy.engines import chat_templates
    from proxy.features.outline.outlines import shorten

    load = chat_templates.load_chat_template
    with tempfile.TemporaryDirectory() as directory:
        files = {path.name: path.read_bytes() for path in write_tokenizer(Path(directory)).iterdir()}
        template = load(directory, "string")
        shorten(template)

    def load_chat_template(path: str, content_format: Any, ask: Any = None) -> Any:
        is_same = content_format == "string" and _holds(Path(path), files)
        return template if is_same else load(path, content_format, ask)

    chat_templates.load_chat_template = load_chat_template


def _holds(directory: Path, files: dict[str, bytes]) -> bool:
    if not directory.is_dir() or {path.name for path in directory.iterdir()} != files.keys():
        return False
    return all((directory / name).read_bytes() == content for name, content in files.items())


def fork_children(arguments: Sequence[str]) -> None:
    """Fork the processes that become the first children of this one, a proxy without threads."""
    given = iter(arguments)
    num_workers = next((int(next(given)) for flag in given if flag == "--workers"), 1)
    if num_workers > 1:
        unix_events.subprocess = _with_forked([_fork(_serve) for _ in range(num_workers)])
    else:
        _fork_own_processes()


def _fork_own_processes() -> None:
    from proxy.reload import version_files
    from proxy.writer import client

    client.subprocess = _with_forked([_fork(_write)])
    version_files.subprocess = _with_forked([_fork(_read)])


class _Forked(NamedTuple):
    pid: int
    link: socket.socket


class Namespace:
    def __init__(self, module: Any, **values: Any) -> None:
        self.__dict__.update(vars(module) | values)


def _fork(run: Callable[[socket.socket], None]) -> _Forked:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become(theirs, run)
    theirs.close()
    return _Forked(pid, ours)


def _with_forked(forked: list[_Forked]) -> Any:
    """Return `subprocess` with a `Popen` that hands over the forked processes before it starts others."""

    class ForkedFirst(subprocess.Popen[bytes]):
        def _execute_child(self, *given: Any) -> None:
            if not forked:
                return super()._execute_child(*given)
            pid, link = forked.pop(0)
            (descriptor,), environment = given[4], given[6]  # pass_fds, env
            with link:
                socket.send_fds(link, [json.dumps(environment).encode()], [descriptor])
                link.shutdown(socket.SHUT_WR)  # a process that was forked later has this end too
            self.pid, self._child_created = pid, True
            return None

    return Namespace(subprocess, Popen=ForkedFirst)


def _become(link: socket.socket, run: Callable[[socket.socket], None]) -> None:
    status: Any = 1
    try:
        run(link)
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # noqa: BLE001  the outermost edge of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def _is_started(link: socket.socket, name: str) -> bool:
    """Wait until this process is started, and name it; False if it never is."""
    received, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 1)
    if not received:
        return False
    with link:
        while part := link.recv(1 << 20):
            received += part
    if variables := json.loads(received):
        os.environ.clear()
        os.environ.update(variables)
    Path("/proc/self/comm").write_text(name)
    sys.argv = ["-c", str(descriptors[0])]
    return True


def _write(link: socket.socket) -> None:
    from proxy.writer.process import main

    if _is_started(link, WRITER_NAME):
        main()


def _read(link: socket.socket) -> None:
    from proxy.reload.reading_process import main

    if _is_started(link, READER_NAME):
        main()


def _serve(link: socket.socket) -> None:
    from prometheus_client import values

    from proxy.features.workers.worker import run_worker
    from proxy.main import serve

    _fork_own_processes()
    if _is_started(link, WORKER_NAME):
        values.ValueClass = values.get_value_class()
        run_worker(serve)
