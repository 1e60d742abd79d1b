"""The state of processes that divide a model is resumed bit for bit, also by another number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gloo_worlds import run_world
from support.tiny_models import load_model, make_model
from support.world_tasks import held_after_resume, resume_and_train, write_first_process_last
from torch import Tensor


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    changes = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    return {"model": str(make_model(tmp_path_factory.mktemp("models") / "model", **changes))}


def run(size: int, spec: dict[str, object], directory: Path, start: int, stop: int) -> tuple[dict, dict]:
    if size == 1:
        return resume_and_train(spec, directory, start, stop)
    return run_world(size, resume_and_train, spec, directory, start, stop, is_sharded=True)[0]


def assert_bitwise_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize(
    ("size", "division", "steps"),
    [
        (2, {"tensor_parallel": 2}, 1),
        *(
            pytest.param(4, division, 2, marks=pytest.mark.slow)
            for division in (
                {"tensor_parallel": 2},
                {"context_parallel": 2},
                {"replicas": 2, "tensor_parallel": 2},
                {"tensor_parallel": 2, "context_parallel": 2},
            )
        ),
    ],
    ids=str,
)
def test_a_divided_run_resumes_bit_for_bit_and_one_process_reads_its_state(tmp_path, spec, size, division, steps):
    """Some steps, a state, new processes and as many steps give the weights and moments of all steps in a row."""
    _, straight = run(size, spec | division, tmp_path / "straight", 0, 2 * steps)
    _, written = run(size, spec | division, tmp_path / "resumed", 0, steps)
    read, resumed = run(size, spec | division, tmp_path / "resumed", steps, 2 * steps)
    assert_bitwise_equal(read, written)
    assert_bitwise_equal(resumed, straight)
    assert_bitwise_equal(run(1, spec, tmp_path / "resumed", 2 * steps, 2 * steps)[0], straight)


def test_no_process_writes_its_shards_before_the_first_one_has_cleared_the_directory(tmp_path):
    """A killed trainer may have left files there; shards that are written before they are removed would be lost."""
    assert all(run_world(2, write_first_process_last, tmp_path))
    assert (tmp_path / "v000001.trainer").is_dir()


@pytest.mark.slow
def test_each_process_of_a_resumed_run_holds_its_shards_and_does_not_read_the_base_model(tmp_path, spec):
    """Two processes hold half of the weights and of the moments each; only shards are read, by each process."""
    run(1, spec, tmp_path, 0, 1)
    whole = 3 * sum(weight.numel() for weight in load_model(spec["model"]).parameters())
    assert run_world(2, held_after_resume, spec, tmp_path, 1) == [whole // 2, whole // 2]


@pytest.mark.slow
def test_each_layout_reads_the_state_of_another_one_bit_for_bit(tmp_path, spec):
    """The weights after all of them are within 5e-5 of those of one uninterrupted process."""
    layouts = [
        (4, {"tensor_parallel": 2}),
        (4, {}),
        (2, {"context_parallel": 2}),
        (4, {"replicas": 2}),
        (1, {}),
        (2, {"tensor_parallel": 2}),
    ]
    written: dict[str, Tensor] = {}
    for step, (size, division) in enumerate(layouts):
        read, after = run(size, spec | division, tmp_path / "passed on", step, step + 1)
        if step:
            assert_bitwise_equal(read, written)
        written = after
    _, expected = run(1, spec, tmp_path / "one", 0, len(layouts))
    for name, value in expected.items():
        torch.testing.assert_close(written[name], value, atol=5e-5, rtol=0)
