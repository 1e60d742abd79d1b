"""Versions of policies, as trainers and people publish them: their numbers, places, metrics and errors.

Version numbers are unique over all policies, and a version's weights never change. `turnwise.store.serving` decides
which versions engines serve.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from turnwise.errors import Conflict, NotFound, SettingsError
from turnwise.store import extensions, rows
from turnwise.store.schema import policy_versions as table
from turnwise.store.statements import insert_ignoring, read_page, size_of
from turnwise.types import DEFAULT_POLICY, Json, PolicyStatus, PolicyVersion

REFUSED_BY_GATE = "refused by the publishing gate"
ROLLED_BACK = "rolled back as a canary"
LOST = "lost: its trainer ended before its files were written"
OVERTAKEN = "overtaken: another trainer recorded what it was trained on, or an update of its policy"
"""How the error of some failed versions begins."""


def publish_version(conn: sa.Connection, version: PolicyVersion) -> bool:
    """Publish a version; return whether it is new. Publishing the same version and path again changes nothing.

    A version that is published before its files are written is published again after that, with their digest. A version
    with an error was refused by its publisher: it is stored as failed, and never served unless a person chooses it.

    Raises:
        Conflict: the version exists with another path or of another policy.
        TurnwiseError: a feature refuses it.
    """
    status = PolicyStatus.PUBLISHED if version.error is None else PolicyStatus.FAILED
    if known_version(conn, version.version) is None:
        for check in extensions.publishable:
            check(conn, version)
        if insert_ignoring(conn, table, rows.VERSIONS.row(version, status=status.value)):
            return True
    known = get_version(conn, version.version)
    if known.policy_id != version.policy_id:
        raise Conflict(f"version {version.version} is of another policy; publish the next number", param="version")
    if known.path != version.path:
        raise Conflict(
            f"policy version {version.version} is published from {known.path!r}, not {version.path!r}; versions never "
            "change, publish the next one",
            param="version",
        )
    if version.is_written and not known.is_written:
        change_version(conn, version.version, weights_digest=version.weights_digest)
    return False


def adopt_base(conn: sa.Connection, base: PolicyVersion) -> None:
    """Publish version 0 in an empty ledger; check that a ledger with versions belongs to this model.

    Raises:
        SettingsError: it belongs to another one, whose token ids and weights mean nothing to this one.
    """
    known = known_version(conn, base.version)
    if known is None:
        is_usable = table.c.policy_id == DEFAULT_POLICY, table.c.status != PolicyStatus.FAILED.value
        if conn.execute(sa.select(table.c.version).where(*is_usable).limit(1)).first() is None:
            publish_version(conn, base)
        return
    if known.model_digest is None and known.path == base.path:
        change_version(conn, base.version, model_digest=base.model_digest)
    elif None not in (known.model_digest, base.model_digest) and known.model_digest != base.model_digest:
        raise SettingsError(
            f"the database belongs to the model {known.path!r}, and {base.path!r} has another tokenizer or other "
            "weights: its sessions and versions cannot be served or trained with this model. Give the new model "
            "another database and another directory of versions (`turnwise up --database URL --runs-dir DIR`), or "
            "restore the model"
        )


def change_version(
    conn: sa.Connection, version: int, *conditions: sa.ColumnElement[bool], **fields: Any
) -> PolicyVersion:
    """Set fields of a version if it fulfils the conditions; return it."""
    change = sa.update(table).where(table.c.version == version, *conditions)
    conn.execute(change.values(**rows.VERSIONS.values(fields)))
    return get_version(conn, version)


def add_metrics(conn: sa.Connection, version: int, metrics: Json) -> None:
    """Add metrics to those of a version, in place of those of the same names."""
    change_version(conn, version, metrics=get_version(conn, version).metrics | metrics)


def get_version(conn: sa.Connection, version: int) -> PolicyVersion:
    known = known_version(conn, version)
    if known is None:
        raise no_version(version)
    return known


def known_version(conn: sa.Connection, version: int) -> PolicyVersion | None:
    row = conn.execute(sa.select(table).where(table.c.version == version)).one_or_none()
    return None if row is None else rows.VERSIONS.record(row)


def highest_version(conn: sa.Connection) -> int | None:
    highest: int | None = conn.execute(sa.select(sa.func.max(table.c.version))).scalar_one()
    return highest


def no_version(version: int) -> NotFound:
    return NotFound(f"there is no policy version {version!r}; `turnwise policies` lists them", param="version")


def list_versions(
    conn: sa.Connection,
    *,
    limit: int = 100,
    after: int | None = None,
    max_bytes: int | None = None,
    policy_ids: Collection[int] | None = None,
) -> tuple[list[PolicyVersion], bool]:
    """Return versions below `after`, newest first, and whether there are more.

    With `max_bytes` a page may end before its limit; with `policy_ids` it has only versions of these policies.
    """
    wanted = sa.true() if after is None else table.c.version < after
    if policy_ids is not None:
        wanted = sa.and_(wanted, table.c.policy_id.in_(policy_ids))
    newest = sa.select(table).where(wanted).order_by(table.c.version.desc())
    size = size_of(conn.dialect, table.c.metrics, table.c.error, table.c.arms)
    found, has_more = read_page(conn, newest, limit, size=size, max_bytes=max_bytes)
    return [rows.VERSIONS.record(row) for row in found], has_more
