"""Which sessions shaped a version, exactly, and the signed statement of the trainer that made it.

A session shapes a version if its tokens carried loss in the update of that version or of one that it comes from, or if
a session whose tokens did holds copies of its turns: a fork, or what a correction made. A trainer notes the parent and
the sessions of a version before it publishes it, because the update is recorded later. A session that is deleted is
counted from then on and not named. A reward that only moved the baseline of other sessions is no lineage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from turnwise.features import policies
from turnwise.features.copies import session_copies
from turnwise.store import keys, rows, versions
from turnwise.store.extensions import Extension
from turnwise.store.policies import get_policy
from turnwise.store.rows import StoredRow
from turnwise.store.schema import index, metadata, sessions, trained_sessions, updates
from turnwise.store.schema import policies as policies_table
from turnwise.store.schema import policy_versions as versions_table
from turnwise.store.schema import secrets as secrets_table
from turnwise.store.statements import insert_rows, is_among, read_page
from turnwise.store.updates import session_digests, session_pks
from turnwise.types import IMPORT, Json, PolicyVersion, SessionKey

FORMAT = 1
KEY, KEY_BYTES = "manifests of versions", 32
"""The name and the size of the secret that signs manifests."""
MAX_NAMES = 1000
"""Most end users, keys and files that a lineage counts by name, those with the most sessions."""

version_lineages = sa.Table(
    "version_lineages",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("parent", sa.Integer, nullable=False),
    sa.Column("num_sessions", sa.Integer, nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),
    sa.Column("signature", sa.Text),
)
"""What a trainer noted of a version before it published it from this path, and signed once its files were written."""

version_sessions = sa.Table(
    "version_sessions",
    metadata,
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("is_copied", sa.Integer, primary_key=True, autoincrement=False),
    index("ix_version_sessions_version", "version"),
)
"""The sessions that versions were trained on whose updates are not recorded yet, and with `is_copied` 1 those that a
deleted session had copied on which a version was trained; `trained_sessions` has the others."""


def _sign(conn: sa.Connection, manifest: str) -> str:
    """Return the signature of a manifest by the database's key for it, in hexadecimal: HMAC with SHA-256."""
    key = conn.execute(sa.select(secrets_table.c.value).where(secrets_table.c.name == KEY)).scalar() or b""
    return hmac.new(bytes(key), manifest.encode(), "sha256").hexdigest()


def is_signed(conn: sa.Connection, manifest: Json, signature: str) -> bool:
    return hmac.compare_digest(_sign(conn, canonical(manifest)), signature)


