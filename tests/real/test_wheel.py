"""The wheel in an environment of its own, beside a vLLM: `turnwise up` serves and trains there without a checkout."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import httpx2
import pytest
from support.ports import free_port
from support.running_trainer import GROUPS, play_group, wait_for_version
from support.servers import end_group, wait_ready
from support.waiting import WAIT_SECONDS

from turnwise import __version__
from turnwise.client import Client

pytestmark = pytest.mark.slow  # a build, and an engine of its own

ROOT = Path(__file__).parents[2]
INSTALLED = os.environ.get("TURNWISE_INSTALLED")
SETTINGS = f"""
[engine]
served_model_name = "small"
[trainer]
groups_per_batch = {GROUPS}
learning_rate = 0.01
max_staleness = 100
num_threads = 1
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with Turnwise from its wheel; what it depends on, and vLLM, is found in the tests' own.

    `make release` names an environment that has everything itself, and lets `up` serve the model that it builds.
    """
    if INSTALLED is not None:
        return Path(INSTALLED).absolute()
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(directory), str(ROOT)], check=True)
    (wheel,) = directory.glob("turnwise-*.whl")
    made = directory / "environment"
    venv.create(made)
    at = [*pip, "--python", str(made / "bin" / "python")]
    subprocess.run([*at, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return made


def run(environment: Path, *words: str, cwd: Path, **variables: str) -> str:
    """Run a program of the environment to its end, without a path to this checkout, and return what it printed."""
    argv = [str(environment / "bin" / words[0]), *words[1:]]
    given = _variables() | variables
    done = subprocess.run(argv, cwd=cwd, env=given, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_every_package_comes_from_the_wheel_and_its_extras_are_satisfied_beside_vllm(environment, tmp_path):
    names = ("turnwise", "proxy", "trainer", "migrations", "turnwise_fake_engine")
    code = f"import {', '.join(names)}; print(*({', '.join(f'{name}.__file__' for name in names)}))"
    found = run(environment, "python", "-c", code, cwd=tmp_path).split()
    assert [Path(file).is_relative_to(environment) for file in found] == [True] * len(names), found
    pip = (sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-index")
    wanted = f"turnwise[proxy,trainer]=={__version__}"
    done = subprocess.run(
        [*pip, "--dry-run", wanted], cwd=tmp_path, env=_variables(), capture_output=True, text=True, check=True
    )
    assert "Would install" not in done.stdout, done.stdout
    assert run(environment, "turnwise", "--version", cwd=tmp_path) == f"turnwise, version {__version__}\n"
    words = {"_TURNWISE_COMPLETE": "bash_complete", "COMP_WORDS": "turnwise doc", "COMP_CWORD": "1"}
    assert run(environment, "turnwise", cwd=tmp_path, **words) == "plain,doctor\n"
    assert json.loads(run(environment, "turnwise", "fake-engine", "--port", "1", "--dry-run", cwd=tmp_path))


def test_up_serves_the_page_and_trains_a_version_that_the_engine_takes_from_memory(
    environment, small_model_dir, tmp_path
):
    port = free_port()
    (tmp_path / "turnwise.toml").write_text(SETTINGS)
    command = [str(environment / "bin" / "turnwise"), "up", "--port", str(port)]
    command += [] if INSTALLED else ["--model", str(small_model_dir)]
    log, url = tmp_path / "up.log", f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=_variables(), stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_ready(f"{url}/readyz", process, log, 4 * WAIT_SECONDS)  # it may build its model first
        assert "<title>Turnwise</title>" in httpx2.get(f"{url}/").text
        for name in ("app.js", "style.css", "vendor/uPlot.iife.min.js"):
            assert httpx2.get(f"{url}/web/{name}").status_code == 200, name
        logs = tmp_path / "runs" / "up" / "logs"
        key = (tmp_path / ".turnwise-key").read_text().strip()
        with Client(url, key) as client:
            for number in range(GROUPS):
                play_group(client, number)
            served = wait_for_version(client, 1, logs / "trainer.log")
        assert Path(served["path"]).is_relative_to(tmp_path)
        assert "weight_transfer_config" in (logs / "engine.log").read_text(), "vLLM has not loaded the plug-in"
        verdicts = json.loads(run(environment, "turnwise", "doctor", "--json", cwd=tmp_path))
        assert not [each for each in verdicts if each["verdict"] == "fail"]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()
    finally:
        end_group(process)
    assert "everything is stopped" in log.read_text()
