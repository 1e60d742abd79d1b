"""A short storm on each database, and a small fleet that changes; `make chaos` runs longer."""

import pytest
from chaos import invariants
from chaos.fleet import fleet, play
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


@pytest.mark.postgres
def test_engines_and_hosts_that_come_and_go_fail_no_call_and_confuse_no_version(tmp_path):
    directory = tmp_path / "fleet"
    directory.mkdir()
    with fleet(directory, 6) as running:
        violations, summary = play(running, SEED, print, seconds=0.0, num_agents=24, every_seconds=1.0)
    print(summary)
    assert not violations, invariants.shortened(violations)
