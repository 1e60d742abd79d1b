"""Hosts that train together: network namespaces with an address and a name each, on one switch."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.full_disk import filled, small_disk
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, write_settings
from support.waiting import WAIT_SECONDS, wait_until

from trainer.features.devices import check_address
from turnwise.errors import SettingsError
from turnwise.features.page import overview
from turnwise.features.page.updates import list_updates
from turnwise.store import updates

PORT = 29431
ADDRESSES = {"host-a": "10.199.77.1", "host-b": "10.199.77.2", "host-c": "10.199.77.3"}
HOSTS = list(ADDRESSES)
SWITCH = "host-switch"
CABLE = "cable"
"""Name of the interface on each machine."""
PROGRAM = """
import sys
from pathlib import Path
from trainer.main import run
from trainer.features import Settings, heartbeats
from trainer.publish import checkpoint
from turnwise.settings import load_settings
heartbeats.SILENT_SECONDS = float(sys.argv[2])
checkpoint.SHARED_SECONDS = 1.0
sys.exit(run(load_settings(Settings, config=Path(sys.argv[1]), section="trainer", overrides={})))
"""


def test_a_host_name_of_loopback_is_refused_where_there_are_several_machines(monkeypatch):
    """Gloo would give this address to the other machines, and all would wait."""
    several = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    found = [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 0)), (socket.AF_INET6, 0, 0, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    with pytest.raises(SettingsError, match=r"resolves to 127.0.1.1, ::1, .* set GLOO_SOCKET_IFNAME, and NCCL_SOCKET"):
        check_address(several)
    check_address(several | {"GLOO_SOCKET_IFNAME": "eth0"})
    check_address({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [*found, (socket.AF_INET, 0, 0, "", ("10.0.0.7", 0))])
    check_address(several)


class Machines:
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        (scratch / "program.py").write_text(PROGRAM)

    def connect(self, host: str, *, is_up: bool) -> None:
        """Let the switch pass on what comes from a host and for it, or drop it: no end of a connection is told."""
        ip("-n", SWITCH, "link", "set", host, *(["master", "bridge"] if is_up else ["nomaster"]))

    @contextlib.contextmanager
    def training(
        self, configs: dict[str, Path], silent_seconds: float = 60.0, **interfaces: str
    ) -> Iterator[dict[str, subprocess.Popen[str]]]:
        """Run one process of a trainer on each machine; what still runs after the block is killed."""
        processes = {}
        for host, config in configs.items():
            processes[host] = self._start(host, len(configs), [str(config), str(silent_seconds)], interfaces)
        try:
            yield processes
        finally:
            for host, process in processes.items():
                self.kill(host)
                process.wait()

    def kill(self, host: str) -> None:
        """End all processes of a machine; torchrun's have sessions of their own."""
        found = subprocess.run(
            ["ip", "netns", "pids", host], check=True, capture_output=True, text=True, timeout=WAIT_SECONDS
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _start(
        self, host: str, num_hosts: int, arguments: list[str], interfaces: dict[str, str]
    ) -> subprocess.Popen[str]:
        hosts = self._scratch / f"hosts-{host}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_hosts), "--nproc-per-node", "1"]
        launcher += ["--node-rank", str(HOSTS.index(host)), "--master-addr", ADDRESSES["host-a"]]
        launcher += ["--master-port", str(PORT), str(self._scratch / "program.py"), *arguments]
        as_host = f'mount --bind {hosts} /etc/hosts && hostname {host} && exec "$@"'
        with (self._scratch / f"log-{host}").open("w") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", host, "unshare", "--mount", "--uts", "sh", "-c", as_host, "sh", *launcher],
                env={**os.environ, **interfaces},
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def log(self, host: str) -> str:
        return (self._scratch / f"log-{host}").read_text()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=WAIT_SECONDS)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    try:
        for host in [SWITCH, *HOSTS]:
            ip("netns", "add", host)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr!r}")
    try:
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for host, address in ADDRESSES.items():
            ip("link", "add", CABLE, "netns", host, "type", "veth", "peer", "name", host, "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", host, "master", "bridge", "up")
            ip("-n", host, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", host, "link", "set", CABLE, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield Machines(tmp_path)
    finally:
        for host in [SWITCH, *HOSTS]:
            ip("netns", "del", host)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "policies") as place:
        yield place


class Run:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = make_model(directory / "model")
        self.db = new_database(directory / "ledger.db")

    def play(self, name: str) -> None:
        Rollouts(self.db, load_model(self._model)).play(name, num_groups=2)

    def num_batches(self) -> int:
        with self.db.read() as conn:
            last = updates.last_update(conn)
        return 0 if last is None else last.update_id

    def configs(self, policies: str, hosts: list[str], **more: int) -> dict[str, Path]:
        """Write the settings of each machine; `policies` is the directory, which may hold the host's name."""
        given = {"multi_devices": True, "groups_per_batch": 2, "weight_transfer": False, **more}
        return {
            host: write_settings(
                self._directory / f"{host}.toml",
                self._directory,
                self._model,
                policies_dir=str(self._directory / policies.format(host)),
                **given,
            )
            for host in hosts
        }


