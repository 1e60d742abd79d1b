"""The directory of the versions belongs to one trainer, and no kill leaves it without a complete version."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import save_file
from support.full_disk import no_file_over
from support.migrated import new_database
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train
from torch.distributed.checkpoint import state_dict_saver

from trainer.features.devices import Processes
from trainer.publish.checkpoint import Checkpoints
from trainer.workflows import OnPolicyWorkflow
from turnwise.errors import BadCheckpoint, Conflict, NotWritten, SettingsError
from turnwise.features.page.updates import list_updates
from turnwise.store import versions
from turnwise.store.schema import groups
from turnwise.version_directory import find_versions

HOLDS_AND_DIES = """
import pathlib, sys
from trainer.publish.checkpoint import Checkpoints
held = Checkpoints(pathlib.Path(sys.argv[1]), keep=1)
held.open()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "policies"


def test_a_second_trainer_on_the_same_directory_is_refused_until_the_first_one_is_killed(place):
    """It removes nothing: what the first one is writing looks like what a killed trainer left."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_AND_DIES, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "held\n"
        (place / ".writing-v000001").mkdir()
        second = Checkpoints(place, keep=1)
        with pytest.raises(SettingsError, match="another trainer uses policies_dir"):
            second.open()
        assert (place / ".writing-v000001").exists()
        first.send_signal(signal.SIGKILL)
        first.wait()
        second.open()
    assert not (place / ".writing-v000001").exists()
    second.close()


def test_a_trainer_that_is_started_twice_ends_with_a_sentence_and_leaves_the_first_ones_groups(tmp_path, model, ledger):
    """Under the same trainer_id it would otherwise take them back, and the first one would lose its batch."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, total_batches=1)
    first = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = first.setup(0)
    claimed = first.claims.next(state.progress)
    second = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    with pytest.raises(SettingsError, match="another trainer uses policies_dir"):
        second.setup(0)
    second.close()
    _, state = first._train(state, *first.updates.refilled(claimed, state, first.patience))
    assert state.progress.policy_version == 1
    first.close()


@pytest.mark.parametrize("second_id", ["trainer", "second"])
def test_of_two_trainers_in_two_directories_one_ends_and_each_group_is_in_the_weights_of_the_other(
    tmp_path, model, ledger, second_id
):
    """Both start from the base model before there is an update, so each would train on without the other's groups."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    settings = settings_for(tmp_path, model, total_batches=2, wait_seconds=None)
    first = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    of_first = first.setup(0)
    other = {"policies_dir": tmp_path / "other", "trainer_id": second_id, "total_batches": 1, "checkpoint_every": 2}
    second = OnPolicyWorkflow.build_from_config(settings.model_copy(update=other), enable_jit=False)
    of_second = second.setup(0)
    _, of_second = second.step(of_second)
    _, of_first = first.step(of_first)
    first.commits.flush(of_first)
    with pytest.raises(Conflict, match="two trainers train one policy"):
        second.commits.flush(of_second)
    second.close()
    first.learn(of_first)
    first.close()
    with ledger.read() as connection:
        found, _ = versions.list_versions(connection)
        updates, _ = list_updates(connection)
        counts = connection.execute(sa.select(groups.c.status, sa.func.count()).group_by(groups.c.status)).all()
    assert [(one.version, one.status.value) for one in found] == [
        (3, "published"),
        (2, "published"),
        (1, "failed"),
        (0, "published"),
    ]
    assert (found[2].error or "").startswith(versions.OVERTAKEN)
    assert [update.policy_version for update in updates] == [3, 2]
    assert counts == [("trained", 6)]


def test_a_database_that_is_older_than_the_versions_on_disk_removes_none_of_them(tmp_path, model, ledger):
    """As with the name of another run's database, or a backup: one newer version is a crash's, two are not."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    train(settings_for(tmp_path, model, total_batches=2))
    for version in ("v000004", "v000004.trainer"):
        shutil.copytree(tmp_path / "policies" / version.replace("4", "2"), tmp_path / "policies" / version)
    with pytest.raises(SettingsError, match="holds versions up to 4, but the database knows none after 2"):
        train(settings_for(tmp_path, model, total_batches=3))
    assert find_versions(tmp_path / "policies") == [1, 2, 4]
    new_database(tmp_path / "other.db").close()
    with pytest.raises(SettingsError, match="holds versions up to 4, but the database knows none after 0"):
        train(settings_for(tmp_path, model, database=f"sqlite:///{tmp_path / 'other.db'}"))
    for version in ("v000004", "v000004.trainer"):
        (tmp_path / "policies" / version).rename(tmp_path / "policies" / version.replace("4", "3"))
    train(settings_for(tmp_path, model, total_batches=2))
    assert find_versions(tmp_path / "policies") == [1, 2]
    assert (tmp_path / "policies" / "unpublished-v000003" / "model.safetensors").is_file()
    assert (tmp_path / "policies" / "unpublished-v000003.trainer").is_dir()


@pytest.mark.parametrize("what", ["version", "values", "tensors"])
def test_a_write_that_fails_is_one_sentence_whatever_library_writes_and_leaves_no_part(place, what):
    """It is no error that lasts: `turnwise up` starts the trainer again, when there may be space."""
    checkpoints, large = Checkpoints(place, keep=1), {"w": torch.zeros(100_000)}
    write = {
        "version": lambda: checkpoints.write_policy(1, lambda staging: save_file(large, staging / "weights"), {}),
        "values": lambda: checkpoints.write_state(1, large, {}),
        "tensors": lambda: checkpoints.write_state(1, {}, {"model": large}),
    }[what]
    checkpoints.open()
    with no_file_over(50_000), pytest.raises(NotWritten, match=r"v000001.* on '.+' cannot be written: .* MiB are"):
        write()
    assert sorted(found.name for found in place.iterdir()) == [".lock"]
    checkpoints.close()