def canonical(manifest: Json) -> str:
    """Return the text of a manifest that is signed: JSON with sorted names and no spaces."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"))


def digest_of(manifest: str) -> str:
    return hashlib.sha256(manifest.encode()).hexdigest()


def note_version(
    conn: sa.Connection,
    version: PolicyVersion,
    parent: int,
    trained: Mapping[SessionKey, Mapping[str, float]],
    of_trainer: Json,
) -> tuple[Json, str | None]:
    """Note what a version comes from; return its manifest, and the signature once its files are written.

    A repetition replaces what was noted, so a number that a killed trainer has left is used again.
    """
    pks = session_pks(conn, trained.keys()).values()
    manifest = _manifest(conn, version, parent, trained) | of_trainer
    keys.made_once(conn, KEY, KEY_BYTES)
    signature = _sign(conn, canonical(manifest)) if version.is_written else None
    _forget_recorded(conn, version.version)
    row = {"version": version.version, "path": version.path, "parent": parent, "num_sessions": len(trained)}
    insert_rows(conn, version_lineages, [row | {"manifest": canonical(manifest), "signature": signature}])
    pending = {"version": version.version, "is_copied": 0}
    insert_rows(conn, version_sessions, [{"session_pk": pk, **pending} for pk in pks])
    return manifest, signature


def _forget_recorded(conn: sa.Connection, version: int) -> None:
    """Remove what was noted of a version, and the sessions of those whose updates are recorded by now."""
    conn.execute(sa.delete(version_lineages).where(version_lineages.c.version == version))
    is_pending = version_sessions.c.is_copied == 0
    noted = set(conn.execute(sa.select(version_sessions.c.version).where(is_pending).distinct()).scalars())
    made = sa.select(versions_table.c.version).join(updates, updates.c.update_id == versions_table.c.update_id)
    made = made.where(updates.c.policy_version == versions_table.c.version, versions_table.c.version.in_(noted))
    gone = {version, *conn.execute(made).scalars()}
    conn.execute(sa.delete(version_sessions).where(version_sessions.c.version.in_(gone), is_pending))


def _manifest(
    conn: sa.Connection, version: PolicyVersion, parent: int, trained: Mapping[SessionKey, Mapping[str, float]]
) -> Json:
    base, noted, policy = versions.known_version(conn, 0), _noted(conn, parent), get_policy(conn, version.policy_id)
    return {
        "format": FORMAT,
        "version": version.version,
        "policy": {"tenant": policy.tenant, "name": policy.name},
        "kind": version.kind.value,
        "parent": parent,
        "parent_manifest": None if noted is None else digest_of(noted.manifest),
        "update_id": version.update_id,
        "data": {
            "num_sessions": len(trained),
            "num_turns": len({turn_id for advantages in trained.values() for turn_id in advantages}),
            "digest": rows.batch_digest(session_digests(conn, trained)),
        },
        "base_model_digest": None if base is None else base.model_digest,
    }


def _noted(conn: sa.Connection, version: int) -> StoredRow | None:
    noted = version_lineages.c
    is_same = (noted.version == versions_table.c.version) & (noted.path == versions_table.c.path)
    found = sa.select(version_lineages).join(versions_table, is_same).where(noted.version == version)
    return conn.execute(found).one_or_none()


def parents(conn: sa.Connection) -> dict[int, int | None]:
    """Return the version that each version comes from; None for the base model, and for what was published by hand.

    A version that Turnwise's trainer did not note, because another project's made it, or a commit before this one,
    counts as coming from the one before it of its policy.
    """
    v, noted = versions_table.c, version_lineages.c
    updated = sa.select(updates.c.policy_version).distinct().subquery().c.policy_version
    found = conn.execute(
        sa.select(v.version, v.policy_id, v.update_id, policies_table.c.base_version, noted.parent, updated)
        .join(policies_table, policies_table.c.policy_id == v.policy_id)
        .outerjoin(version_lineages, (noted.version == v.version) & (noted.path == v.path))
        .outerjoin(updated.table, updated == v.version)
        .order_by(v.version)
    )
    of: dict[int, int | None] = {}
    newest: dict[int, int] = {}
    for row in found:
        is_trained = row.version > 0 and (row.update_id, row.policy_version) != (None, None)
        before = newest.get(row.policy_id, row.base_version or 0) if is_trained else None
        of[row.version] = before if row.parent is None else row.parent
        newest[row.policy_id] = row.version
    return of


def ancestors(of: Mapping[int, int | None], version: int) -> list[int]:
    """Return a version and those that it comes from, newest first; the last one is 0, or was published by hand."""
    found: list[int] = []
    at: int | None = version
    while at is not None:
        found.append(at)
        at = of.get(at)
    return found


def descendants(of: Mapping[int, int | None], roots: Collection[int]) -> set[int]:
    found = set(roots)
    for version in sorted(of):  # a parent has a lower number
        if of[version] in found:
            found.add(version)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineageVersion:
    """One of the versions that a version comes from, or that version itself."""

    version: int
    policy: str
    update_id: int | None
    num_sessions: int | None
    """The sessions that it was trained on; None where no trainer noted them."""
    num_named: int
    """Those of them that are still stored, and of the reader's tenant."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineageSession:
    """A session that shaped a version."""

    session_id: str
    tenant: str
    how: Literal["trained", "copied"]
    """`copied`: a session that was trained holds copies of its turns, and it was not trained itself."""
    versions: list[int]
    """The versions that were trained on it."""
    user_id: str | None
    key_id: str | None
    imported: Json | None
    """The format, file and line of an imported session, or the `session_id` and `turn_id` that a correction is of."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of the sessions are of one end user, key, or file."""

    name: str
    num_sessions: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What shaped a version, without its sessions."""

    policy: str
    version: int
    is_complete: bool
    """Whether Turnwise's trainer noted each of its versions. One of another project's trainer counts as coming from the
    one before it, and before a version that was published by hand nothing is known."""
    versions: list[LineageVersion]
    """The version and those that it comes from, newest first, without the base model."""
    num_sessions: int
    """The sessions that shaped it: those that are still stored, and of the reader's tenant."""
    num_unnamed: int
    """Further trained ones, of which each counts once a version: deleted since, or of another tenant."""
    users: list[Share]
    keys: list[Share]
    """By the ids of API keys."""
    imports: list[Share]
    """By the files of imported sessions; `feedback` has those of corrections."""
    manifest: Json | None
    """The signed statement of the trainer that made it; None without one, and where the reader may not see it."""
    signature: str | None
    """Over the manifest, by the database's secret; None until the version's files are written."""
    is_signed: bool | None
    """Whether the signature is right; None without one."""


