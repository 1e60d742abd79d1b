"""Docker or podman, whichever this machine has, driven by their own command lines.

A compose implementation brings the compose file up unchanged. Podman without systemd never runs health checks by
itself, and podman-compose does not wait for them, so the services are started one by one in the file's own order.
"""

import abc
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compose.compose_file import COMPOSE_FILE, ROOT, Service
from compose.deadline import CheckError, wait_until

PROJECT = "turnwise-check"
"""Not the name in the file: a stack that runs on this machine must not be touched."""
START_SECONDS = 900.0
COMMAND_SECONDS = 180.0
MOST_RESTARTS = 3
"""The check fails after this number of restarts of a service."""
LABEL = f"label=com.docker.compose.project={PROJECT}"

STRICT_PODMAN = """\
#!/bin/sh
# podman-compose splits a command before it fills in variables: an unset one becomes an empty argument.
for word do shift && { [ -z "$word" ] || set -- "$@" "$word"; }; done
# Docker gives a read-only container no tmpfs that it did not ask for; podman would.
case "$1" in create | run) command="$1" && shift && set -- "$command" --read-only-tmpfs=false "$@" ;; esac
exec podman "$@"
"""
"""The program that podman-compose runs in place of podman."""

PODMAN_PROGRAMS = ("podman", "runc", "netavark", "aardvark-dns", "iptables", "debootstrap")
"""Programs; the packages of Debian have the same names."""
PROGRAM_PLACES = os.pathsep.join(
    (os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/lib/podman", "/usr/libexec/podman")
)


@dataclass(frozen=True)
class State:
    status: str
    """`running`, `exited` and so on."""
    exit_code: int
    health: str
    """`healthy`, `unhealthy`, `starting`; empty without a health check."""
    num_restarts: int
    """Number of restarts by the engine."""

    def __str__(self) -> str:
        detail = self.health or (f"exit status {self.exit_code}" if self.status == "exited" else "")
        restarts = f", {self.num_restarts} restarts" if self.num_restarts else ""
        return (f"{self.status} ({detail})" if detail else self.status) + restarts


class ContainerEngine(abc.ABC):
    program: str

    def __init__(self, compose_program: list[str], services: Mapping[str, Service], environment_file: Path) -> None:
        self._compose_program = compose_program
        self.services = services
        """The services of the profile, in start order."""
        self._environment_file = environment_file

    @abc.abstractmethod
    def start(self, names: list[str]) -> None:
        """Bring services up in the file's order, each when its dependencies are ready."""

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}

    def run(self, *arguments: str, seconds: float = COMMAND_SECONDS, check: bool = True) -> str:
        """Run the engine's program; return what it printed."""
        return self._execute([self.program, *arguments], seconds, check=check)

    def compose(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        options = ["--file", str(COMPOSE_FILE), "--project-name", PROJECT, "--env-file", str(self._environment_file)]
        return self._execute([*self._compose_program, *options, "--profile", "cpu", *arguments], seconds)

    def read_file(self, service: str, path: str) -> str:
        return self.compose("run", "--rm", "--no-deps", "-T", "--entrypoint", "cat", service, path).strip()

    def container(self, service: str) -> str | None:
        """Return the name of a service's container; None before it is made."""
        wanted = ["--filter", LABEL, "--filter", f"label=com.docker.compose.service={service}"]
        return self.run("ps", "--all", *wanted, "--format", "{{.Names}}").strip() or None

    def state(self, service: str) -> State | None:
        """Return a service's state; None without a container."""
        name = self.container(service)
        if name is None:
            return None
        found: dict[str, Any] = json.loads(self.run("inspect", name))[0]
        state = found["State"]
        health = (state.get("Health") or {}).get("Status") or ""
        return State(state["Status"], int(state["ExitCode"]), health, int(found.get("RestartCount", 0)))

    def log(self, service: str, lines: int = 60) -> str:
        name = self.container(service)
        if name is None:
            return f"(there is no container of {service})"
        return self._execute(
            ["sh", "-c", 'exec "$@" 2>&1', "sh", self.program, "logs", "--tail", str(lines), name], COMMAND_SECONDS
        )

    def wait_for(self, service: str, condition: str) -> None:
        """Wait until a service has the condition of another one's `depends_on`.

        Raises:
            CheckError: it is not in time, or can no longer be.
        """
        wait_until(f"{condition} of {service}", START_SECONDS, lambda: self._is(service, condition), service=service)

    def check_running(self) -> None:
        """Check that every long-running container has run without interruption.

        Raises:
            CheckError: a container ended, whether or not it was started again.
        """
        for service, description in self.services.items():
            state = self.state(service)
            stopped = state is None or state.status != "running" or state.num_restarts > 0
            if description["restart"] != "no" and stopped:
                raise CheckError(f"{service} did not stay up: {state}", service)

    def published_port(self) -> int:
        published: str = self.services["proxy"]["ports"][0]
        return int(published.split(":")[1])

    def _wait_for_health(self, names: list[str]) -> None:
        for name in names:
            if "healthcheck" in self.services[name]:
                self.wait_for(name, "service_healthy")

    def _is(self, service: str, condition: str) -> bool:
        state = self.state(service)
        if state is None:
            return False
        ended = state.status == "exited" and (condition != "service_completed_successfully" or state.exit_code != 0)
        if ended or state.num_restarts >= MOST_RESTARTS:
            raise CheckError(
                f"{service} ended with exit status {state.exit_code}, after {state.num_restarts} restarts", service
            )
        if condition == "service_healthy":
            return state.health == "healthy"
        return state.status == ("exited" if condition == "service_completed_successfully" else "running")

    def down(self) -> None:
        self.compose("down", seconds=START_SECONDS)

    def leftovers(self) -> dict[str, list[str]]:
        return {
            "containers": self.run("ps", "--all", "--filter", LABEL, "--format", "{{.Names}}").split(),
            "networks": self.run("network", "ls", "--filter", LABEL, "--format", "{{.Name}}").split(),
            "volumes": self.run("volume", "ls", "--filter", LABEL, "--format", "{{.Name}}").split(),
        }

    def remove_volumes(self) -> None:
        """Remove the volumes of this check, so that the next one starts from an empty state."""
        for name in self.leftovers()["volumes"]:
            self.run("volume", "rm", name)

    def _execute(self, command: list[str], seconds: float, *, check: bool = True) -> str:
        """Run a program to its end.

        Raises:
            CheckError: it failed or exceeded its time limit.
        """
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment(), capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CheckError(f"{_shown(command)} took longer than {seconds:.0f} s") from error
        if check and done.returncode != 0:
            raise CheckError(f"{_shown(command)} failed ({done.returncode}): {(done.stderr or done.stdout)[-4000:]}")
        return done.stdout


class Docker(ContainerEngine):
    program = "docker"

    def __init__(self, services: Mapping[str, Service], environment_file: Path) -> None:
        super().__init__(["docker", "compose"], services, environment_file)

    @staticmethod
    def answers() -> bool:
        if shutil.which("docker") is None:
            return False
        questions = (["docker", "info"], ["docker", "compose", "version"])
        return all(
            subprocess.run(each, capture_output=True, timeout=60, check=False).returncode == 0 for each in questions
        )

    def start(self, names: list[str]) -> None:
        self.compose("up", "--detach", *names, seconds=4 * START_SECONDS)
        self._wait_for_health(names)


class Podman(ContainerEngine):
    """Podman without systemd, with separate storage and settings, and podman-compose in its own environment."""

    program = "podman"

    def __init__(self, services: Mapping[str, Service], environment_file: Path, directory: Path) -> None:
        program = directory / "podman-compose" / "bin" / "podman-compose"
        wrapper = directory / "podman"
        super().__init__([str(program), "--in-pod=false", "--podman-path", str(wrapper)], services, environment_file)
        self._directory = directory
        self._write_settings()
        wrapper.write_text(STRICT_PODMAN, encoding="utf-8")
        wrapper.chmod(0o755)
        if not program.exists():
            venv.create(program.parents[1], with_pip=True)
            self._execute([str(program.with_name("pip")), "install", "--quiet", "podman-compose>=1.5"], COMMAND_SECONDS)

    @staticmethod
    def missing_packages() -> list[str]:
        return [program for program in PODMAN_PROGRAMS if not shutil.which(program, path=PROGRAM_PLACES)]

    def environment(self) -> dict[str, str]:
        names = {
            "CONTAINERS_CONF": "containers",
            "CONTAINERS_STORAGE_CONF": "storage",
            "CONTAINERS_REGISTRIES_CONF": "registries",
        }
        return super().environment() | {name: str(self._directory / f"{file}.conf") for name, file in names.items()}

    def start(self, names: list[str]) -> None:
        """Start one service after another, in the order of the file's `depends_on`."""
        for name in names:
            for dependency, condition in self.services[name]["depends_on"].items():
                self.wait_for(dependency, condition)
            self.compose("up", "--detach", "--no-deps", "--no-build", name)
        self._wait_for_health(names)

    def state(self, service: str) -> State | None:
        # Podman without systemd runs no health check by itself.
        name = self.container(service)
        if name is not None and "healthcheck" in self.services[service]:
            self.run("healthcheck", "run", name, check=False)
        return super().state(service)

    def _write_settings(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        contents = {
            # crun refuses mixed cgroups, and limits above the host's are refused by the kernel.
            "containers": (
                '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
                '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
                f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{self._directory}/networks"\n'
            ),
            "storage": (
                '[storage]\ndriver = "overlay"\n'
                f'graphroot = "{self._directory}/storage"\nrunroot = "{self._directory}/run"\n'
            ),
            "registries": "unqualified-search-registries = []\n",
        }
        for name, content in contents.items():
            (self._directory / f"{name}.conf").write_text(content, encoding="utf-8")


def _shown(command: list[str]) -> str:
    """Return a command without its long options."""
    return " ".join([Path(command[0]).name, *(word for word in command[1:] if word[:1] not in "-/")])


def install(packages: list[str]) -> None:
    """Install Debian packages; needs root."""
    print(f"installing {' '.join(packages)}", file=sys.stderr)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(
        ["apt-get", "update", "--quiet"], env=environment, timeout=600, check=True, stdout=subprocess.DEVNULL
    )
    command = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages]
    subprocess.run(command, env=environment, timeout=900, check=True, stdout=subprocess.DEVNULL)
