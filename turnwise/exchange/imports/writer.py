"""The import of a file: the ids of its sessions, also of equal lines; each is stored whole or not at all, and once.

A session's id follows from the line's content, or from the session that a log names, so a second import of the same
file finds everything there. Lines of one session are stored in one transaction; if one of them is bad, none is stored.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from turnwise.errors import MALFORMED, BadLine, InvalidRequest, SkippedLine
from turnwise.exchange.imports.drafts import Draft
from turnwise.exchange.imports.files import Documents, IndexedDocuments, open_files
from turnwise.exchange.imports.formats import Format
from turnwise.exchange.imports.tokenise import Tokeniser
from turnwise.features import records
from turnwise.json_text import dumps
from turnwise.store import rewards as stored_rewards
from turnwise.store import sessions as stored_sessions
from turnwise.store import turns as stored_turns
from turnwise.store.database import Connection, Database
from turnwise.types import DEFAULT_POLICY, IMPORT, Json, Reward, Session, Split, Turn

SESSIONS_AT_ONCE = 32
BAD_LINES_KEPT = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImportRule:
    """The properties that all imported sessions get."""

    format_name: str
    tenant: str = "default"
    policy_id: int = DEFAULT_POLICY
    split: Split = Split.TRAIN
    reward: float | None = 1.0
    """Reward of sessions that have none in the file; None leaves them without."""
    is_dry_run: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a file."""

    file: str
    line: int


@dataclasses.dataclass(slots=True)
class ImportReport:
    """Counts of a file's lines, by what became of them."""

    lines: int = 0
    sessions: int = 0
    turns: int = 0
    tokens: int = 0
    already_there: int = 0
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_unended: int = 0
    """Replies that the template ends otherwise than by an end token of the model."""
    num_without_tools: int = 0
    """Replies in whose prompt the template leaves out a result or a schema of a tool."""
    num_unscored: int = 0
    """Sessions whose reward is null in the file."""
    num_bad: int = 0
    bad: list[Json] = dataclasses.field(default_factory=list)

    def add_bad(self, places: Iterable[FileLine], reason: str) -> None:
        for place in places:
            self.num_bad += 1
            if len(self.bad) < BAD_LINES_KEPT:
                self.bad.append({"file": place.file, "line": place.line, "reason": _printable(reason)})

    def as_json(self) -> Json:
        return dataclasses.asdict(self) | {"skipped": dict(self.skipped)}


def _printable(text: str) -> str:
    """Return a text as it can be printed: that of a bad line may hold half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


@dataclasses.dataclass(slots=True)
class _Unit:
    """Lines that are stored together."""

    stem: str
    digest: str
    places: list[FileLine]
    documents: list[Json]
    source_id: str | None
    sessions: list[tuple[Session, Draft, list[Turn]]] = dataclasses.field(default_factory=list)

    @property
    def session_ids(self) -> list[str]:
        return [self.stem, f"{self.stem}-chosen", f"{self.stem}-rejected"]


def import_files(
    database: Database,
    path: Path,
    reader: Format,
    tokeniser: Tokeniser,
    rule: ImportRule,
    progress: Callable[[ImportReport], None],
) -> ImportReport:
    """Store the conversations of a file or directory.

    Raises:
        InvalidRequest: the file cannot be read as this format at all.
    """
    report = ImportReport()
    units = _units(path, reader, rule, report)
    while some := list(itertools.islice(units, SESSIONS_AT_ONCE)):
        with database.read() as conn:
            known = records.imported_digests(conn, rule.tenant, [name for unit in some for name in unit.session_ids])
        new = [unit for unit in some if not _is_known(unit, known, rule, report)]
        ready = [unit for unit in new if _prepare(unit, reader, tokeniser, rule, report)]
        if not rule.is_dry_run:
            with database.write() as conn:
                for unit in ready:
                    _store(conn, unit, rule)
        for _, draft, turns in itertools.chain.from_iterable(unit.sessions for unit in ready):
            report.sessions += 1
            report.num_unscored += draft.is_unscored
            report.turns += len(turns)
            report.tokens += sum(turn.token_ids.size for turn in turns)
        report.num_unended, report.num_without_tools = tokeniser.num_unended, tokeniser.num_without_tools
        progress(report)
    return report


def _units(path: Path, reader: Format, rule: ImportRule, report: ImportReport) -> Iterator[_Unit]:
    seen: collections.Counter[str] = collections.Counter()
    by_key: dict[str, list[tuple[IndexedDocuments, FileLine]]] = collections.defaultdict(list)
    for file, documents in open_files(path):
        for number, document in documents.read():
            place = FileLine(str(file), number)
            report.lines += 1
            if isinstance(document, BadLine):
                report.add_bad([place], str(document))
                continue
            try:
                key, digest = reader.key_of(document), _digest(document)
                hash(key)
            except MALFORMED as error:
                report.add_bad([place], _reason(error))
                continue
            if key is not None:
                by_key[key].append((_indexed(documents, file), place))
                continue
            seen[digest] += 1  # equal lines are as many sessions
            yield _Unit(_stem(rule, digest, str(seen[digest])), digest, [place], [document], None)
    for key, lines in by_key.items():
        found = [documents.get(place.line) for documents, place in lines]
        yield _Unit(_stem(rule, "session", key), _digest(*found), [place for _, place in lines], found, key)


def _indexed(documents: Documents, file: Path) -> IndexedDocuments:
    if isinstance(documents, IndexedDocuments):
        return documents
    raise InvalidRequest(f"{str(file)!r} is Parquet; logs and trajectories are imported from JSON Lines")


def _digest(*documents: Json) -> str:
    return hashlib.sha256(json.dumps(documents, sort_keys=True, default=str).encode()).hexdigest()


def _stem(rule: ImportRule, *parts: str) -> str:
    text = json.dumps([rule.format_name, rule.tenant, *parts])
    return f"import-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _is_known(unit: _Unit, known: dict[str, str], rule: ImportRule, report: ImportReport) -> bool:
    """Return whether an earlier import stored the unit; report one that it stored with other lines."""
    stored = [session_id for session_id in unit.session_ids if session_id in known]
    for session_id in stored:
        if known[session_id] != unit.digest:
            how = "was imported before with other lines, as" if known[session_id] else "was not imported, but there is"
            report.add_bad(
                unit.places,
                f"session {unit.source_id!r} {how} {session_id!r}; delete that first: "
                f"turnwise forget --tenant {rule.tenant} --session-id {session_id}",
            )
            return True
    report.already_there += len(stored)
    return bool(stored)


def _prepare(unit: _Unit, reader: Format, tokeniser: Tokeniser, rule: ImportRule, report: ImportReport) -> bool:
    """Make the unit's sessions and turns; return whether there are any. Bad lines are reported."""
    drafts: list[Draft] = []
    for place, document in zip(unit.places, unit.documents, strict=True):
        try:
            drafts += reader.drafts_of(document)
        except SkippedLine as skipped:
            report.skipped[_printable(str(skipped))] += 1
        except (BadLine, *MALFORMED) as error:
            report.add_bad([place], _reason(error))
            others = [other for other in unit.places if other != place]
            report.add_bad(others, f"line {place.line} of the same session is bad")
            return False
    try:
        if unit.source_id is not None and drafts:
            drafts = [_merged(drafts)]
        for draft in drafts:
            session = _session(unit, draft, rule, is_group=len(drafts) > 1)
            turns = tokeniser.turns(session.session_id, rule.tenant, draft.conversations)
            _check_storable(turns)
            unit.sessions.append((session, draft, turns))
    except (BadLine, *MALFORMED) as error:
        unit.sessions.clear()
        report.add_bad(unit.places, _reason(error))
    return bool(unit.sessions)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BadLine) else f"it cannot be read: {type(error).__name__}: {error}"


