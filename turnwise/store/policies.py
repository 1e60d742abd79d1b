"""Versions of the served model: published by the trainer, activated by the proxy, pinned by a person.

At most one version is active; it is recorded as active after engines serve it. The version that should be served (the
pinned version, otherwise the newest that has not failed) is computed, not stored.
"""

from __future__ import annotations

import datetime
import functools
import operator
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.errors import Conflict, NotFound, SettingsError
from turnwise.store import pages, rows
from turnwise.store.database import to_micros
from turnwise.store.statements import fetch, insert_ignoring
from turnwise.store.tables import policies as table
from turnwise.store.tables import serving
from turnwise.types import Json, PolicyKind, PolicyStatus, PolicyVersion, utc_now

REFUSED_BY_GATE = "refused by the publishing gate"
ROLLED_BACK = "rolled back as a canary"
LOST = "lost: its trainer ended before its files were written"
"""Beginnings of the errors of versions that engines never got, or have loaded."""
_SERVING = 1
"""Key of the only row of `serving`."""


class ServingState(NamedTuple):
    """The versions that decide what engines serve."""

    active: PolicyVersion | None
    """The version that engines serve."""
    canary: PolicyVersion | None
    pinned: PolicyVersion | None
    newest: PolicyVersion | None
    """The newest version that has not failed."""
    holdout: PolicyVersion | None
    """The older version that a share of the sessions stays on."""


def publish_policy(conn: sa.Connection, policy: PolicyVersion) -> bool:
    """Publish a version; return whether it is new. Publishing the same version and path again changes nothing.

    A version that is published before its files are written is published again after that, with their digest.
    A version with an error was refused by its publisher: it is stored as failed, and never served unless a person
    chooses it.

    Raises:
        Conflict: the version exists with another path.
    """
    status = PolicyStatus.PUBLISHED if policy.error is None else PolicyStatus.FAILED
    if insert_ignoring(conn, table, rows.POLICIES.row(policy, status=status.value)):
        return True
    known = get_policy(conn, policy.version)
    if known.path != policy.path:
        raise Conflict(
            f"policy version {policy.version} is published from {known.path!r}, not {policy.path!r}; versions never "
            "change, publish the next one",
            param="version",
        )
    if policy.is_written and not known.is_written:
        written = sa.update(table).where(table.c.version == policy.version)
        conn.execute(written.values(weights_digest=policy.weights_digest))
    return False


def fail_unwritten(conn: sa.Connection, after: int) -> list[int]:
    """Fail the versions above this one that a trainer published and never wrote; return them.

    Their turns keep their behaviour logprobs, and their numbers are not used again.
    """
    is_lost = sa.and_(
        table.c.version > after,
        table.c.update_id.is_not(None),
        table.c.weights_digest.is_(None),
        table.c.status != PolicyStatus.FAILED.value,
    )
    failed = sa.update(table).where(is_lost).values(status=PolicyStatus.FAILED.value, error=LOST)
    return list(conn.execute(failed.returning(table.c.version)).scalars())


def adopt_base(conn: sa.Connection, base: PolicyVersion) -> None:
    """Publish version 0 in an empty ledger; check that a ledger with versions belongs to this model.

    Raises:
        SettingsError: it belongs to another one, whose token ids and weights mean nothing to this one.
    """
    row = conn.execute(sa.select(table).where(table.c.version == base.version)).one_or_none()
    if row is None:
        if newest_policy(conn) is None:
            publish_policy(conn, base)
        return
    known = rows.POLICIES.record(row)
    if known.model_digest is None and known.path == base.path:
        change = sa.update(table).where(table.c.version == base.version)
        conn.execute(change.values(model_digest=base.model_digest))
    elif None not in (known.model_digest, base.model_digest) and known.model_digest != base.model_digest:
        raise SettingsError(
            f"the database belongs to the model {known.path!r}, and {base.path!r} has another tokenizer or other "
            "weights: its sessions and versions cannot be served or trained with this model. Give the new model "
            "another database and another directory of versions (`turnwise up --database URL --runs-dir DIR`), or "
            "restore the model"
        )


def publish_next(
    conn: sa.Connection, path: str, kind: PolicyKind, *, metrics: Json, version: int | None = None
) -> PolicyVersion:
    """Publish a version, by default the one after the newest, and return it.

    Raises:
        Conflict: the version exists with another path.
    """
    if version is None:
        newest = conn.execute(sa.select(sa.func.max(table.c.version))).scalar_one()
        version = 0 if newest is None else newest + 1
    publish_policy(conn, PolicyVersion(version=version, path=path, kind=kind, metrics=metrics))
    return get_policy(conn, version)


