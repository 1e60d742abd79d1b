"""Engines for tests: one real vLLM for the whole session, and fake ones, each as a fixture.

The real one serves the small model, built once into a cache directory; it starts when the first test asks for it and
ends with its process group.
"""

import contextlib
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.control_plane import ask
from support.ports import free_port
from support.servers import end_group, wait_ready
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import RunningFakeEngine, running_fake_engine

from turnwise.engine_plugin import BACKEND, PLUGIN_GROUP
from turnwise.processes.engine_command import EngineSettings, build_command, has_plugin

STOP_SECONDS = 10.0
WARM_UP_STEPS = 60
"""Enough for the model to use the tool format sometimes; the demo's model is trained longer."""


@dataclasses.dataclass(frozen=True)
class RunningEngine:
    url: str
    """Its base URL, without `/v1`."""
    model: str
    """Name under which it serves its model."""
    model_dir: Path
    log: Path
    pid: int


def small_model() -> Path:
    """Return a small model with tokenizer and chat template, built once and kept between runs.

    Its output head is tied to its embeddings, as in most small pretrained models: a load has to reach both.
    """
    from turnwise.default_models.small_model import SmallModelSpec, build_small_model

    spec = SmallModelSpec(num_warm_up_steps=WARM_UP_STEPS, tied=True)
    cache = Path(tempfile.gettempdir()) / f"turnwise-tests-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    return build_small_model(cache / spec.digest()[:16], spec)


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    return small_model()


@pytest.fixture(scope="session")
def engine(small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with running_engine(small_model_dir, log) as running:
        yield running


@contextlib.contextmanager
def running_engine(
    model_dir: Path, log: Path, *extra: str, environment: Mapping[str, str] | None = None, port: int = 0
) -> Iterator[RunningEngine]:
    """Run a real vLLM with our flags and `extra` ones, and with further variables, until the block ends."""
    served = {"served_model_name": "small", "lora": True, "weight_transfer": True}
    settings = EngineSettings(model=str(model_dir), port=port or free_port(), device="cpu", **served)
    command = build_command(settings, extra)
    plugin, further = plugin_environment(log.parent), dict(environment or {})
    variables = command.environment | plugin | further
    if paths := [each["PYTHONPATH"] for each in (plugin, further) if "PYTHONPATH" in each]:
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    assignments = [f"{name}={value}" for name, value in variables.items()]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["env", *assignments, *command.argv], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{settings.port}"
        wait_ready(f"{url}/health", process, log, WAIT_SECONDS)
        yield RunningEngine(url, "small", model_dir, log, process.pid)
    finally:
        end_group(process, STOP_SECONDS)


def plugin_environment(directory: Path) -> dict[str, str]:
    """Return the variables under which a vLLM finds our plugin, also where the installed metadata does not name it."""
    if has_plugin():
        return {}
    metadata = directory / "turnwise_plugin-0.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: turnwise-plugin\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\n{BACKEND} = turnwise.engine_plugin:register\n")
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": os.pathsep.join([str(directory), str(root)])}


def load_own_weights(engine: RunningEngine) -> None:
    """Restore the weights and the label that the shared engine started with, and unload its adapters."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(engine.model_dir)}}
    ask(engine.url, "/pause?mode=keep", {})
    ask(engine.url, "/collective_rpc", load)
    ask(engine.url, "/update_weight_version", {"new_version": "default"})
    ask(engine.url, "/resume", {})
    for model in ask(engine.url, "/v1/models")["data"]:
        if model["parent"] is not None:
            ask(engine.url, "/v1/unload_lora_adapter", {"lora_name": model["id"]})


@pytest.fixture
def base_weights(engine: RunningEngine) -> Iterator[None]:
    load_own_weights(engine)
    yield
    load_own_weights(engine)


@pytest.fixture
def fake_engine() -> Iterator[RunningFakeEngine]:
    with running_fake_engine() as running:
        yield running
