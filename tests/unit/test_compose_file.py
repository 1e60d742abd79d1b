"""Static rules of docker-compose.yml; `make compose-check` runs it."""

import contextlib
import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest
import yaml
from compose import compose_file
from compose.compose_file import COMPOSE_FILE, ROOT, Service
from support.commands import invoke

from turnwise.default_models import pretrained
from turnwise.engine_plugin import BACKEND, PLUGIN_GROUP
from turnwise.engine_plugin.__main__ import write_plugin
from turnwise.processes.engine_command import EngineSettings, build_command
from turnwise.store import keys
from turnwise.store.database import Database

FILLED_IN = {"MODEL_DIR": "/srv/model"}
DOCUMENT = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
PROFILES = ("gpu", "cpu")
ALL_SERVICES = [(profile, name) for profile in PROFILES for name in compose_file.services(profile, FILLED_IN)]

each_service = pytest.mark.parametrize(("profile", "name"), ALL_SERVICES)
each_profile = pytest.mark.parametrize("profile", PROFILES)


def service_of(profile: str, name: str) -> Service:
    return compose_file.services(profile, FILLED_IN)[name]


def networks_of(service: Service) -> set[str]:
    return set(service["networks"])


@pytest.mark.parametrize(
    ("profile", "order"),
    [
        ("gpu", ["secrets", "postgres", "migrate", "model", "engine", "proxy", "trainer"]),
        ("cpu", ["secrets", "postgres", "migrate", "model", "engine-cpu", "proxy", "trainer-cpu"]),
    ],
)
def test_each_profile_starts_its_services_one_after_the_other(profile, order):
    services = compose_file.services(profile, FILLED_IN)
    assert list(services) == order
    assert [list(service["depends_on"]) for service in services.values()] == [[], *([name] for name in order[:-1])]


@each_profile
def test_every_dependency_is_healthy_or_has_completed(profile):
    """A container that merely runs is not ready; only a one-shot may be waited for without a health check."""
    services = compose_file.services(profile, FILLED_IN)
    for service in services.values():
        for dependency, condition in service["depends_on"].items():
            one_shot = services[dependency]["restart"] == "no"
            assert condition == ("service_completed_successfully" if one_shot else "service_healthy")
            assert one_shot or "healthcheck" in services[dependency]


@each_profile
def test_only_the_proxy_is_published_and_on_loopback_alone(profile):
    """Everything else is unreachable, because the engine's control routes have no authentication."""
    services = compose_file.services(profile, FILLED_IN)
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "proxy": ["127.0.0.1:8100:8100"]
    }


@each_service
def test_only_the_proxy_is_on_a_network_with_external_access(profile, name):
    open_networks = {name for name, network in DOCUMENT["networks"].items() if not network.get("internal")}
    assert open_networks == {"edge"}
    assert ("edge" in networks_of(service_of(profile, name))) == (name == "proxy")
    assert "private" in networks_of(service_of(profile, name))


@each_service
def test_every_container_is_locked_down(profile, name):
    service = service_of(profile, name)
    user = re.fullmatch(r"(\d+):(\d+)", service["user"])
    assert int(user[1]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}, "a log that grows fills the disk"
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices", "userns_mode"}
    assert re.fullmatch(r"\d+g", service["mem_limit"]), "a service that leaks takes the memory of all others"


def test_engine_and_trainer_see_their_own_gpus_alone():
    """Docker joins the indexes with commas. Inside the container they start from 0, so no variable may choose again."""
    services = compose_file.services("gpu", FILLED_IN | {"ENGINE_GPU": "0,1", "TRAINER_GPU": "2"})
    reserved = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in services.items()
        if "deploy" in service
    }
    assert reserved == {
        name: [{"driver": "nvidia", "device_ids": [indexes], "capabilities": ["gpu"]}]
        for name, indexes in (("engine", "0,1"), ("trainer", "2"))
    }
    assert not any("CUDA_VISIBLE_DEVICES" in service.get("environment", {}) for service in services.values())


@each_profile
def test_limits_of_memory_have_defaults_and_can_be_set(profile):
    variables = {f"{name}_MEMORY": f"{at}g" for at, name in enumerate(("PROXY", "ENGINE", "TRAINER", "POSTGRES"))}
    for given, limits in (({}, {"4g", "32g", "64g"}), (variables, {"0g", "1g", "2g", "3g"})):
        services = compose_file.services(profile, FILLED_IN | given)
        assert {service["mem_limit"] for service in services.values() if service["restart"] != "no"} == limits