def activate_policy(
    conn: sa.Connection,
    version: int,
    reload_seconds: float | None = None,
    now: datetime.datetime | None = None,
    holdout_share: float = 0.0,
) -> PolicyVersion:
    """Record that engines serve this version now, and retire the previous one, or make it the hold-out.

    A hold-out stays until a version is served that is not newer.

    Args:
        conn: A transaction of `Database.write`.
        version: The version.
        reload_seconds: How long engines were paused.
        now: The time of activation; by default the current time.
        holdout_share: Share of new sessions that stays on the previous version if there is no hold-out; 0 for none.

    A version that failed while engines loaded it stays failed.

    Raises:
        NotFound: no such version.
    """
    previous, holdout = active_and_holdout(conn)
    if holdout is not None and holdout.version >= version:
        end_holdout(conn, holdout.version)
        holdout = None
    was_active = sa.and_(table.c.status == PolicyStatus.ACTIVE.value, table.c.version != version)
    is_held = holdout_share > 0 and holdout is None and previous is not None and previous.version < version
    held = {"status": PolicyStatus.HOLDOUT.value, "arm_share": holdout_share}
    change = sa.update(table).where(was_active)
    conn.execute(change.values(**held) if is_held else change.values(status=PolicyStatus.RETIRED.value))
    conn.execute(
        sa.update(table)
        .where(table.c.version == version, table.c.status != PolicyStatus.FAILED.value)
        .values(
            status=PolicyStatus.ACTIVE.value,
            error=None,
            reload_seconds=reload_seconds,
            activated_at=to_micros(now or utc_now()),
        )
    )
    return get_policy(conn, version)


def fail_policy(conn: sa.Connection, version: int, error: str, evidence: Json | None = None) -> PolicyVersion:
    """Record that engines could not load this version, with the error; the evidence is added to its metrics.

    Raises:
        NotFound: no such version.
    """
    values: Json = {"status": PolicyStatus.FAILED.value, "error": error}
    if evidence:
        values |= rows.POLICIES.values({"metrics": get_policy(conn, version).metrics | evidence})
    conn.execute(sa.update(table).where(table.c.version == version).values(values))
    return get_policy(conn, version)


def prepare_trial(conn: sa.Connection, version: int) -> PolicyVersion:
    """Record that this version becomes a canary: engines may load it, and no session samples with it yet.

    Raises:
        NotFound: no such version.
    """
    return _set_canary(conn, version, activated_at=None, arm_share=None)


def try_policy(conn: sa.Connection, version: int, share: float, now: datetime.datetime | None = None) -> PolicyVersion:
    """Record that this share of the sessions that are created from now on samples with this version as a canary.

    Raises:
        NotFound: no such version.
    """
    return _set_canary(conn, version, activated_at=to_micros(now or utc_now()), arm_share=share)


def _set_canary(
    conn: sa.Connection, version: int, *, activated_at: int | None, arm_share: float | None
) -> PolicyVersion:
    change = sa.update(table).where(table.c.version == version)
    conn.execute(
        change.values(
            status=PolicyStatus.CANARY.value,
            error=None,
            arms=None,
            activated_at=activated_at,
            arm_share=arm_share,
        )
    )
    return get_policy(conn, version)


def record_arms(conn: sa.Connection, version: int, arms: Json) -> None:
    """Store the compared sessions of a version's canary in place of those of the last comparison."""
    conn.execute(sa.update(table).where(table.c.version == version).values(**rows.POLICIES.values({"arms": arms})))


def reconsider_policy(conn: sa.Connection, version: int) -> PolicyVersion:
    """Allow a failed version, or one whose canary was cancelled, to be loaded again; other versions do not change.

    Raises:
        NotFound: no such version.
    """
    again = table.c.status.in_([PolicyStatus.FAILED.value, PolicyStatus.CANARY.value])
    change = sa.update(table).where(table.c.version == version, again)
    conn.execute(change.values(status=PolicyStatus.PUBLISHED.value, error=None, activated_at=None))
    return get_policy(conn, version)


def pin_policy(conn: sa.Connection, version: int | None, *, until: int | None = None) -> None:
    """Pin this version, so that later versions are not served; None follows the newest version again.

    Args:
        conn: A transaction of `Database.write`.
        version: The version to serve.
        until: The pin ends when a version above this one is published; None keeps the pin.

    Raises:
        NotFound: no such version.
    """
    if version is not None:
        get_policy(conn, version)
    row = {"serving_id": _SERVING, "pinned_version": version, "pinned_until": until}
    if not insert_ignoring(conn, serving, row):
        conn.execute(sa.update(serving).values(pinned_version=version, pinned_until=until))


