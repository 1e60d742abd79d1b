"""Measure what shared limits cost: `python bench/limits.py postgresql://…`, an empty database.

Prints the time of an exchange with the store for one key and for 100 keys, and that of one key while three more
processes exchange theirs without a pause. A call that fits into its process's share makes no exchange; a process makes
at most five a second for all keys that it knows, and one where calls lack a place.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time

from turnwise.features.limits import Need, Rule, settle
from turnwise.store.database import Database

ROUNDS, NEIGHBOURS = 200, 3
LEASE_SECONDS = 10.0


def exchanges(url: str, holder: str, num_keys: int, rounds: int = ROUNDS) -> float:
    """Return the median time of an exchange, in milliseconds."""
    rule, seconds = Rule(1000, 10**9, 10**9), []
    needs = [Need("t", f"key-{number}", rule, num_needed=1, num_tokens=100) for number in range(num_keys)]
    with contextlib.closing(Database(url, pool_size=1)) as database:
        for _ in range(rounds):
            began = time.perf_counter()
            with database.write() as connection:
                settle(connection, holder, LEASE_SECONDS, needs)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    url = parser.parse_args().url
    with contextlib.closing(Database(url)) as database:
        database.upgrade()
    one, many = exchanges(url, "one", 1), exchanges(url, "many", 100, ROUNDS // 10)
    print(f"an exchange: {one:.2f} ms for one key, {many:.1f} ms for 100")
    with multiprocessing.get_context("spawn").Pool(NEIGHBOURS) as pool:
        others = pool.starmap_async(
            exchanges, [(url, f"other-{number}", 1, 20 * ROUNDS) for number in range(NEIGHBOURS)]
        )
        beside = exchanges(url, "beside", 1)
        is_beside = not others.ready()
        others.wait()
    print(f"one key beside {NEIGHBOURS} more processes: {beside:.2f} ms" + ("" if is_beside else " (they had ended)"))


if __name__ == "__main__":
    main()