def test_the_engines_are_vllms_own_images_of_one_release():
    """The flags, and the logprobs that they give, were measured with this release."""
    images = {name: service_of(profile, name)["image"] for profile, name in ALL_SERVICES if "engine" in name}
    assert images == {"engine": "vllm/vllm-openai:v0.32.0", "engine-cpu": "vllm/vllm-openai-cpu:v0.32.0"}


@each_profile
def test_the_engines_flags_are_those_of_turnwise_engine(profile):
    """The container runs the command that `turnwise engine --dry-run` prints, with the share of the GPU added.

    vLLM's images have no package of Turnwise, so their engines read weights from directories.
    """
    name = "engine" if profile == "gpu" else "engine-cpu"
    service = service_of(profile, name)
    settings = EngineSettings(
        model="/models/policy",
        served_model_name="policy",
        host="0.0.0.0",
        allow_remote=True,
        device="gpu" if profile == "gpu" else "cpu",
        weight_transfer=False,
        kv_cache_bytes=512 * 2**20,  # 11 calls of the longest kind of the model that is served by default
    )
    wanted = build_command(settings)
    flags = list(wanted.argv[wanted.argv.index("/models/policy") + 1 :])
    share = ["--gpu-memory-utilization", "0.4", "--tensor-parallel-size", "1"] if profile == "gpu" else []
    assert shlex.split(service["command"]) == ["/models/policy", *flags, *share]
    assert wanted.environment.items() <= service["environment"].items() | {("HF_HUB_OFFLINE", "1")}


def test_the_engine_on_a_cpu_loads_the_plugin_that_the_model_service_writes(tmp_path):
    """Without it a tied output head stays old after a reload, and each version is refused."""
    services = compose_file.services("cpu", FILLED_IN)
    assert "plugin:/plugin" in services["model"]["volumes"]
    assert services["model"]["command"][0].endswith("python3 -m turnwise.engine_plugin /plugin")
    assert "plugin:/plugin:ro" in services["engine-cpu"]["volumes"]
    assert services["engine-cpu"]["environment"]["PYTHONPATH"] == "/plugin"
    for _ in range(2):
        write_plugin(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    ours = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=BACKEND)
    assert [point.value for point in found.entry_points] == [point.value for point in ours]
    assert (tmp_path / "turnwise" / "engine_plugin" / "features" / "cpu_kernels.py").is_file()


@each_profile
def test_policies_are_written_by_the_trainer_and_read_by_the_others_under_one_uid(profile):
    """Weight files are written readable to their owner alone, so readers must be that owner, on read-only mounts."""
    services = compose_file.services(profile, FILLED_IN)
    mounts = {
        name: volume
        for name, service in services.items()
        for volume in service.get("volumes", [])
        if volume.startswith("policies:")
    }
    engine, trainer = ("engine", "trainer") if profile == "gpu" else ("engine-cpu", "trainer-cpu")
    # The migration writes nothing there: it mounts the volume first, which gives the volume its owner.
    writable = {"migrate", trainer}
    assert {name: mount.endswith(":ro") for name, mount in mounts.items()} == {
        "migrate": False,
        engine: True,
        "proxy": True,
        trainer: False,
    }
    assert writable < mounts.keys()
    assert len({services[name]["user"] for name in mounts}) == 1


@each_profile
def test_every_variable_has_a_default(profile):
    """A fresh clone starts without settings; the model's default is the volume of the demo's model."""
    assert None not in compose_file.variables().values()
    services = compose_file.services(profile, {})
    assert "demo-model:/models/policy" in services["model"]["volumes"]
    assert (ROOT / ".env").read_text(encoding="utf-8").count("\nCOMPOSE_PROFILES=cpu\n") == 1


@each_profile
def test_the_databases_password_is_in_files_that_few_services_mount(profile):
    """It is made by `secrets`, read by the server from its file, and by clients from libpq's."""
    services = compose_file.services(profile, FILLED_IN)
    mounts = {
        name: [v for v in service.get("volumes", []) if v.startswith("secrets:")] for name, service in services.items()
    }
    trainer = "trainer" if profile == "gpu" else "trainer-cpu"
    assert {name for name, found in mounts.items() if found} == {"secrets", "postgres", "migrate", "proxy", trainer}
    assert [name for name, found in mounts.items() if found == ["secrets:/secrets"]] == ["secrets"]
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == "/secrets/database-password"
    for name in ("migrate", "proxy", trainer):
        assert services[name]["environment"]["PGPASSFILE"] == "/secrets/pgpass"
    assert [name for name, s in services.items() if any("operator:" in v for v in s.get("volumes", []))] == ["migrate"]


def test_no_variable_of_the_file_is_a_secret():
    """A variable would be on a command line, in an environment, or in a file of the clone."""
    assert not [name for name in compose_file.variables() if "PASSWORD" in name or "KEY" in name]