def choose_policy(conn: sa.Connection, version: int, *, pin: bool) -> PolicyVersion:
    """Serve a version, and load it again if it failed; return it.

    Without a pin it is served until a version above the newest is published.

    Raises:
        NotFound: no such version.
    """
    chosen = reconsider_policy(conn, version)
    newest = newest_policy(conn)
    if pin:
        pin_policy(conn, version)
    elif newest is None or newest.version == version:
        pin_policy(conn, None)
    else:
        highest = conn.execute(sa.select(sa.func.max(table.c.version))).scalar_one()
        pin_policy(conn, version, until=highest)
    return chosen


def on_disk(policy: PolicyVersion) -> bool | None:
    """Return whether the version's files exist.

    None if that is unknown, the version is the name of a public model, or its trainer still writes them.
    It reads the file system, which may not answer: call it outside of a transaction, and never on an event loop.
    """
    path = Path(policy.path)
    try:
        return path.is_dir() if path.is_absolute() and policy.is_written else None
    except OSError:
        return None


def check_files_exist(policy: PolicyVersion, read_newest: Callable[[], Sequence[PolicyVersion]]) -> None:
    """Check that the files of a version exist, before it is chosen; as `on_disk`, it reads the file system.

    Args:
        policy: the version.
        read_newest: returns the versions to name if it cannot be chosen, newest first; called in that case only.

    Raises:
        Conflict: they no longer exist.
    """
    if policy.status is PolicyStatus.ACTIVE or on_disk(policy) is not False:
        return
    able = ", ".join(str(each.version) for each in reversed(read_newest()) if on_disk(each) is not False)
    raise Conflict(
        f"Version {policy.version}'s files no longer exist ({policy.path!r}): the trainer keeps as many versions as "
        f"`keep_versions` says. Choose one of: {able or 'none'}.",
        param="version",
        code="version_pruned",
    )


def get_policy(conn: sa.Connection, version: int) -> PolicyVersion:
    """Return a version.

    Raises:
        NotFound: no such version.
    """
    row = conn.execute(sa.select(table).where(table.c.version == version)).one_or_none()
    if row is None:
        raise NotFound(f"there is no policy version {version!r}; `turnwise policies` lists them", param="version")
    return rows.POLICIES.record(row)


def list_policies(
    conn: sa.Connection, *, limit: int = 100, after: int | None = None, max_bytes: int | None = None
) -> tuple[list[PolicyVersion], bool]:
    """Return versions below `after`, newest first, and whether there are more.

    With `max_bytes` only the first that fit into so many bytes.
    """
    below = sa.true() if after is None else table.c.version < after
    newest = sa.select(table).where(below).order_by(table.c.version.desc())
    if max_bytes is not None:
        size = pages.size_of(conn.dialect.name, table.c.metrics, table.c.error, table.c.arms)
        sizes = conn.execute(newest.with_only_columns(size).limit(limit + 1)).scalars()
        limit, _ = pages.num_fitting(sizes, limit, max_bytes)
    found = conn.execute(newest.limit(limit + 1)).all()
    return [rows.POLICIES.record(row) for row in found[:limit]], len(found) > limit


def active_policy(conn: sa.Connection) -> PolicyVersion | None:
    """Return the version that engines serve; None before the first activation."""
    row = conn.execute(sa.select(table).where(table.c.status == PolicyStatus.ACTIVE.value)).one_or_none()
    return None if row is None else rows.POLICIES.record(row)


def active_and_canary(conn: sa.Connection) -> tuple[PolicyVersion | None, PolicyVersion | None]:
    """Return the version that engines serve, and the canary, in one statement; None for one that does not exist."""
    wanted = table.c.status.in_([PolicyStatus.ACTIVE.value, PolicyStatus.CANARY.value])
    found = conn.execute(sa.select(table).where(wanted).order_by(table.c.version)).all()
    records = [rows.POLICIES.record(row) for row in found]
    return _first_of(records, PolicyStatus.ACTIVE), _first_of(records, PolicyStatus.CANARY)


def _first_of(records: Sequence[PolicyVersion], status: PolicyStatus) -> PolicyVersion | None:
    return next((policy for policy in records if policy.status is status), None)


def active_and_holdout(conn: sa.Connection) -> tuple[PolicyVersion | None, PolicyVersion | None]:
    """Return the version that engines serve, and the hold-out; None for one that does not exist."""
    wanted = table.c.status.in_([PolicyStatus.ACTIVE.value, PolicyStatus.HOLDOUT.value])
    records = [rows.POLICIES.record(row) for row in conn.execute(sa.select(table).where(wanted)).all()]
    return _first_of(records, PolicyStatus.ACTIVE), _first_of(records, PolicyStatus.HOLDOUT)


