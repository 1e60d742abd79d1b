"""A fault point kills the process at the configured passage and at no other."""

from __future__ import annotations

from pathlib import Path

import pytest

import proxy
from proxy.fault import POINTS, FaultPoints


@pytest.mark.parametrize(
    ("where", "died_at"), [(None, None), ("", None), ("before_commit", 1), ("before_commit:3", 3), ("mid_stream", None)]
)
def test_a_point_kills_at_its_nth_passage(where, died_at):
    deaths = []
    passages = []
    faults = FaultPoints(where, die=lambda: deaths.append(len(passages)))
    for _ in range(5):
        passages.append("before_commit")
        faults.point("before_commit")
        faults.point("in_transaction")
    assert deaths == ([] if died_at is None else [died_at])


def test_every_point_is_passed_somewhere():
    """A test of a point that no code passes would never end."""
    code = "".join(path.read_text() for path in Path(proxy.__file__).parent.rglob("*.py"))
    for point in POINTS:
        assert f'.point("{point}")' in code