@each_service
def test_the_commands_are_commands_of_this_release(profile, name, monkeypatch):
    """Every flag is known and every setting fits: the command resolves its settings as it would when it starts."""
    service = service_of(profile, name)
    if "TURNWISE_IMAGE" not in DOCUMENT["services"][name]["image"] or name == "model":
        return
    for variable, value in service.get("environment", {}).items():
        monkeypatch.setenv(variable, value)
    mounted = {place: source for source, place, *_ in (volume.split(":") for volume in service["volumes"])}
    arguments = [
        str(ROOT / mounted[word]) if word.endswith(".toml") else word for word in shlex.split(service["command"])
    ]
    rehearsal = "--help" if name in {"secrets", "migrate"} else "--dry-run"
    result = invoke(*arguments, rehearsal)
    assert result.exit_code == 0, result.output


def test_no_shipped_file_names_a_registry():
    """The operator chooses the source of images and packages."""
    shipped = [
        COMPOSE_FILE,
        ROOT / "Dockerfile",
        ROOT / ".env",
        *Path(ROOT / "tests/compose/recipes").iterdir(),
    ]
    for path in shipped:
        assert not re.search(
            r"https?://(?!engine|127\.0\.0\.1)|\b[\w-]+\.(io|com|org|ai)/", path.read_text(encoding="utf-8")
        )


def test_the_build_context_is_an_allow_list():
    """A secret in a checkout does not get into the image."""
    lines = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] not in {"", "#"}
    ]
    assert lines[0] == "*"
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert named == {name for line in copied for name in line.split()}, "what is copied, and nothing else"


def test_the_image_installs_the_versions_that_are_known_to_work_together():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install (.+)", text)
    assert installs
    assert all(each.startswith(("--constraint constraints.txt ", "--no-deps ")) for each in installs)
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", text, flags=re.MULTILINE)
    assert torch in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_the_databases_password_is_created_once_for_server_and_clients(tmp_path):
    assert invoke("db", "make-password", str(tmp_path)).exit_code == 0
    password = (tmp_path / "database-password").read_text()
    assert len(password) == 64
    assert (tmp_path / "pgpass").read_text() == f"postgres:5432:turnwise:turnwise:{password}\n"
    assert (_mode(tmp_path / "database-password"), _mode(tmp_path / "pgpass")) == (0o640, 0o600)
    again = invoke("db", "make-password", str(tmp_path))
    assert "has a password already" in again.output
    assert (tmp_path / "database-password").read_text() == password
    assert password not in again.output
    assert len(list(tmp_path.iterdir())) == 2


def test_a_start_that_was_killed_between_the_two_files_is_completed_by_the_next(tmp_path):
    (tmp_path / "database-password").write_text("kept")
    invoke("db", "make-password", str(tmp_path), "--host", "db", "--user", "me", "--name", "mine", "--port", "1")
    assert (tmp_path / "pgpass").read_text() == "db:1:mine:me:kept\n"


def test_the_first_admin_key_is_created_once_printed_once_and_stored_for_its_owner(tmp_path):
    file = tmp_path / "admin-key"
    upgrade = ["db", "upgrade", "--database", f"sqlite:///{tmp_path}/x.db", "--admin-key-file", str(file)]
    first = invoke(*upgrade)
    key = file.read_text().strip()
    assert key.startswith("tw-")
    assert first.output.count(key) == 1
    assert _mode(file) == 0o600
    second = invoke(*upgrade)
    assert (second.exit_code, "tw-" in second.output) == (0, False)
    assert file.read_text().strip() == key


def test_a_key_that_the_operator_chose_is_the_first_admin_key_and_is_not_printed(tmp_path):
    """A mounted secret is known to the operator, so no log has to show it."""
    file, url = tmp_path / "admin-key", f"sqlite:///{tmp_path}/x.db"
    key = f"tw-{'0a' * 8}-{'b' * 64}"
    file.write_text(f"{key}\n")
    assert key not in invoke("db", "upgrade", "--database", url, "--admin-key-file", str(file)).output
    with contextlib.closing(Database(url)) as database, database.read() as conn:
        found = keys.verify_key(conn, key)
    assert found.role == keys.KeyRole("admin")


def test_a_file_with_something_else_than_a_key_is_refused(tmp_path):
    file = tmp_path / "admin-key"
    file.write_text("tw-short")
    upgrade = ["db", "upgrade", "--database", f"sqlite:///{tmp_path}/x.db", "--admin-key-file", str(file)]
    refused = invoke(*upgrade)
    assert refused.exit_code != 0
    assert "openssl rand" in refused.output


def test_a_directory_with_a_model_is_not_changed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert pretrained.write_pretrained(tmp_path) == tmp_path
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