def end_holdout(conn: sa.Connection, version: int) -> None:
    """Let new sessions sample with the served version instead of this hold-out; other versions do not change."""
    is_holdout = table.c.status == PolicyStatus.HOLDOUT.value
    change = sa.update(table).where(table.c.version == version, is_holdout)
    conn.execute(change.values(status=PolicyStatus.RETIRED.value))


def failed_versions(conn: sa.Connection, versions: Collection[int]) -> frozenset[int]:
    """Return the failed ones among these versions."""
    failed = sa.and_(table.c.status == PolicyStatus.FAILED.value, table.c.version.in_(versions))
    return frozenset(conn.execute(sa.select(table.c.version).where(failed)).scalars())


def refused_in_a_row(conn: sa.Connection, count: int) -> list[PolicyVersion]:
    """Return so many newest versions, newest first, if engines refused each of them; else none."""
    newest = conn.execute(sa.select(table).order_by(table.c.version.desc()).limit(count)).all()
    found = [rows.POLICIES.record(row) for row in newest]
    not_by_engines = REFUSED_BY_GATE, ROLLED_BACK, LOST
    is_refused = [
        each.status is PolicyStatus.FAILED and not (each.error or "").startswith(not_by_engines) for each in found
    ]
    return found if len(found) == count and all(is_refused) else []


def newest_policy(conn: sa.Connection) -> PolicyVersion | None:
    """Return the newest version that has not failed."""
    row = conn.execute(
        sa.select(table).where(table.c.status != PolicyStatus.FAILED.value).order_by(table.c.version.desc()).limit(1)
    ).one_or_none()
    return None if row is None else rows.POLICIES.record(row)


def pinned_version(conn: sa.Connection) -> int | None:
    """Return the pinned version; None if there is no pin."""
    row = conn.execute(sa.select(serving.c.pinned_version, serving.c.pinned_until)).one_or_none()
    if row is None:
        return None
    newest = None if row.pinned_until is None else newest_policy(conn)
    return _pin_in_force(row.pinned_version, row.pinned_until, newest)


def _pin_in_force(pinned: int | None, until: int | None, newest: PolicyVersion | None) -> int | None:
    """Return the pinned version; None once a version after `until` has been published."""
    is_over = until is not None and newest is not None and newest.version > until
    return None if is_over else pinned


def serving_state(conn: sa.Connection) -> ServingState:
    """Return what `active_and_canary`, `pinned_version` and `newest_policy` return, from one statement.

    Every proxy process calls it five times a second. SQLAlchemy would take five times as long to run it.
    """
    found = fetch(conn, _serving_state_sql(conn.dialect), ())
    records = sorted(map(_record, found), key=operator.attrgetter("version"))
    newest = next((policy for policy in reversed(records) if policy.status is not PolicyStatus.FAILED), None)
    pinned, until = found[0][-2:] if found else (None, None)
    pinned = _pin_in_force(pinned, until, newest)
    by_version = {policy.version: policy for policy in records}  # versions are never deleted
    return ServingState(
        _first_of(records, PolicyStatus.ACTIVE),
        _first_of(records, PolicyStatus.CANARY),
        None if pinned is None else by_version[pinned],
        newest,
        _first_of(records, PolicyStatus.HOLDOUT),
    )


@functools.lru_cache(maxsize=16)
def _serving_state_sql(dialect: sa.Dialect) -> str:
    """Return the statement that selects all versions of a `ServingState`, each with the pin."""
    newest = sa.select(sa.func.max(table.c.version)).where(table.c.status != PolicyStatus.FAILED.value)
    pinned = sa.select(serving.c.pinned_version)
    in_use = (PolicyStatus.ACTIVE.value, PolicyStatus.CANARY.value, PolicyStatus.HOLDOUT.value)
    is_in_use = table.c.status.in_(in_use)
    is_named = table.c.version.in_([newest.scalar_subquery(), pinned.scalar_subquery()])
    query = (
        sa.select(table, serving.c.pinned_version, serving.c.pinned_until)
        .select_from(table.outerjoin(serving, sa.true()))
        .where(is_in_use | is_named)
    )
    return str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))


def _record(row: Sequence[Any]) -> PolicyVersion:
    """Return a row of that statement as a record."""
    columns: Any = types.SimpleNamespace(**dict(zip(table.c.keys(), row, strict=False)))
    return rows.POLICIES.record(columns)
