"""The services of docker-compose.yml, run as processes: their own commands, environments, health checks and order.

Containers need an engine that not every machine has. What they run needs none, so a flag that is gone, a setting that
is misspelt or a wrong order is found here.
"""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compose import compose_file
from compose.check import TRAIN_CONFIG
from compose.compose_file import Service
from compose.deadline import wait_until
from compose.play import GROUP_SIZE, NUM_GROUPS, Proxy, play
from support.ports import free_port
from support.private_postgres import PrivatePostgres
from support.waiting import WAIT_SECONDS

from turnwise.processes.stack import command
from turnwise.processes.supervisor import Child, ChildState, Supervisor
from turnwise.settings import child_environment

pytestmark = pytest.mark.postgres

PROGRAMS = {
    # The `vllm` command looks up a distribution that the CPU build lacks; the image's entrypoint is `vllm serve`.
    "engine-cpu": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"],
}
"""Entrypoints of images that are not ours."""


class Processes:
    """Turns services into processes: names, paths and ports of the containers become this machine's."""

    def __init__(self, model_dir: Path, directory: Path, database_url: str) -> None:
        self.engine_port, self.proxy_port = free_port(), free_port()
        self._database_url = database_url
        self._places = {
            "http://engine:8000": f"http://127.0.0.1:{self.engine_port}",
            "127.0.0.1:8000": f"127.0.0.1:{self.engine_port}",
            "127.0.0.1:8100": f"127.0.0.1:{self.proxy_port}",
            "--port 8000": f"--port {self.engine_port}",
            "--port 8100": f"--port {self.proxy_port}",
            # The engine's control routes have no authentication: it listens on loopback only.
            "/models/policy --served-model-name policy --host 0.0.0.0": f"{model_dir} --served-model-name policy",
            "/models/policy": str(model_dir),
            "/policies": str(directory / "policies"),
            "/operator": str(directory / "operator"),
            "/etc/turnwise/train.toml": str(TRAIN_CONFIG),
        }

    def fake_engine(self, name: str, service: Service) -> Child:
        argv = command("fake-engine", "--port", str(self.engine_port), "--model", "policy")
        return Child(name=name, argv=argv, ready=self._health_check(service))

    def child(self, name: str, service: Service) -> Child:
        words = shlex.split(self._here(service["command"]))
        environment = {
            key: self._database_url if key.endswith("_DATABASE") else value
            for key, value in service["environment"].items()
            if key not in {"HOME", "USER", "PYTHONPATH"}
        }
        return Child(
            name=name,
            argv=[*PROGRAMS[name], *words] if name in PROGRAMS else command(*words),
            env=environment,
            ready=self._health_check(service),
        )

    def _health_check(self, service: Service) -> Callable[[], bool] | None:
        if "healthcheck" not in service:
            return None
        kind, program, *arguments = service["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python3")
        argv = [sys.executable, *(self._here(argument) for argument in arguments)]
        return lambda: subprocess.run(argv, capture_output=True, timeout=WAIT_SECONDS, check=False).returncode == 0

    def _here(self, text: str) -> str:
        for container_path, local_path in self._places.items():
            text = text.replace(container_path, local_path)
        return text


@pytest.fixture
def database_url(postgres_server: PrivatePostgres) -> str:
    return postgres_server.url(postgres_server.create_database())


@pytest.mark.parametrize("vllm", [False, pytest.param(True, marks=[pytest.mark.engine, pytest.mark.slow])])
def test_the_services_commands_serve_and_train_when_started_in_the_files_order(
    small_model_dir, database_url, tmp_path, vllm
):
    """Migrate, serve, reward, train and reload with nothing but the commands of the compose file.

    The short form has a fake engine, whose logprobs are not the model's: it ends when the trainer waits for groups.
    """
    services = compose_file.services("cpu", {"MODEL_DIR": str(small_model_dir)})
    processes = Processes(small_model_dir, tmp_path, database_url)
    # The test has its own database server and password, and the model exists already.
    elsewhere = {"secrets", "postgres", "model"}
    children = [
        processes.fake_engine(name, service) if name == "engine-cpu" and not vllm else processes.child(name, service)
        for name, service in services.items()
        if name not in {*elsewhere, "migrate"}
    ]
    (tmp_path / "operator").mkdir()
    migrate = processes.child("migrate", services["migrate"])
    with (tmp_path / "migrate.log").open("wb") as log:
        subprocess.run(migrate.argv, env=child_environment(migrate.env), stdout=log, stderr=log, check=True)

    with Supervisor(children, log_directory=tmp_path) as running:
        key = (tmp_path / "operator" / "admin-key").read_text().strip()
        assert key in (tmp_path / "migrate.log").read_text()
        proxy = Proxy(f"http://127.0.0.1:{processes.proxy_port}", key)
        if not vllm:
            call = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}
            assert proxy.ask("/v1/chat/completions", call)["choices"][0]["message"]["content"]
            assert wait_until("the status of the trainer", 180.0, lambda: proxy.ask("/v1/counts")["trainers"])
            return
        played = play(proxy, running.check)
        assert running.state("trainer-cpu") is ChildState.READY

    assert len(played.rewards) == NUM_GROUPS * GROUP_SIZE
    assert played.version_before == 0
    assert played.version_after > 0
    assert (tmp_path / "policies" / f"v{played.version_after:06d}" / "model.safetensors").is_file()
