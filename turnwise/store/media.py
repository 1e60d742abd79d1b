"""Images: stored once for a tenant, named in messages by the digest of their file, deleted with their last session.

A message has the URL `image:<SHA-256>` where the client sent an image. So messages, their digests and what is compared
of them stay short, and two images are equal where their files are.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.store.schema import media, session_media, sessions
from turnwise.store.statements import insert_new_rows, is_among
from turnwise.types import IMAGE_URL, image_digests

NAMED_IMAGE = f'"url":"{IMAGE_URL}'
"""Text that the JSON of messages with images has."""
SWEPT_AT_ONCE = 20
FILES_AT_ONCE = 10
"""Images that are in memory at once while all are read."""


class Media(NamedTuple):
    """An image's file."""

    media_type: str
    content: bytes


def add_media(conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store the images of new turns' rows, as far as they are not stored, and note that their sessions have them."""
    named = [(row, set(image_digests(json.loads(row["messages"])))) for row in rows]
    among = (
        is_among(conn.dialect, media.c.tenant, {row["tenant"] for row in rows}),
        is_among(conn.dialect, media.c.digest, set().union(*(digests for _, digests in named))),
    )
    stored = sa.select(media.c.tenant, media.c.digest).where(*among).order_by(*media.primary_key)
    # Locked, they stay until the links are committed; a deletion that was first is waited for, and they are new then.
    present = {tuple(found) for found in conn.execute(stored.with_for_update(read=True, key_share=True))}
    for row, digests in named:
        tenant, new = row["tenant"], row.get("media") or {}
        for digest in sorted(digest for digest in digests & new.keys() if (tenant, digest) not in present):
            media_type, content = new[digest]
            values = {"tenant": tenant, "digest": digest, "media_type": media_type, "content": content}
            insert_new_rows(conn, media, [values], "1")
            present.add((tenant, digest))
        found = sorted(digest for digest in digests if (tenant, digest) in present)
        links = [{"session_pk": row["session_pk"], "digest": digest, "tenant": tenant} for digest in found]
        insert_new_rows(conn, session_media, links, "1")


def read_media(
    conn: sa.Connection, tenant: str, digests: Collection[str], *, session_id: str | None = None
) -> dict[str, Media]:
    """Return by digest those of the images that a session of the tenant has: any session, or the one that is named."""
    own = session_media.c
    linked = sa.select(own.digest).join(sessions).where(sessions.c.tenant == tenant, own.digest == media.c.digest)
    if session_id is not None:
        linked = linked.where(sessions.c.session_id == session_id)
    wanted = media.c.tenant == tenant, is_among(conn.dialect, media.c.digest, set(digests)), linked.exists()
    return {
        row.digest: Media(row.media_type, row.content) for row in conn.execute(sa.select(media).where(*wanted)).all()
    }


def sweep_media(conn: sa.Connection, session_pk: int) -> bool:
    """Delete some images that only this session has, and its links to them; return whether it had any."""
    own = session_media.c.session_pk == session_pk
    some = conn.execute(sa.select(session_media.c.tenant, session_media.c.digest).where(own).limit(SWEPT_AT_ONCE)).all()
    if not some:
        return False
    names = [tuple(row) for row in some]
    is_named = sa.tuple_(media.c.tenant, media.c.digest).in_(names)
    # A turn that links an image at the same time holds a lock on its row, so wait for its commit before looking.
    conn.execute(sa.select(media.c.digest).where(is_named).order_by(media.c.digest).with_for_update()).all()
    conn.execute(sa.delete(session_media).where(own, session_media.c.digest.in_([digest for _, digest in names])))
    linked = sa.select(session_media.c.session_pk).where(
        session_media.c.tenant == media.c.tenant, session_media.c.digest == media.c.digest
    )
    conn.execute(sa.delete(media).where(is_named, ~linked.exists()))
    return True