def lineage(conn: sa.Connection, tenant: str | None, named: str, *, with_manifest: bool = True) -> Lineage:
    """Return what shaped a version, which is named as people write it, as a tenant may see it; None sees all.

    Raises:
        NotFound: there is no such policy or version, or none that is served.
    """
    version = policies.find_version(conn, tenant or "default", named)
    of = parents(conn)
    chain = ancestors(of, version.version)
    shaping, own = _shaping(conn.dialect, chain), sa.true() if tenant is None else sessions.c.tenant == tenant
    stored = sa.select(sa.func.count()).select_from(sessions).join(shaping, _is_of(shaping)).where(own)
    listed = _versions(conn, [each for each in chain if each], own)
    noted = _noted(conn, version.version) if with_manifest else None
    manifest = None if noted is None else json.loads(noted.manifest)
    signature = None if noted is None else noted.signature
    return Lineage(
        policy=get_policy(conn, version.policy_id).name,
        version=version.version,
        is_complete=chain[-1] == 0 and all(each.num_sessions is not None for each in listed),
        versions=listed,
        num_sessions=conn.execute(stored).scalar_one(),
        num_unnamed=sum((each.num_sessions or 0) - each.num_named for each in listed if each.num_sessions is not None),
        users=_shares(conn, shaping, sessions.c.user_id, own),
        keys=_shares(conn, shaping, sessions.c.key_id, own),
        imports=_imports(conn, shaping, own),
        manifest=manifest,
        signature=signature,
        is_signed=None if signature is None or manifest is None else is_signed(conn, manifest, signature),
    )


def lineage_sessions(
    conn: sa.Connection, tenant: str | None, named: str, *, limit: int = 100, after: str | None = None
) -> tuple[list[LineageSession], bool]:
    """Return some of the sessions that shaped a version, oldest first, and whether there are more."""
    version = policies.find_version(conn, tenant or "default", named)
    chain = ancestors(parents(conn), version.version)
    shaping, behind = _shaping(conn.dialect, chain), 0
    if after is not None:
        at = sa.select(sessions.c.session_pk).where(sessions.c.session_id == after, sessions.c.tenant == tenant)
        behind = conn.execute(at).scalar_one_or_none() or 0
    page = sa.select(sessions).join(shaping, _is_of(shaping)).order_by(sessions.c.session_pk)
    page = page.where(sessions.c.session_pk > behind, *(() if tenant is None else (sessions.c.tenant == tenant,)))
    found, has_more = read_page(conn, page, limit)
    trained = _trained(conn.dialect, chain).subquery()
    is_found = trained.c.session_pk.in_([row.session_pk for row in found])
    in_versions: defaultdict[int, list[int]] = defaultdict(list)
    for row in conn.execute(sa.select(trained).where(is_found).order_by(trained.c.version)):
        in_versions[row.session_pk].append(row.version)
    return [_session(row, in_versions[row.session_pk]) for row in found], has_more


def _session(row: StoredRow, trained_in: list[int]) -> LineageSession:
    given: Json = json.loads(row.metadata) if row.opened_by == IMPORT else {}
    return LineageSession(
        session_id=row.session_id,
        tenant=row.tenant,
        how="trained" if trained_in else "copied",
        versions=trained_in,
        user_id=row.user_id,
        key_id=row.key_id,
        imported=given.get("imported") or given.get("feedback"),
    )


