"""`turnwise up`: its checks before any start, the processes that it starts, and how other commands find it."""

import importlib
import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.commands import invoke

from trainer.features import Settings
from turnwise.commands import place as location
from turnwise.commands import preflight
from turnwise.commands.features.doctor import engine_urls
from turnwise.commands.place import RunningStack, at_running_proxy, find_running_stack
from turnwise.commands.preflight import check_database_model
from turnwise.commands.up import _takes_adapter, announced, make_key
from turnwise.default_models import pretrained
from turnwise.errors import SettingsError
from turnwise.processes import engine_command
from turnwise.processes.engine_command import EngineSettings
from turnwise.processes.ports import free_port
from turnwise.processes.stack import SHOWN_LOGGERS, GpuPlan, UpSettings
from turnwise.rewards.settings import RewardSettings
from turnwise.rollouts.settings import RunSettings

PASSWORD_URL = "postgresql://turnwise:swordfish@db/turnwise"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_command, "packages_problem", lambda: None)
    monkeypatch.setenv("TURNWISE_UP_PORT", str(free_port()))  # a proxy of the user's may listen on the default one


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return str(directory)


def _refused(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert not Path("runs").exists()
    return result.stderr


def test_a_taken_port_is_found_before_anything_starts(model):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert f"the proxy cannot listen on 127.0.0.1:{port}" in _refused("up", "--model", model, "--port", port)
        assert f"the engine cannot listen on 127.0.0.1:{port}" in _refused(
            "up", "--model", model, "--engine-port", port, "--port", "8199"
        )


@pytest.mark.parametrize(("installed", "name"), [(True, "SmolLM2-135M-Instruct"), (False, "model")])
def test_without_a_model_the_pretrained_one_is_served_if_it_is_installed(monkeypatch, installed, name):
    """A newcomer's first reply makes sense; without the package, the demo's small model is built."""
    monkeypatch.setattr(pretrained, "is_installed", lambda: installed)
    commands = json.loads(invoke("up", "--dry-run", "--json").output)["commands"]
    assert commands["engine"][commands["engine"].index("--model") + 1] == f"runs/up/{name}"


@pytest.mark.parametrize("wrong", ["nowhere/at/all", "./nowhere", "model/typo"])
def test_a_wrong_model_path_is_found_before_anything_starts(model, wrong):
    assert f"there is no model directory {wrong.removeprefix('./')!r}" in _refused("up", "--model", wrong)


def test_another_model_over_the_same_database_is_refused_and_a_copy_of_the_model_is_not(model, tmp_path):
    """The trainer would claim token ids of the other model, and engines would load its versions."""
    check_database_model("sqlite:///turnwise.db", model)
    copy = shutil.copytree(model, tmp_path / "copy")
    check_database_model("sqlite:///turnwise.db", str(copy))
    (copy / "tokenizer.json").write_text("{}")
    refusal = _refused("up", "--model", str(copy), "--port", "8199", "--no-trainer")
    assert f"the database belongs to the model {model!r}" in refusal
    assert "turnwise up --database URL --runs-dir DIR" in refusal
    assert f"belongs to the model {model!r}" in _refused("train", "--model", str(copy))


def test_a_wrong_setting_of_any_part_is_found_before_anything_starts(model):
    for section, line in (("trainer", "learning_rte = 1"), ("proxy", "prot = 1"), ("engine", "lroa = true")):
        Path("turnwise.toml").write_text(f"[{section}]\n{line}\n")
        assert f"[{section}] has no setting {line.split()[0]!r}" in _refused("up", "--model", model)


def test_a_missing_package_of_the_trainer_is_found_before_anything_starts(model, monkeypatch):
    Path("turnwise.toml").write_text('[trainer]\nrecorders = {tensorboard = "runs/board"}\n')
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    assert "pip install tensorboard" in _refused("up", "--model", model)


def test_a_length_that_vllm_computes_otherwise_than_the_trainer_is_refused_with_a_trainer_alone(model):
    Path(model, "config.json").write_text('{"model_type": "cohere2", "sliding_window": 64}')
    Path(model, "chat_template.jinja").unlink()
    Path("turnwise.toml").write_text("[engine]\nmax_model_len = 65\n")
    assert "with max_model_len=65 vLLM computes the model" in _refused("up", "--model", model)
    assert "has no chat template" in _refused("up", "--model", model, "--no-trainer")  # the next check


def test_a_model_without_a_chat_template_is_refused_and_the_database_still_takes_another(model):
    Path(model, "chat_template.jinja").unlink()
    assert "has no chat template" in _refused("up", "--model", model, "--no-trainer")
    assert json.loads(invoke("policies", "--json").output) == []


def test_a_non_loopback_address_needs_a_key(model):
    options = ("--model", model, "--host", "0.0.0.0", "--port", "8199", "--no-trainer")
    assert "turnwise keys create" in _refused("up", *options)


def test_the_databases_password_is_on_no_command_line_and_in_no_dry_run():
    result = invoke("up", "--dry-run", "--json", "--model", "owner/name", "--database", PASSWORD_URL)
    assert result.exit_code == 0, result.output
    assert "swordfish" not in result.output
    assert "swordfish" not in invoke("up", "--dry-run", "--model", "owner/name", "--database", PASSWORD_URL).output


def test_a_lora_trainer_enables_adapters_in_the_engine():
    Path("turnwise.toml").write_text('[trainer]\nkind = "lora"\nlora_rank = 32\n')
    commands = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name").output)["commands"]
    assert commands["engine"][-3:] == ["--lora", "--max-lora-rank", "32"]
    Path("turnwise.toml").unlink()
    commands = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name", "--kind", "lora").output)
    assert commands["commands"]["trainer"][-2:] == ["--kind", "lora"]


@pytest.mark.parametrize(("settings", "flags"), [("", ["3600"]), ("[proxy]\nengine_wait_seconds = 7\n", [])])
def test_calls_wait_as_long_as_an_engine_may_take_to_start_unless_a_setting_says_otherwise(settings, flags):
    Path("turnwise.toml").write_text(settings)
    argv = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name").output)["commands"]["proxy"]
    assert argv[argv.index("--engine-wait-seconds") + 1 :] == flags if flags else "--engine-wait-seconds" not in argv


def test_engines_that_sleep_are_started_with_sleep_mode_before_the_users_flags_and_the_proxy_brings_them_to_sleep():
    Path("turnwise.toml").write_text('[trainer]\nkind = "lora"\nengine_sleep_level = 1\n')
    flags = ("--", "--block-size", "16")
    commands = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name", *flags).output)["commands"]
    assert commands["engine"][-5:] == ["16", "--", "--enable-sleep-mode", "--block-size", "16"]
    assert commands["proxy"][-1] == "--engine-sleep"
    commands = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name", "--no-trainer").output)[
        "commands"
    ]
    assert not any("sleep" in word for argv in commands.values() for word in argv)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_interrupts_the_start_and_the_run_of_a_background_job(model, monkeypatch, number):
    """A shell starts background jobs with SIGINT ignored."""
    monkeypatch.setattr(preflight, "check_database_model", lambda *_: signal.raise_signal(number))
    before = signal.signal(number, signal.SIG_IGN)
    try:
        stopped = invoke("up", "--model", model, "--no-trainer")
    finally:
        signal.signal(number, before)
    assert "everything is stopped" in stopped.output


