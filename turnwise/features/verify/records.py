"""`turnwise verify` of a database: what must hold of chains, turns, digests and files of weights, and what was found.

A report says how much was checked, what could not be, and every mismatch with its exact place.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

import numpy as np

from turnwise.chains import is_trainable
from turnwise.errors import BadCheckpoint
from turnwise.features import records
from turnwise.features.images import read_media
from turnwise.image_urls import image_digests
from turnwise.parts import known as known_parts
from turnwise.store import rows, updates, versions
from turnwise.store.database import Connection, Database
from turnwise.store.selection import SessionFilter
from turnwise.store.turns import TurnView
from turnwise.types import Json, PolicyVersion, Turn, UpdateRecord
from turnwise.version_directory import MANIFEST, compare_digests, read_manifest, weights_digest

MISMATCHES_KEPT = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One value that is not what it must be."""

    check: str
    place: str
    """Where: a session and turn with the field, or a file."""
    problem: str


@dataclasses.dataclass(slots=True)
class Verification:
    """The result of a verification."""

    checked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    not_checked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_mismatches: int = 0
    mismatches: list[Mismatch] = dataclasses.field(default_factory=list)
    largest_gap: float = 0.0
    total_gap: float = 0.0

    def add(self, check: str, place: str, problem: str) -> None:
        self.num_mismatches += 1
        if len(self.mismatches) < MISMATCHES_KEPT:
            self.mismatches.append(Mismatch(check, place, problem))

    def compare_logprobs(self, stored: float, now: float, tolerance: float, place: str, source: str) -> None:
        """Count a stored logprob and the recomputed one; record a difference over the tolerance, and NaN."""
        self.checked["logprobs"] += 1
        gap = abs(stored - now)
        if gap <= tolerance:
            self.largest_gap = max(self.largest_gap, gap)
            self.total_gap += gap
        else:
            self.add("logprobs", place, f"{stored:.6g} is stored, {source} {now:.6g}")

    def as_json(self) -> Json:
        return {
            "checked": dict(self.checked),
            "not_checked": dict(self.not_checked),
            "num_mismatches": self.num_mismatches,
            "mismatches": [dataclasses.asdict(mismatch) for mismatch in self.mismatches],
            "largest_logprob_gap": self.largest_gap,
        }


def check_turns(
    session_id: str, num_turns: int, turns: Sequence[Turn], report: Verification, served_at: Mapping[int, datetime]
) -> bool:
    """Check the turns of a session: order, parents, lengths, logprobs and versions; return whether all is sound.

    The turns are in order of `seq`, `num_turns` is their number as recorded with the session, and `served_at` is when
    engines began to serve each version, the last time.
    """
    before = report.num_mismatches
    known: dict[str, Turn] = {}
    report.checked["sessions"] += 1
    for seq, turn in enumerate(turns):
        report.checked["turns"] += 1
        report.checked["sampled tokens"] += int(turn.token_ids.size)
        place = f"session {session_id!r} turn {turn.turn_id!r}"
        for field, problem in _problems(turn, seq, known, served_at):
            report.add("structure", f"{place} {field}", problem)
        known[turn.turn_id] = turn
    if num_turns != len(turns):
        place = f"session {session_id!r} num_turns"
        report.add("structure", place, f"{num_turns} recorded, {len(turns)} turns stored")
    return report.num_mismatches == before


