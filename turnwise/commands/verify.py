"""What `turnwise verify` does: reads the store, asks an engine, hashes files, and reports what does not agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from turnwise.chains import is_trainable
from turnwise.commands.operate import opened
from turnwise.store import policies
from turnwise.store.database import Database
from turnwise.store.experiences import SessionFilter
from turnwise.store.session_records import SessionRecord, count_sessions, session_records
from turnwise.store.trained import all_updates
from turnwise.types import PolicyVersion
from turnwise.verify.digests import check_record, check_update
from turnwise.verify.logprobs import LogprobChecker
from turnwise.verify.report import Report
from turnwise.verify.structure import check_structure
from turnwise.verify.weights import check_weights


def verify(
    url: str,
    wanted: SessionFilter,
    *,
    engine: str | None,
    tolerance: float,
    share: float,
    seed: int,
    progress: Callable[[int, int], None],
    version_distance: int = 0,
) -> Report:
    """Check what a database holds.

    Args:
        url: The database.
        wanted: Which sessions.
        engine: URL of an engine that recomputes logprobs; None leaves them out.
        tolerance: Largest difference of logprobs, in nats, that is no mismatch.
        share: Share of the trainable turns whose logprobs are recomputed.
        seed: Chooses them.
        progress: Called after each session with the number of checked sessions and of all.
        version_distance: Turns are recomputed whose policy version is at most this far from the engine's.

    Raises:
        EngineUnavailable: the engine does not answer.
        StoreError: the database cannot be read.
    """
    report, draw = Report(), random.Random(seed)  # noqa: S311  a sample of turns, no secret
    report.checked["sessions"] = 0  # so that a filter that selects none is seen
    checker = None
    if engine is not None:
        checker = LogprobChecker(engine, tolerance=tolerance, version_distance=version_distance)
    try:
        with opened(url) as database:
            for policy in _policies(database):
                check_weights(policy, report)
            with database.read() as conn:
                for update in all_updates(conn):
                    check_update(conn, update, report)
                num_sessions = count_sessions(conn, wanted)
                for number, record in enumerate(session_records(conn, wanted), 1):
                    is_sound = check_structure(record, report)
                    check_record(record, report)
                    if is_sound and checker is not None:
                        _check_logprobs(record, checker, report, lambda: draw.random() < share)
                    progress(number, num_sessions)
    finally:
        if checker is not None:
            checker.close()
    return report


def _check_logprobs(
    record: SessionRecord, checker: LogprobChecker, report: Report, is_drawn: Callable[[], bool]
) -> None:
    for view in record.views():
        if is_trainable(view.turn) and is_drawn():
            place = f"session {record.session.session_id!r} turn {view.turn.turn_id!r}"
            checker.check(view, place, report)


def _policies(database: Database) -> Iterator[PolicyVersion]:
    """Yield all policy versions, newest first."""
    after, has_more = None, True
    while has_more:
        with database.read() as conn:
            page, has_more = policies.list_policies(conn, after=after)
        yield from page
        after = page[-1].version if page else None