def test_engines_on_a_cpu_cannot_sleep(model, monkeypatch):
    monkeypatch.setattr(engine_command, "num_gpus", lambda: 0)
    Path("turnwise.toml").write_text("[trainer]\nengine_sleep_level = 1\n")
    assert "engine_sleep_level in [trainer] needs engines on a GPU" in _refused("up", "--model", model)


def test_all_parts_read_the_settings_file_that_up_was_given(tmp_path):
    (tmp_path / "all.toml").write_text("[up]\nengine_port = 8111\n[proxy]\nmax_images = 2\n")
    output = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name", "--config", "all.toml").output)
    assert output["settings"]["engine_port"] == 8111
    assert all(argv[argv.index("--config") + 1] == "all.toml" for argv in output["commands"].values())


def test_eight_gpus_are_used_by_four_engines_and_a_trainer_of_four_processes(monkeypatch):
    monkeypatch.setattr(engine_command, "num_gpus", lambda: 8)
    commands = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name").output)["commands"]
    assert list(commands) == ["engine-0", "engine-1", "engine-2", "engine-3", "proxy", "trainer"]
    assert commands["proxy"].count("--engine") == 4
    assert commands["engine-3"][-2:] == ["--gpus", "3"]
    assert commands["trainer"][1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert commands["trainer"][-1] == "--multi-devices"


PLANS = [
    (0, {}, {}, GpuPlan(((),), (), None)),
    # One GPU is shared by memory: 0.4 for the engine, the rest for weights, gradients and AdamW's moments.
    (1, {}, {}, GpuPlan(((0,),), (0,), 0.4)),
    (1, {"trainer": False}, {}, GpuPlan(((0,),), (), None)),
    (1, {}, {"gpu_memory": 0.3}, GpuPlan(((0,),), (0,), 0.3)),
    (2, {}, {}, GpuPlan(((0,),), (1,), None)),
    (3, {}, {}, GpuPlan(((0,),), (1, 2), None)),
    (8, {}, {"tensor_parallel": 4}, GpuPlan(((0, 1, 2, 3),), (4, 5, 6, 7), None)),
    (8, {}, {"tensor_parallel": 2}, GpuPlan(((0, 1), (2, 3)), (4, 5, 6, 7), None)),
    (4, {"trainer_gpus": [0]}, {}, GpuPlan(((1,), (2,), (3,)), (0,), None)),
    (4, {"engine_gpus": [3]}, {}, GpuPlan(((3,),), (0, 1, 2), None)),
    (2, {"engine_gpus": [0, 1], "trainer_gpus": [0, 1]}, {}, GpuPlan(((0,), (1,)), (0, 1), 0.4)),
]


@pytest.mark.parametrize(("num_gpus", "given", "of_engine", "plan"), PLANS)
def test_gpus_are_divided_between_engines_and_trainer(num_gpus, given, of_engine, plan):
    assert UpSettings(**given).gpu_plan(num_gpus, EngineSettings(model="m", **of_engine)) == plan


@pytest.mark.parametrize(
    ("num_gpus", "given", "of_engine", "message"),
    [
        (2, {"trainer_gpus": [2]}, {}, "there is no GPU 2: this machine has 2"),
        (0, {"engine_gpus": [0]}, {}, "there is no GPU 0: this machine has 0"),
        (6, {}, {"tensor_parallel": 2}, "3 GPUs for engines cannot be divided into groups of 2"),
    ],
)
def test_gpus_that_do_not_fit_the_machine_are_refused(num_gpus, given, of_engine, message):
    with pytest.raises(SettingsError, match=message):
        UpSettings(**given).gpu_plan(num_gpus, EngineSettings(model="m", **of_engine))


RUNNING = RunningStack(os.getpid(), "sqlite:///used.db", "http://127.0.0.1:8123", ["http://127.0.0.1:8124"])


def test_other_commands_find_the_database_and_the_engines_of_the_running_up(tmp_path):
    with announced(RUNNING), location.opened(RUNNING.database):
        assert location.database_url(None) == "sqlite:///used.db"
        assert engine_urls(()) == (["http://127.0.0.1:8124"], [])
        assert location.STATE_FILE.stat().st_mode & 0o077 == 0
        assert json.loads(invoke("sessions", "--json").output) == []
    assert not (tmp_path / "turnwise.db").exists()
    assert not location.STATE_FILE.exists()
    assert location.database_url(None) == "sqlite:///turnwise.db"


def test_run_and_reward_use_the_proxy_of_the_running_up_unless_they_name_one():
    with announced(RUNNING):
        assert at_running_proxy(RunSettings()).url == RUNNING.proxy
        assert at_running_proxy(RewardSettings.model_construct()).url == RUNNING.proxy
        assert at_running_proxy(RunSettings(url="http://there:1")).url == "http://there:1"
    assert at_running_proxy(RunSettings()).url == "http://127.0.0.1:8100"


def test_up_makes_one_key_for_the_databases_of_its_directory(tmp_path):
    """Readable to its owner alone. What is no key, or is revoked, is replaced; another's key is never taken."""
    first, second = (f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second"))
    key = make_key(first)
    assert location.KEY_FILE.read_text() == f"{key}\n"
    assert location.KEY_FILE.stat().st_mode & 0o777 == 0o600
    location.KEY_FILE.chmod(0o644)
    assert make_key(first) == make_key(second) == key
    assert location.KEY_FILE.stat().st_mode & 0o777 == 0o600
    for database in (first, second):
        listed = json.loads(invoke("keys", "list", "--database", database, "--json").output)
        assert [(each["tenant"], each["role"], each["name"]) for each in listed] == [
            ("default", "admin", "turnwise up")
        ]
    invoke("keys", "revoke", listed[0]["key_id"], "--database", second)
    fresh = make_key(second)
    assert fresh != key
    location.KEY_FILE.write_text("no key\n")
    assert make_key(first) not in (key, fresh, "no key")
    agents = json.loads(invoke("keys", "create", "--database", first, "--json").output)["key"]
    location.KEY_FILE.write_text(agents)
    assert make_key(first) != agents
    location.KEY_FILE.unlink()


def test_the_key_of_up_goes_to_its_own_proxy_alone(tmp_path):
    make_key(f"sqlite:///{tmp_path}/turnwise.db")
    key = location.stored_key()
    assert at_running_proxy(RunSettings()).api_key is None  # nothing runs here
    with announced(RUNNING):
        judge = RewardSettings(source="judge", judge_model="m")
        for settings in (RunSettings(), RunSettings(url=f"{RUNNING.proxy}/v1/"), judge):
            assert at_running_proxy(settings).api_key.get_secret_value() == key
        assert at_running_proxy(RunSettings(api_key="tw-own")).api_key.get_secret_value() == "tw-own"
        for other in ("http://there:1", "http://127.0.0.1:81234", f"{RUNNING.proxy}.example", "http://127.0.0.1:8124"):
            assert at_running_proxy(RunSettings(url=other)).api_key is None, other
    location.KEY_FILE.unlink()


def test_run_and_reward_take_address_and_key_from_the_variables_of_all_commands(monkeypatch):
    monkeypatch.setenv("TURNWISE_URL", "http://shared:1")
    monkeypatch.setenv("TURNWISE_API_KEY", "tw-shared")
    for settings in (RunSettings(), RewardSettings(source="judge", judge_model="m")):
        found = at_running_proxy(settings)
        assert (found.url, found.api_key.get_secret_value()) == ("http://shared:1", "tw-shared")
    named = at_running_proxy(RunSettings(url="http://there:1", api_key="tw-own"))
    assert (named.url, named.api_key.get_secret_value()) == ("http://there:1", "tw-own")


def test_a_dry_run_plans_gpus_that_this_machine_does_not_have():
    given = "[up]\nengine_gpus = [0, 1]\ntrainer_gpus = [2, 3]\n[engine]\ntensor_parallel = 2\n"
    Path("turnwise.toml").write_text(given)
    output = invoke("up", "--dry-run", "--model", "owner/name")
    Path("turnwise.toml").unlink()
    assert output.exit_code == 0, output.output
    assert "# trainer, on GPU 2,3\n" in output.output
    assert "--gpus 0 --gpus 1\n" in output.output
    assert "--nproc-per-node 2" in output.output


@pytest.fixture
def four_billion(model: str) -> str:
    """Give the model weights of 4e9 bfloat16 numbers, in a file without blocks on the disk."""
    head = json.dumps({"w": {"dtype": "BF16", "shape": [40_000, 100_000], "data_offsets": [0, 8 * 10**9]}}).encode()
    with Path(model, "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + 8 * 10**9)
    return model


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        # Of one GPU of 80 GB the engine has 0.4; 16 bytes a parameter are 64 GB, and a frozen one has 4 bytes.
        ("", "the trainer (kind='full') needs at least 64.0 GB of each of its GPUs, and has 48.0 GB there; set kind="),
        (
            'kind = "lora"',
            "the trainer (kind='lora') needs at least 16.0 GB of each of its GPUs, and has 48.0 GB there",
        ),
        # Weights and gradients of 4 bytes; then 2 bytes each, beside masters and moments on the host.
        ('optimizer_state = "host"', "the trainer (kind='full') needs at least 32.0 GB"),
        ('optimizer_state = "host"\nweights_dtype = "bfloat16"', "the trainer (kind='full') needs at least 16.0 GB"),
    ],
)
def test_a_dry_run_compares_what_a_kind_needs_with_the_memory_of_the_gpus(four_billion, monkeypatch, settings, trainer):
    monkeypatch.setattr(engine_command, "num_gpus", lambda: 1)
    monkeypatch.setattr(engine_command, "gpu_bytes", lambda: [80 * 10**9])
    Path("turnwise.toml").write_text(f"[trainer]\n{settings}\n")
    result = invoke("up", "--dry-run", "--model", four_billion)
    assert trainer in result.output
    is_refused = "set kind=" in trainer
    engine = "# engine memory: an engine needs at least 8.0 GB of each of its GPUs, and has 32.0 GB there"
    assert (result.exit_code, engine in result.output) == (2 if is_refused else 0, not is_refused)


def test_flags_of_vllm_may_make_a_model_smaller(four_billion, monkeypatch):
    monkeypatch.setattr(engine_command, "num_gpus", lambda: 1)
    monkeypatch.setattr(engine_command, "gpu_bytes", lambda: [8 * 10**9])
    options = ("up", "--dry-run", "--model", four_billion, "--no-trainer")
    assert "an engine needs at least 8.0 GB of each of its GPUs, and has 7.4 GB there" in _refused(*options)
    assert invoke(*options, "--", "--quantization", "fp8").exit_code == 0


SHARED, APART = GpuPlan(((0,),), (0,), 0.4), GpuPlan(((0,),), (1,), None)


@pytest.mark.parametrize(
    ("plan", "size", "chosen", "reason"),
    [
        (SHARED, 100, {}, "engine and trainer share GPU 0"),
        (SHARED, 100, {"kind": "full"}, None),
        (SHARED, 100, {"kind": "lora"}, None),
        (APART, 100, {}, None),
        (APART, 2_000_000_000, {}, "the model has 2.0 billion parameters"),
        (GpuPlan(((),), (), None), 100, {}, None),
    ],
)
def test_an_adapter_is_offered_where_all_weights_are_many_or_share_a_gpu(
    monkeypatch, model, plan, size, chosen, reason
):
    monkeypatch.setattr(preflight, "_num_parameters", lambda _: size)
    assert preflight.lora_offer(plan, model, Settings(model=model, **chosen)) == reason


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_takes_the_adapter_by_return_and_a_script_is_not_asked(monkeypatch, capsys):
    for typed, taken in ((Terminal("\n"), True), (Terminal("n\n"), False), (io.StringIO(""), False)):
        monkeypatch.setattr(sys, "stdin", typed)
        assert _takes_adapter("engine and trainer share GPU 0") is taken
    assert "engine and trainer share GPU 0: an adapter (--kind lora)" in capsys.readouterr().out


def test_a_flag_and_a_setting_of_the_proxy_override_the_running_up(monkeypatch):
    with announced(RUNNING):
        assert location.database_url("sqlite:///flag.db") == "sqlite:///flag.db"
        monkeypatch.setenv("TURNWISE_PROXY_DATABASE", "sqlite:///mine.db")
        assert location.database_url(None) == "sqlite:///mine.db"


def test_the_database_of_the_settings_file_is_used_while_nothing_runs():
    Path("turnwise.toml").write_text('[up]\ndatabase = "sqlite:///configured.db"\n')
    assert location.database_url(None) == "sqlite:///configured.db"


def test_a_second_up_in_the_same_directory_is_refused(model):
    code = (
        "import sys; from turnwise.commands.up import *\n"
        "with announced(RunningStack(1, 'sqlite:///x.db', 'http://a', [])): print('ready', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        assert "runs in this directory already" in _refused("up", "--model", model)
        process.kill()
        process.wait()
        assert location.STATE_FILE.exists()  # nothing removed it
        assert find_running_stack() is None


def test_up_keeps_none_of_the_memory_of_its_checks(model):
    """The trainer's settings load torch: a quarter of a gigabyte, which a supervisor needs at no time."""
    code = """
        import signal, sys
        from turnwise.commands import preflight
        from turnwise.commands.cli import main
        from turnwise.processes import engine_command
        engine_command.packages_problem = lambda: None
        preflight.check_database_model = lambda *_: signal.raise_signal(signal.SIGINT)
        main(["up", "--model", sys.argv[1], "--port", sys.argv[2]], standalone_mode=False)
        print("torch" in sys.modules)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), model, str(free_port())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", [name for names in SHOWN_LOGGERS.values() for name in names])
def test_a_logger_whose_lines_the_terminal_shows_is_that_of_a_module(name):
    """A module that moves takes its name along; the terminal must go on to show what the trainer waits for."""
    assert importlib.import_module(name).log.name == name
