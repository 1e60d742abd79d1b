"""A short storm on each database; `make chaos` runs longer."""

import pytest
from chaos import invariants
from chaos.storm import Storm
from chaos.world import world

SEED = 9


@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_no_fault_loses_duplicates_crosses_or_blocks_a_turn(kind, seconds, tmp_path):
    directory = tmp_path / "world"
    directory.mkdir()
    with world(kind, directory) as running:
        report = Storm(running, SEED, print).run(seconds)
    print(report.summary)
    assert not report.violations, invariants.shortened(report.violations)