@pytest.mark.slow
def test_two_machines_say_what_they_lack_then_train_and_go_on_after_a_kill_a_cut_cable_and_a_full_disk(
    tmp_path, machines, disk
):
    """Each group is trained once, whatever ends which process."""
    run = Run(tmp_path)
    two = HOSTS[:2]
    run.play("first")
    named = {"GLOO_SOCKET_IFNAME": CABLE}
    together = run.configs("policies", two)
    with machines.training(together) as running:
        assert running["host-b"].wait(WAIT_SECONDS) != 0
    assert "the host name 'host-b' resolves to 127.0.1.1" in machines.log("host-b")
    assert "set GLOO_SOCKET_IFNAME" in machines.log("host-b")

    with machines.training(together, **named) as running:
        wait_until(lambda: run.num_batches() == 1, "the first batch is acknowledged")
        machines.kill("host-b")
        run.play("second")
        assert running["host-a"].wait(WAIT_SECONDS) != 0
    assert run.num_batches() == 1

    with machines.training(together, **named):
        wait_until(lambda: run.num_batches() == 2, "the batch of the killed trainer is acknowledged")
        machines.connect("host-a", is_up=False)
        run.play("third")
    assert run.num_batches() == 2

    machines.connect("host-a", is_up=True)
    with machines.training(together, **named) as running:
        wait_until(lambda: run.num_batches() == 3, "the batch of the trainer without a cable is acknowledged")
        with filled(disk):
            run.play("fourth")
            assert all(running[host].wait(WAIT_SECONDS) != 0 for host in two)
            assert re.search(
                rf"'{disk}/v000004' on 'host-a' cannot be written: .*No space left.*\. 0 MiB are free",
                machines.log("host-a"),
            )
    assert run.num_batches() == 3

    with machines.training(run.configs("policies", two, total_batches=4), **named) as running:
        assert [running[host].wait(WAIT_SECONDS) for host in two] == [0, 0], machines.log("host-a")[-3000:]
    with run.db.read() as conn:
        assert overview.count_rows(conn).groups == {"trained": 8}
        assert [record.update_id for record in list_updates(conn)[0]] == [4, 3, 2, 1]
    run.db.close()


@pytest.mark.slow
def test_machines_with_directories_of_their_own_train_and_go_on_after_a_kill_as_three_and_with_a_shared_one(
    tmp_path, machines
):
    """The first one's directory holds everything, and nothing is written on the others."""
    run = Run(tmp_path)
    run.play("first")
    named = {"GLOO_SOCKET_IFNAME": CABLE}
    with machines.training(run.configs("policies-{}", HOSTS[:2]), **named) as running:
        wait_until(lambda: run.num_batches() == 1, "the first batch is acknowledged")
        machines.kill("host-b")
        run.play("second")
        assert running["host-a"].wait(WAIT_SECONDS) != 0
    assert "of process 1 on 'host-b' is not the one of the first process on 'host-a', which keeps" in machines.log(
        "host-a"
    )

    for batch, (policies, hosts) in enumerate([("policies-{}", HOSTS), ("policies-host-a", HOSTS[:2])], start=2):
        run.play(f"of batch {batch}")
        with machines.training(run.configs(policies, hosts, total_batches=batch), **named) as running:
            assert [running[host].wait(WAIT_SECONDS) for host in hosts] == [0] * len(hosts), machines.log("host-a")
    with run.db.read() as conn:
        assert overview.count_rows(conn).groups == {"trained": 6, "ready": 2}
    assert sorted(place.name for place in tmp_path.glob("policies*")) == ["policies-host-a"]
    run.db.close()


@pytest.mark.slow
def test_three_hosts_end_and_name_the_one_that_the_network_drops_and_go_on_as_two_and_as_three(tmp_path, machines):
    """Nothing closes a connection here, and a collective operation would wait for ever."""
    run = Run(tmp_path)
    run.play("first")
    named = {"GLOO_SOCKET_IFNAME": CABLE}
    with machines.training(run.configs("policies", HOSTS), 10.0, **named) as running:
        wait_until(lambda: run.num_batches() == 1, "the first batch is acknowledged")
        machines.connect("host-c", is_up=False)
        run.play("second")
        assert all(running[host].wait(WAIT_SECONDS) != 0 for host in HOSTS)
    assert "process 2 on 'host-c' of the trainer has not been heard on 'host-a' for 10 s" in machines.log("host-a")
    assert "torchrun's store on '10.199.77.1' has not answered 'host-c' for 10 s" in machines.log("host-c")
    assert run.num_batches() == 1

    machines.connect("host-c", is_up=True)
    with machines.training(run.configs("policies", HOSTS[:2], total_batches=2), **named) as running:
        assert [process.wait(WAIT_SECONDS) for process in running.values()] == [0, 0], machines.log("host-a")[-3000:]
    run.play("third")
    with machines.training(run.configs("policies", HOSTS, total_batches=3), **named) as running:
        assert [process.wait(WAIT_SECONDS) for process in running.values()] == [0, 0, 0], machines.log("host-a")[-3000:]
    with run.db.read() as conn:
        assert overview.count_rows(conn).groups == {"trained": 6}
    run.db.close()