def _check_storable(turns: list[Turn]) -> None:
    """Encode as the store does, so that no line ends the transaction of others, and a dry run finds it too."""
    for turn in turns:
        dumps([turn.messages, turn.response, turn.tools])


def _merged(drafts: list[Draft]) -> Draft:
    rewards: dict[str, float] = {}
    for name, value in (item for draft in drafts for item in draft.rewards.items()):
        if rewards.setdefault(name, value) != value:
            raise BadLine(
                f"lines of the same session have the rewards {rewards[name]} and {value} of the name {name!r}"
            )
    task_id = next((draft.task_id for draft in drafts if draft.task_id is not None), None)
    conversations = [conversation for draft in drafts for conversation in draft.conversations]
    is_unscored = not rewards and any(draft.is_unscored for draft in drafts)
    return Draft(conversations=conversations, rewards=rewards, is_unscored=is_unscored, task_id=task_id)


def _session(unit: _Unit, draft: Draft, rule: ImportRule, *, is_group: bool) -> Session:
    place = unit.places[0]
    imported = {"format": rule.format_name, "file": Path(place.file).name, "line": place.line, "digest": unit.digest}
    if unit.source_id is not None:
        imported["session_id"] = unit.source_id
    return Session(
        session_id=f"{unit.stem}-{draft.suffix}" if draft.suffix else unit.stem,
        tenant=rule.tenant,
        policy_id=rule.policy_id,
        task_id=draft.task_id,
        group_id=unit.stem if is_group else None,
        group_size=2 if is_group else None,
        split=rule.split,
        metadata={"imported": imported},
        opened_by=IMPORT,
    )


def _store(conn: Connection, unit: _Unit, rule: ImportRule) -> None:
    for session, draft, turns in unit.sessions:
        _, is_new = stored_sessions.create_session(conn, session)
        if not is_new:
            continue  # another import stored it meanwhile
        stored_turns.append_turns(conn, [dataclasses.replace(turn, policy_id=session.policy_id) for turn in turns])
        values = draft.rewards
        if not values and not draft.is_unscored and rule.reward is not None:
            values = {"reward": rule.reward}
        lines = [
            Reward(session_id=session.session_id, tenant=rule.tenant, name=name, value=value, source=IMPORT)
            for name, value in values.items()
        ]
        stored_rewards.add_rewards(conn, lines)
        stored_sessions.end_session(conn, rule.tenant, session.session_id, "imported")
