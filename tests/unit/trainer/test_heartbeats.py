"""Which process of a trainer on several hosts is not heard any more."""

import pytest

from trainer.features import heartbeats
from trainer.features.heartbeats import SILENT_SECONDS, Heartbeats


class OneStore:
    """What processes share, in the place of torchrun's store."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._words: dict[str, str] = {}

    def add(self, key: str, amount: int) -> int:
        self._numbers[key] = self._numbers.get(key, 0) + amount
        return self._numbers[key]

    def set(self, key: str, value: str) -> None:
        self._words[key] = value

    def get(self, key: str) -> bytes:
        return self._words[key].encode()


@pytest.fixture
def now(monkeypatch):
    """A clock that each test sets: `now[0]`."""
    clock = [0.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: clock[0])
    return clock


def test_a_process_that_counts_up_no_more_is_named_with_its_host(now):
    store, one, other = OneStore(), Heartbeats(0, 3, "a"), Heartbeats(1, 3, "a")
    third = Heartbeats(2, 3, "a")
    third.beat(store, "host-c")
    for now[0] in (0.0, SILENT_SECONDS, SILENT_SECONDS + 1):
        other.beat(store, "host-b")
        one.beat(store, "host-a")
    problem = one.problem(now[0])
    assert problem is not None
    assert problem.startswith("process 2 on 'host-c' of the trainer has not been heard")
    third.beat(store, "host-c")
    one.beat(store, "host-a")
    assert one.problem(now[0]) is None


def test_a_store_that_does_not_answer_is_named_with_its_host(now):
    alone = Heartbeats(1, 2, "host-a")
    assert alone.problem(SILENT_SECONDS) is None
    now[0] = SILENT_SECONDS + 1
    problem = alone.problem(now[0])
    assert problem is not None
    assert problem.startswith("torchrun's store on 'host-a' has not answered")
