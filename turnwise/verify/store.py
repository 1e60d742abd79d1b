"""The check of a whole database: structure, digests, weights' files, and recomputed logprobs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Protocol

from turnwise.chains import is_trainable
from turnwise.store import search, updates, versions
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.store.turns import TurnView
from turnwise.types import PolicyVersion
from turnwise.verify.records import Verification, check_files, check_record, check_turns, check_update, check_weights


class Checker(Protocol):
    """Recomputes the logprobs of turns."""

    def check(self, view: TurnView, place: str, report: Verification) -> None: ...

    def close(self) -> None: ...


def verify(
    database: Database,
    wanted: SessionFilter,
    *,
    checker: Checker | None,
    share: float,
    seed: int,
    progress: Callable[[int, int], None],
) -> Verification:
    """Check what a database holds.

    The checker recomputes the logprobs of a share of the trainable turns, chosen by the seed, and is closed; None
    leaves them out. `progress` is called after each session with the number of checked sessions and of all.

    Raises:
        EngineUnavailable: the engine does not answer.
        StoreError: the database cannot be read.
    """
    report, draw = Verification(), random.Random(seed)  # noqa: S311  a sample of turns, no secret
    report.checked["sessions"] = 0  # so that a filter that selects none is seen
    try:
        found = list(all_policies(database))
        for policy in found:
            check_weights(policy, report)
        served_at = {policy.version: policy.activated_at for policy in found if policy.activated_at is not None}
        with database.read() as conn:
            for update in updates.updates_after(conn, -1, None):
                check_update(conn, update, report)
            num_sessions = search.count_sessions(conn, wanted)
            for number, record in enumerate(search.session_records(conn, wanted), 1):
                session = record.session
                is_sound = check_turns(session.session_id, session.num_turns, record.turns, report, served_at)
                check_record(record, report)
                check_files(conn, record, report)
                if is_sound and checker is not None:
                    _check_logprobs(record, checker, report, lambda: draw.random() < share)
                progress(number, num_sessions)
    finally:
        if checker is not None:
            checker.close()
    return report


def _check_logprobs(
    record: search.SessionRecord, checker: Checker, report: Verification, is_drawn: Callable[[], bool]
) -> None:
    for view in record.views():
        if is_trainable(view.turn) and is_drawn():
            place = f"session {record.session.session_id!r} turn {view.turn.turn_id!r}"
            checker.check(view, place, report)


def all_policies(database: Database) -> Iterator[PolicyVersion]:
    after, has_more = None, True
    while has_more:
        with database.read() as conn:
            page, has_more = versions.list_versions(conn, after=after)
        yield from page
        after = page[-1].version if page else None
