"""Seconds in which engines served and ran calls, and the idle shares that follow from them."""

import datetime

import sqlalchemy as sa

from turnwise.features.page.activity import KEPT_MINUTES, Activity, add_activity, engine_minutes, idle_shares

ALL = (1 << 60) - 1
MINUTE = 29_000_000


def at(minute: int, second: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(60 * (MINUTE + minute) + second, datetime.UTC)


def bits(first: int, last: int) -> int:
    return sum(1 << second for second in range(first, last))


def test_the_seconds_of_several_processes_are_combined(database):
    with database.write() as connection:
        # Two processes sent calls to engine a, from second 0 to 15 and from 10 to 30; engine b ran none.
        add_activity(connection, {(MINUTE, "a"): Activity(ALL, bits(0, 15)), (MINUTE, "b"): Activity(ALL, 0)})
        add_activity(connection, {(MINUTE, "a"): Activity(ALL, bits(10, 30))})
        # Engine a is served for half of the next minute, always with calls.
        add_activity(connection, {(MINUTE + 1, "a"): Activity(bits(0, 30), bits(0, 30))})
    with database.read() as connection:
        periods = {
            1: (at(0, 0), at(1, 0)),  # a: 30 of 60 idle, b: 60 of 60
            2: (at(0, 20), at(1, 10)),  # a: 10 of second 20 to 30 busy, 30 idle; then 10 busy; b: 40 idle
            3: (at(1, 30), at(2, 0)),  # no engine served
            4: (at(5, 0), at(6, 0)),
        }
        assert idle_shares(connection, periods) == {1: 90 / 120, 2: 70 / 90, 3: None, 4: None}
        assert idle_shares(connection, {}) == {}


def test_old_minutes_are_deleted(database):
    with database.write() as connection:
        add_activity(connection, {(MINUTE, "a"): Activity(1, 1)})
        add_activity(connection, {(MINUTE + KEPT_MINUTES, "a"): Activity(1, 1)})
        assert connection.execute(sa.select(sa.func.count()).select_from(engine_minutes)).scalar_one() == 2
        add_activity(connection, {(MINUTE + KEPT_MINUTES + 1, "a"): Activity(1, 1)})
        assert connection.execute(sa.select(sa.func.min(engine_minutes.c.minute))).scalar_one() == MINUTE + KEPT_MINUTES
