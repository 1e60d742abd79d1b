"""The supervisor with real processes: order, restarts, giving up, and no process left after any kill."""

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.errors import ChildFailed
from turnwise.processes import ports
from turnwise.processes.supervisor import Child, ChildState, Supervisor

ROOT = Path(__file__).parents[2]
SLEEPER = "import time\nopen({path!r}, 'a').write(f'{{__import__(\"os\").getpid()}}\\n')\ntime.sleep(600)"


def _alive(pid: int) -> bool:
    """Return whether a process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between opening and reading
        return False


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def _sleeper(path: Path, name: str = "sleeper", **more: object) -> Child:
    """A child that writes its process id and sleeps; ready when it has written."""
    return Child(
        name=name,
        argv=_python(SLEEPER.format(path=str(path))),
        ready=lambda: path.exists() and bool(_pids(path)),
        **more,
    )


def _pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


def test_children_start_in_order_and_stop_in_reverse(tmp_path):
    output: list[tuple[str, str]] = []
    children = [_sleeper(tmp_path / "a", "first"), _sleeper(tmp_path / "b", "second")]
    with Supervisor(children, log_directory=tmp_path / "logs", say=lambda *line: output.append(line)) as stack:
        assert [stack.state(name) for name in ("first", "second")] == [ChildState.READY, ChildState.READY]
    words = [(name, text.split()[0].rstrip(";")) for name, text in output]
    assert words == [
        ("first", "starting"),
        ("first", "ready"),
        ("second", "starting"),
        ("second", "ready"),
        ("second", "stopped"),
        ("first", "stopped"),
    ]
    assert not any(_alive(pid) for name in "ab" for pid in _pids(tmp_path / name))


def test_a_child_that_waits_for_the_one_before_it_starts_beside_it(tmp_path):
    path = tmp_path / "second"
    children = [
        Child(name="first", argv=_python("import time; time.sleep(600)"), ready=path.exists),
        _sleeper(path, "second", starts_early=True),
    ]
    with Supervisor(children, log_directory=tmp_path / "logs") as stack:
        assert stack.state("first") is ChildState.READY


def test_a_child_that_dies_is_reported_and_restarted(tmp_path):
    output: list[tuple[str, str]] = []
    path = tmp_path / "pids"
    with Supervisor(
        [_sleeper(path)], log_directory=tmp_path, say=lambda *line: output.append(line), first_delay_seconds=0.05
    ) as stack:
        with (tmp_path / "sleeper.log").open("a") as log:
            log.write("OSError: a warning that it survived\n")
        os.kill(_pids(path)[0], signal.SIGKILL)
        wait_until(lambda: len(_pids(path)) == 2, "it runs a second time")
        wait_until(lambda: stack.state("sleeper") is ChildState.READY, "it is ready again")
        stack.check()
    assert any(text.startswith("died with signal SIGKILL") for _, text in output)
    assert not any("last error" in text for _, text in output)  # a killed process wrote none


def test_a_child_that_keeps_dying_is_not_restarted_and_the_end_of_its_log_is_shown(tmp_path):
    child = Child(name="broken", argv=_python("import sys; print('no such key'); sys.exit(3)"))
    given = {"max_quick_deaths": 3, "quick_seconds": WAIT_SECONDS, "first_delay_seconds": 0.02}
    supervisor = Supervisor([child], log_directory=tmp_path, **given)
    message = r"died 3 times in a row, last with exit status 3(?s:.*)no such key"
    with pytest.raises(ChildFailed, match=message), supervisor:
        supervisor.wait(threading.Event())
    assert supervisor.num_starts("broken") == 3


def test_a_child_that_dies_before_it_is_ready_is_not_restarted_for_ever_and_its_last_error_is_printed(tmp_path):
    """However long a start takes, a death before the end of it counts."""
    output: list[str] = []
    code = "raise ValueError('max_model_len (2048) is greater than 1024')"
    child = Child(name="broken", argv=_python(code), ready=lambda: False)
    supervisor = Supervisor(
        [child],
        log_directory=tmp_path,
        say=lambda _, text: output.append(text),
        max_quick_deaths=2,
        quick_seconds=0.0,
        first_delay_seconds=0.02,
    )
    with pytest.raises(ChildFailed, match="died 2 times in a row"), supervisor:
        supervisor.wait(threading.Event())
    assert "its last error: ValueError: max_model_len (2048) is greater than 1024" in output


def test_exit_status_two_is_not_retried(tmp_path):
    """It means that the same start fails again: wrong settings, a taken port, no model."""
    child = Child(name="wrong", argv=_python("raise SystemExit(2)"), ready=lambda: False)
    supervisor = Supervisor([child], log_directory=tmp_path, first_delay_seconds=0.02)
    with pytest.raises(ChildFailed, match="wrong cannot start"), supervisor:
        pass
    assert supervisor.num_starts("wrong") == 1


def test_an_answer_of_another_process_on_the_childs_port_does_not_count(tmp_path):
    """The port is taken while the child starts: an answer of another process does not make the child ready."""
    with contextlib.ExitStack() as opened:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
        opened.callback(server.server_close)
        port = server.server_address[1]
        child = _sleeper(tmp_path / "pid", port=port)
        with pytest.raises(ChildFailed, match=f"another process listens on port {port}"):
            Supervisor([child], log_directory=tmp_path).__enter__()
        assert not (tmp_path / "pid").exists()
    assert not ports.session_listens(os.getsid(0), port)


def test_a_child_that_is_not_ready_in_time_is_stopped(tmp_path):
    path = tmp_path / "pids"
    child = Child(name="deaf", argv=_python(SLEEPER.format(path=str(path))), ready=lambda: False, start_seconds=0.5)
    with pytest.raises(ChildFailed, match="is not ready after"):
        Supervisor([child], log_directory=tmp_path).__enter__()
    # On a slow machine it was stopped before it could write its process id.
    assert not path.exists() or not any(map(_alive, _pids(path)))


def test_what_is_waited_for_is_said_with_what_it_does_and_an_early_child_is_not_blamed(tmp_path):
    output: list[tuple[str, str]] = []
    first = Child(
        name="first",
        argv=_python("import time\nprint('loading', flush=True)\ntime.sleep(600)"),
        ready=lambda: any("starting for" in text and "its log ends with 'loading'" in text for _, text in output),
    )
    deaf = Child(name="deaf", argv=first.argv, ready=lambda: False, start_seconds=0.5)
    early = Child(name="early", argv=first.argv, ready=lambda: False, start_seconds=0.01, starts_early=True)

    def supervisor(*children: Child) -> Supervisor:
        return Supervisor(children, log_directory=tmp_path, say=lambda *line: output.append(line), report_seconds=0.1)

    with supervisor(first):
        assert {name for name, text in output if "starting for" in text} == {"first"}
    with pytest.raises(ChildFailed, match=r"deaf is not ready after .*; the end of its log"):
        supervisor(deaf, early).__enter__()
    assert "early" not in {name for name, text in output if "starting for" in text}


def test_a_child_that_ignores_the_term_signal_is_killed_after_its_own_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(Child, "grace_seconds", 100 * WAIT_SECONDS)  # the default
    path = tmp_path / "pids"
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER.format(path=str(path))
    child = Child(
        name="stubborn", argv=_python(code), ready=lambda: path.exists() and bool(_pids(path)), grace_seconds=0.1
    )
    with Supervisor([child], log_directory=tmp_path):
        pass
    assert not _alive(_pids(path)[0])


def _grandparent(path: Path) -> str:
    """Code of a child that starts another process; both write their process ids."""
    inner = SLEEPER.format(path=str(path))
    return f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {inner!r}])\n{inner}"


def test_grandchildren_end_with_their_child(tmp_path):
    path = tmp_path / "pids"
    child = Child(
        name="family",
        argv=_python(_grandparent(path)),
        ready=lambda: path.exists() and len(_pids(path)) == 2,
        grace_seconds=2,
    )
    with Supervisor([child], log_directory=tmp_path):
        pids = _pids(path)
        assert all(map(_alive, pids))
    wait_until(lambda: not any(map(_alive, pids)), "all processes are gone")


def test_remaining_processes_of_a_dead_childs_group_are_ended_before_its_restart(tmp_path):
    path = tmp_path / "pids"
    inner = SLEEPER.format(path=str(path))
    code = f"""
    import os, subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", {inner!r}])
    while not os.path.exists({str(path)!r}) or not open({str(path)!r}).read():
        time.sleep(0.02)
    """
    child = Child(name="careless", argv=_python(code))
    with Supervisor([child], log_directory=tmp_path, first_delay_seconds=0.05) as stack:
        wait_until(lambda: stack.num_starts("careless") == 2, "it starts again")
        wait_until(lambda: not _alive(_pids(path)[0]), "the remaining process is gone")


def _supervising_process(path: Path, logs: Path) -> subprocess.Popen[bytes]:
    """A separate process that supervises a child with a grandchild until it is stopped.

    A shell that runs the tests in the background makes them ignore SIGINT, so the process sets its default again.
    """
    code = f"""
    import pathlib, signal, sys, threading
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from turnwise.processes.supervisor import Child, Supervisor
    path = pathlib.Path({str(path)!r})
    ready = lambda: path.exists() and len(path.read_text().splitlines()) == 2
    child = Child(name="family", argv=[sys.executable, "-c", {_grandparent(path)!r}], ready=ready, grace_seconds=2)
    with Supervisor([child], log_directory=pathlib.Path({str(logs)!r})) as stack:
        print("ready", flush=True)
        stack.wait(threading.Event())
    """
    process = subprocess.Popen(_python(code), stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_supervisor_that_is_killed_or_interrupted(tmp_path, number):
    """`kill -9` runs no handler: the kernel signals the guards, and they end their groups."""
    path = tmp_path / "pids"
    process = _supervising_process(path, tmp_path)
    pids = _pids(path)
    assert all(map(_alive, pids))
    process.send_signal(number)
    process.wait(WAIT_SECONDS)
    process.stdout.close()
    wait_until(lambda: not any(map(_alive, pids)), "all processes are gone")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_killed_guard_ends_with_its_child_and_is_restarted(tmp_path):
    path = tmp_path / "pids"
    with Supervisor([_sleeper(path)], log_directory=tmp_path, first_delay_seconds=0.05) as stack:
        first = _pids(path)[0]
        os.kill(stack.pid("sleeper"), signal.SIGKILL)
        wait_until(lambda: len(_pids(path)) == 2, "it runs a second time")
        wait_until(lambda: not _alive(first), "the first process is gone")


def test_a_restart_that_was_asked_for_is_no_death(tmp_path):
    path, said = tmp_path / "pids", []
    say = lambda _, text: said.append(text)  # noqa: E731
    with Supervisor([_sleeper(path)], log_directory=tmp_path, say=say, max_quick_deaths=1) as stack:
        stack.restart("sleeper")
        wait_until(lambda: len(_pids(path)) == 2, "it runs a second time")
        wait_until(lambda: stack.state("sleeper") is ChildState.READY, "it is ready")
        stack.check()
    assert "stopped; starting it again" in said
    assert not any("died" in text for text in said)
