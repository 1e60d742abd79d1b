import importlib.machinery
import sys
import types
from pathlib import Path

import pytest

from trainer.features.recorders import ProgressLine, TensorBoard, Trackio, WeightsAndBiases
from trainer.train import ChainRecorder, JsonLines
from turnwise.errors import SettingsError

LINES = [
    ({"update": 1, "loss": 0.5, "grad_norm": None}, 1),
    ({"update": 2, "loss": 0.25}, 1),
    ({"loss": 0.375, "reward_mean": 0.75, "refused": "why", "is_odd": True}, 1),
    ({"eval/reward_mean": 0.5}, 1),
]
"""What a workflow records of one batch of two optimizer steps, and of an evaluation."""


def record(recorder) -> None:
    for scalars, step in LINES:
        recorder.write(scalars, step)


def test_a_recorder_that_fails_stops_neither_the_training_nor_the_other_recorders(tmp_path, caplog):
    """Here the file is on a full disk, to which nothing can be written."""
    chain = ChainRecorder([JsonLines(Path("/dev/full")), JsonLines(tmp_path / "trainer.jsonl")])
    record(chain)
    assert chain.num_lost == len(LINES)
    assert len((tmp_path / "trainer.jsonl").read_text().splitlines()) == len(LINES)
    assert "JsonLines did not record step 1 (4 records are lost so far): OSError: [Errno 28]" in caplog.text


class FailsToClose(JsonLines):
    def close(self) -> None:
        raise OSError("no space left on device")


class Closable(JsonLines):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_recorder_that_cannot_be_closed_neither_ends_the_run_in_an_error_nor_keeps_others_open(tmp_path, caplog):
    other = Closable(tmp_path / "other.jsonl")
    ChainRecorder([FailsToClose(tmp_path / "trainer.jsonl"), other]).close()
    assert other.is_closed
    assert "FailsToClose was not closed and may have lost its last records: OSError: no space left" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_keeps_optimizer_steps_apart_from_batches(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = TensorBoard(tmp_path)
    record(recorder)
    recorder.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {
        "update/loss": [(1, 0.5), (2, 0.25)],
        "loss": [(1, 0.375)],
        "reward_mean": [(1, 0.75)],
        "eval/reward_mean": [(1, 0.5)],
    }


@pytest.mark.parametrize(
    ("name", "recorder", "of_run", "ids"),
    [("wandb", WeightsAndBiases, "id", [None, "abc123"]), ("trackio", Trackio, "name", None)],
)
def test_a_restarted_trainer_continues_its_tracked_run(tmp_path, monkeypatch, name, recorder, of_run, ids):
    """A stand-in of the package: the second start resumes the run of the first one, by the id or name in its file."""
    starts, lines = [], []

    def init(**options):
        starts.append(options)
        nothing = lambda *_, **__: None  # noqa: E731
        return types.SimpleNamespace(id="abc123", log=lines.append, finish=nothing, define_metric=nothing)

    package = types.ModuleType(name)
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)
    package.init = init
    monkeypatch.setitem(sys.modules, name, package)
    for _ in range(2):
        tracked = recorder("project", {"seed": 0}, tmp_path / "policies" / f"{name}-run.txt")
        record(tracked)
        tracked.close()
    assert [start[of_run] for start in starts] == (ids or [starts[0]["name"]] * 2)
    assert (starts[1]["project"], starts[1]["config"], starts[1]["resume"]) == ("project", {"seed": 0}, "allow")
    assert {"update/loss": 0.25, "update/number": 2} in lines
    assert any(line.get("batch") == 1 and line.get("loss") == 0.375 for line in lines)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard", TensorBoard),
        ("wandb", lambda place: WeightsAndBiases("project", {}, place / "run.txt")),
        ("trackio", lambda place: Trackio("project", {}, place / "run.txt")),
    ],
)
def test_the_error_for_a_recorder_without_its_package_names_the_package(tmp_path, monkeypatch, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(SettingsError, match=f"pip install {package}"):
        make(tmp_path)


def test_a_batch_is_one_log_line_with_version_reward_groups_and_seconds(caplog):
    caplog.set_level("INFO")
    record(ProgressLine())
    batch = {"policy_version": 7, "reward_mean": 0.53125, "num_groups": 32, "num_refused_groups": 4, "seconds": 12.345}
    for changes in ({"entropy": 1.5, "num_sessions": 224}, {"num_single_sessions": 32}, {"num_single_sessions": 24}):
        ProgressLine().write(batch | changes, 7)
    assert [one.getMessage() for one in caplog.records] == [
        "evaluation after batch 1: eval/reward_mean 0.5",
        "batch 7: version 7, reward 0.531, 28 of 32 groups trained, 12.3 s; entropy 1.5",
        "batch 7: version 7, reward 0.531, 28 of 32 single sessions trained, 12.3 s; ",
        "batch 7: version 7, reward 0.531, 28 of 32 groups and single sessions trained, 12.3 s; ",
    ]
