"""Which process of a trainer on several hosts is not heard any more."""

import pytest

from trainer.features import heartbeats
from trainer.features.heartbeats import BEAT_SECONDS, SILENT_SECONDS, Heartbeats


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


@pytest.fixture
def look(now):
    """Return what lets time pass while a process looks, and others count up; and returns what it has found."""

    def look(one, seconds, store, *others):
        found = None
        for _ in range(round(seconds / BEAT_SECONDS)):
            now[0] += BEAT_SECONDS
            for each in (*others, one) if store else ():
                each.beat(store, f"host-{each._rank}")
            found = one.problem()
        return found

    return look


def world(size=3):
    return [Heartbeats(rank, size, "host-0") for rank in range(size)]


def test_a_process_that_counts_up_no_more_is_named_with_its_host(look):
    store, (one, other, third) = OneStore(), world()
    assert look(one, 10, store, other, third) is None
    assert look(one, SILENT_SECONDS - BEAT_SECONDS, store, other) is None
    problem = look(one, 2 * BEAT_SECONDS, store, other)
    assert problem is not None
    assert problem.startswith("process 2 on 'host-2' of the trainer has not been heard")
    assert look(one, BEAT_SECONDS, store, other, third) is None


def test_a_store_that_does_not_answer_is_named_with_its_host(look):
    alone, _ = world(2)
    assert look(alone, SILENT_SECONDS, None) is None
    problem = look(alone, BEAT_SECONDS, None)
    assert problem is not None
    assert problem.startswith("torchrun's store on 'host-0' has not answered")


def test_a_process_that_was_stopped_itself_calls_no_other_silent(look, now):
    """As its host was swapped out, or all of them were at once."""
    store, (one, other, third) = OneStore(), world()
    assert look(one, 10, store, other, third) is None
    now[0] += 10 * SILENT_SECONDS
    assert one.problem() is None
    assert look(one, BEAT_SECONDS, store, other, third) is None


def test_a_process_that_has_done_its_work_is_not_silent(look):
    """The others may write for longer, and are not to be ended."""
    store, (one, other, third) = OneStore(), world()
    assert look(one, 10, store, other, third) is None
    third.leave(store)
    assert look(one, 3 * SILENT_SECONDS, store, other) is None
    assert look(one, 10, store, other, third) is None  # started again
    assert look(one, 2 * SILENT_SECONDS, store, other) is not None