def _trained(dialect: sa.Dialect, chain: Collection[int]) -> sa.CompoundSelect[*tuple[Any, ...]]:
    """Return the sessions that these versions were trained on, each with the version."""
    c = trained_sessions.c
    of_chain = sa.select(updates.c.update_id).where(is_among(dialect, updates.c.policy_version, chain))
    recorded = sa.select(c.session_pk, c.policy_version.label("version")).where(
        c.update_id.in_(of_chain), is_among(dialect, c.policy_version, chain)
    )
    noted = sa.select(version_sessions.c.session_pk, version_sessions.c.version).where(
        version_sessions.c.is_copied == 0
    )
    return sa.union(recorded, noted.where(is_among(dialect, version_sessions.c.version, chain)))


def _shaping(dialect: sa.Dialect, chain: Collection[int]) -> sa.CTE:
    """Return the keys of the sessions that these versions were trained on, and of those whose turns they copy."""
    trained, noted = _trained(dialect, chain).subquery(), version_sessions.c
    copied_once = sa.select(noted.session_pk).where(is_among(dialect, noted.version, chain), noted.is_copied == 1)
    first = sa.union(sa.select(trained.c.session_pk), copied_once).subquery()
    found = sa.select(first.c.session_pk).cte("shaping", recursive=True)
    source, c = sessions.alias("source"), session_copies.c
    is_source = (source.c.tenant == c.tenant) & (source.c.session_id == c.source_id)
    copied = sa.select(source.c.session_pk).select_from(found).join(session_copies, c.session_pk == found.c.session_pk)
    return found.union(copied.join(source, is_source))


def _is_of(shaping: sa.CTE) -> sa.ColumnElement[bool]:
    return shaping.c.session_pk == sessions.c.session_pk


def _versions(conn: sa.Connection, chain: Sequence[int], own: sa.ColumnElement[bool]) -> list[LineageVersion]:
    trained = _trained(conn.dialect, chain).subquery()
    counted = sa.select(trained.c.version, sa.func.count()).join(
        sessions, sessions.c.session_pk == trained.c.session_pk
    )
    named = {row[0]: row[1] for row in conn.execute(counted.where(own).group_by(trained.c.version))}
    v, noted = versions_table.c, version_lineages.c
    found = conn.execute(
        sa.select(v.version, v.update_id, policies_table.c.name, noted.num_sessions)
        .join(policies_table, policies_table.c.policy_id == v.policy_id)
        .outerjoin(version_lineages, (noted.version == v.version) & (noted.path == v.path))
        .where(is_among(conn.dialect, v.version, chain))
        .order_by(v.version.desc())
    )
    return [
        LineageVersion(
            version=row.version,
            policy=row.name,
            update_id=row.update_id,
            num_sessions=row.num_sessions,
            num_named=named.get(row.version, 0),
        )
        for row in found
    ]


def _shares(conn: sa.Connection, shaping: sa.CTE, column: sa.Column[Any], own: sa.ColumnElement[bool]) -> list[Share]:
    number = sa.func.count().label("number")
    counted = sa.select(column, number).join(shaping, _is_of(shaping)).where(column.is_not(None), own)
    found = conn.execute(counted.group_by(column).order_by(number.desc(), column).limit(MAX_NAMES))
    return [Share(name=row[0], num_sessions=row.number) for row in found]


def _imports(conn: sa.Connection, shaping: sa.CTE, own: sa.ColumnElement[bool]) -> list[Share]:
    found = sa.select(sessions.c.metadata).join(shaping, _is_of(shaping))
    texts = conn.execute(found.where(sessions.c.opened_by == IMPORT, own)).scalars()
    counts = Counter(_file(json.loads(text)) for text in texts)
    return [Share(name=name, num_sessions=number) for name, number in counts.most_common(MAX_NAMES)]


def _file(given: Json) -> str:
    return str((given.get("imported") or {"file": "feedback"}).get("file"))


EXTENSION = Extension(tables_of_sessions=(version_sessions,))