def _problems(turn: Turn, seq: int, known: dict[str, Turn], served_at: Mapping[int, datetime]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if turn.seq != seq:
        found.append(("seq", f"is {turn.seq}, {seq} turns were stored before it"))
    found += _prompt_problems(turn, known)
    if turn.policy_version_first > turn.policy_version_last and not _was_rolled_back(turn, served_at):
        found.append(("policy_version_first", f"{turn.policy_version_first} > last, {turn.policy_version_last}"))
    if is_trainable(turn):
        found += _sample_problems(turn)
    found += [problem for part in known_parts.values() for problem in part.problems(turn)]
    if min((*turn.prompt_delta[turn.prompt_delta < 0], *turn.token_ids[turn.token_ids < 0]), default=0) < 0:
        found.append(("token_ids", "a token id is negative"))
    return found


def check_files(conn: Connection, record: records.SessionRecord, report: Verification) -> None:
    """Check that the file of each image of a session is stored, and has the digest that names it."""
    session = record.session
    digests = {digest for turn in record.turns for digest in image_digests(turn.messages)}
    files = read_media(conn, session.tenant, digests, session_id=session.session_id) if digests else {}
    for digest in sorted(digests):
        report.checked["images"] += 1
        if digest not in files or hashlib.sha256(files[digest].content).hexdigest() != digest:
            problem = "has another content" if digest in files else "is not stored"
            report.add("digest", f"session {session.session_id!r} image {digest}", problem)


def _was_rolled_back(turn: Turn, served_at: Mapping[int, datetime]) -> bool:
    began_at = served_at.get(turn.policy_version_last)
    return began_at is not None and began_at >= turn.created_at - timedelta(seconds=turn.duration_seconds)


def _prompt_problems(turn: Turn, known: dict[str, Turn]) -> list[tuple[str, str]]:
    before = 0
    if turn.parent_turn_id is not None:
        parent = known.get(turn.parent_turn_id)
        if parent is None:
            return [("parent_turn_id", f"{turn.parent_turn_id!r} is no earlier turn of the session")]
        before = parent.prompt_length + int(parent.token_ids.size)
    length = before + int(turn.prompt_delta.size)
    if turn.prompt_length == length or not (turn.prompt_length or turn.prompt_delta.size or turn.token_ids.size):
        return []  # one without any token was redacted
    return [("prompt_length", f"is {turn.prompt_length}; its parent's tokens and its own are {length}")]


def _sample_problems(turn: Turn) -> list[tuple[str, str]]:
    if turn.logprobs.size != turn.token_ids.size:
        return [("logprobs", f"{turn.logprobs.size} logprobs of {turn.token_ids.size} sampled tokens")]
    wrong = np.flatnonzero(~np.isfinite(turn.logprobs) | (turn.logprobs > 0))
    return [(f"logprobs[{index}]", f"{turn.logprobs[index]} is no logarithm of a probability") for index in wrong[:1]]


def check_record(record: records.SessionRecord, report: Verification) -> None:
    session = f"session {record.session.session_id!r}"
    for turn in record.turns:
        recomputed = rows.turn_row(turn, 0)["digest"]
        _compare(turn.digest, recomputed, "turns", f"{session} turn {turn.turn_id!r}", report)
    for line in record.rewards:
        recomputed = rows.reward_row(line, 0)["digest"]
        _compare(line.digest, recomputed, "reward lines", f"{session} reward line {line.reward_id}", report)


def _compare(stored: bytes | None, recomputed: bytes, what: str, place: str, report: Verification) -> None:
    report.checked[f"digests of {what}"] += 1
    if stored != recomputed:
        report.add("digest", place, "has no digest" if stored is None else "was changed after it was stored")


def check_update(conn: Connection, update: UpdateRecord, report: Verification) -> None:
    if update.batch_digest is None:
        report.not_checked["updates that trained nothing, or deleted turns"] += 1
        return
    trained = records.trained_digests(conn, update.update_id)
    if len(trained) < update.num_sessions:
        report.not_checked["updates with deleted sessions"] += 1
        return
    report.checked["updates"] += 1
    before = report.num_mismatches
    for (tenant, session_id), (recorded_digest, recomputed) in trained.items():
        if recorded_digest != recomputed:
            place = f"update {update.update_id} session {session_id!r} of tenant {tenant!r}"
            report.add("digest", place, "its trained turns or their advantages were changed")
    recorded = rows.batch_digest({key: each for key, (each, _) in trained.items()})
    if recorded != update.batch_digest and report.num_mismatches == before:
        report.add("digest", f"update {update.update_id} batch_digest", "is not that of its sessions")


def check_weights(policy: PolicyVersion, report: Verification) -> None:
    """Hash every weights file of a version, and compare it with its manifest, and the manifest with the database."""
    version, directory = policy.version, Path(policy.path)
    manifest = directory / MANIFEST
    if not directory.is_dir():
        report.not_checked["policy versions whose files are gone"] += 1
        return
    if not manifest.exists():
        report.not_checked["policy versions without a manifest"] += 1
        return
    try:
        named = read_manifest(directory).get("version")
        found = weights_digest(directory)
    except BadCheckpoint as error:
        report.add("weights", str(manifest), f"is no manifest: {error}")
        return
    if named != version:
        report.add("weights", str(manifest), f"names version {named}, the database {version}")
    if found is None or (policy.weights_digest is not None and policy.weights_digest != found):
        report.add("weights", str(manifest), f"has other digests than version {version} was published with")
    for file, problem in compare_digests(directory):
        report.checked["weights files"] += 1
        if problem is not None:
            report.add("weights", str(file), problem)


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
            num_sessions = records.count_sessions(conn, wanted)
            for number, record in enumerate(records.session_records(conn, wanted), 1):
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
    record: records.SessionRecord, checker: Checker, report: Verification, is_drawn: Callable[[], bool]
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