def test_crashes_leave_one_version_that_is_set_aside_and_no_other_start_removes_it(place):
    for crash in ("first", "second"):
        checkpoints = Checkpoints(place, keep=1)
        checkpoints.open()
        checkpoints.write_policy(1, lambda staging: (staging / "model.safetensors").write_text(crash), {})  # noqa: B023
        checkpoints.discard_after(0)
        checkpoints.discard_after(0)
        (aside,) = place.glob("unpublished-*")
        assert (aside.name, (aside / "model.safetensors").read_text()) == ("unpublished-v000001", crash)
        checkpoints.close()


def test_a_state_that_is_written_again_is_on_disk_at_each_moment(place, monkeypatch):
    """Killed at any rename, the next trainer finds the old state or the new one."""
    checkpoints = Checkpoints(place, keep=1)
    checkpoints.open()
    checkpoints.write_state(1, {"count": 1}, {"w": torch.zeros(1)})
    found: list[int] = []
    replace = Path.replace

    def killed_before(self: Path, target: Path) -> Path:
        if place not in self.parents:  # of the trainer that starts again
            return replace(self, target)
        copy = place.parent / f"killed-{len(found)}"
        shutil.copytree(place, copy)
        (copy / ".lock").unlink()
        restarted = Checkpoints(copy, keep=1)
        restarted.open()
        found.append(restarted.read_state(1)["count"])
        restarted.close()
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed_before)
        checkpoints.write_state(1, {"count": 2}, {"w": torch.zeros(1)})
    # Before the old one is moved aside, before the new one takes its place, and at the pointer `latest`.
    assert found == [1, 1, 2]
    assert checkpoints.read_state(1)["count"] == 2
    assert not list(place.glob(".replaced-*"))
    checkpoints.close()


class TwoProcesses(Processes):
    """The first of two processes, whose second one sees another directory or the same."""

    def __init__(self, is_shared_there: bool) -> None:
        self.rank, self.size = 0, 2
        self._is_shared_there = is_shared_there

    def share(self, item: object) -> object:
        return item

    def gather(self, item: tuple[str, str, bool]) -> list[tuple[str, str, bool]]:
        return [item, ("host-b", "/b", self._is_shared_there)]


def test_where_processes_do_not_see_one_directory_the_first_one_keeps_all_and_says_so(place, caplog):
    first = Checkpoints(place, keep=1)
    first.open()
    TwoProcesses(is_shared_there=True).check_shared(place)
    assert not caplog.records
    apart = TwoProcesses(is_shared_there=False)
    apart.check_shared(place)
    assert "policies_dir '/b' of process 1 on 'host-b' is not the one of the first process on" in caplog.text
    assert f"keeps all versions and states alone in {str(place)!r}:" in caplog.text
    weights = {"w": torch.ones(2)}
    first.write_state(1, {}, apart.to_write(weights), apart.background_group)
    apart.rank = 1
    assert apart.to_write(weights) is None
    with no_file_over(0), pytest.raises(NotWritten, match=r"\.shared' on '.+' cannot be written: .*too large"):
        TwoProcesses(is_shared_there=True).check_shared(place)
    first.close()


@pytest.mark.parametrize(("kind", "waits"), [("ext4", False), ("nfs4", True), (None, True)])
def test_a_file_that_a_local_directory_does_not_have_is_not_waited_for(place, monkeypatch, tmp_path, kind, waits):
    """It cannot come from another machine. What a network file system shows late is waited for, and of an unknown."""
    device, mounts, waited = tmp_path.stat().st_dev, tmp_path / "mountinfo", []
    if kind is not None:
        numbers = f"{os.major(device)}:{os.minor(device)}"
        mounts.write_text(f"22 1 0:21 / /proc rw - proc proc rw\n23 1 {numbers} / / rw shared:1 - {kind} disk rw\n")
    monkeypatch.setattr("trainer.features.own_directories.MOUNTS", mounts)
    monkeypatch.setattr("trainer.features.devices.comes_true", lambda check: waited.append(check()))
    second = TwoProcesses(is_shared_there=True)
    second.rank = 1
    second.check_shared(place)
    assert (second.is_apart, len(waited)) == (True, waits)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 10)])
def test_a_state_counts_as_written_only_once_every_processs_shards_are_there(place, monkeypatch, damage):
    """Here they are lost between the processes' writing and the first one's look."""
    save = state_dict_saver.save

    def save_elsewhere(tensors, checkpoint_id, **options):
        save(tensors, checkpoint_id=checkpoint_id, **options)
        damage(next(Path(checkpoint_id).glob("*.distcp")))

    monkeypatch.setattr("trainer.publish.checkpoint.SHARED_SECONDS", 0.0)
    monkeypatch.setattr(state_dict_saver, "save", save_elsewhere)
    checkpoints = Checkpoints(place, keep=1)
    with pytest.raises(BadCheckpoint, match="which another process wrote, is not here: its machine saw"):
        checkpoints.write_state(1, {}, {"w": torch.ones(64)})
    assert not checkpoints.has_state(1)
