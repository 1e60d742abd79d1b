"""Images: stored once for a tenant, named in messages by the digest of their file, deleted with their last session.

A message has the URL `image:<SHA-256>` where the client sent an image. So messages, their digests and what is compared
of them stay short, and two images are equal where their files are. Their places in a prompt are a part of its turn:
equal token ids of different images are different tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import sqlalchemy as sa

from turnwise.chains import Experience
from turnwise.image_urls import IMAGE_URL, image_digests
from turnwise.parts import Keys, Part
from turnwise.store.extensions import Extension
from turnwise.store.schema import ROWS_AT_ONCE, index, metadata, sessions
from turnwise.store.statements import insert_new_rows, is_among
from turnwise.types import Json, Turn

if TYPE_CHECKING:
    from turnwise.store.rows import StoredRow

SHOWN = (
    "The images in `prompt_delta`, in order, each as a `PlacedImage`; None without one, or if their places are not "
    "known."
)
IMAGES = "images"
"""The part of a turn that has the places of its images."""
NAMED_IMAGE = f'"url":"{IMAGE_URL}'
"""Text that the JSON of messages with images has."""
SWEPT_AT_ONCE = 20
FILES_AT_ONCE = 10
"""Images that are in memory at once while all are read."""

media = sa.Table(
    "media",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("media_type", sa.Text, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    info={ROWS_AT_ONCE: FILES_AT_ONCE},
)
"""The images of conversations, each once for its tenant; messages name them by their SHA-256 digest."""

session_media = sa.Table(
    "session_media",
    metadata,
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), primary_key=True),
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.ForeignKeyConstraint(["tenant", "digest"], ["media.tenant", "media.digest"]),
    index("ix_session_media_digest", "tenant", "digest"),
)
"""Which sessions have an image; with the last of them it is deleted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image of a prompt, and where its placeholder lies in the ids of its chain, counted from the root on."""

    digest: str
    """SHA-256 of the image's file, in hexadecimal."""
    offset: int
    length: int
    """Number of ids that the engine's processor put there: marks around and between the tiles too."""
    runs: tuple[tuple[int, int], ...]
    """Offset and length of each run of ids whose embeddings are the image's features."""
    processor: str = ""
    """Digest of the settings of the engine's processor; empty where the engine did not say."""
    pixels: str = ""
    """Digest of what the processor made of the image; empty where the engine did not say."""
    content: bytes = dataclasses.field(default=b"", repr=False)
    """The file; empty except in experiences that a trainer has claimed."""

    @classmethod
    def of_json(cls, fields: Json) -> PlacedImage:
        return cls(**{**fields, "runs": tuple((offset, length) for offset, length in fields["runs"])})

    def as_json(self) -> Json:
        return {name: getattr(self, name) for name in ("digest", "offset", "length", "runs", "processor", "pixels")}


class Media(NamedTuple):
    """An image's file."""

    media_type: str
    content: bytes


class Images(Part):
    """The images in `prompt_delta`, in order, as the JSON of `PlacedImage`; none where their places are not known."""

    name = column = IMAGES
    is_text = True
    fields: ClassVar = {"images": (list[Json] | None, SHOWN)}
    joined_fields: ClassVar = {
        "images": "The images among the tokens, in order; with their files in the experiences of a claim."
    }
    is_of_prompt = True
    is_always_shown = False

    def load(
        self,
        conn: sa.Connection,
        sessions: Sequence[StoredRow],
        turns: Mapping[int, Sequence[Turn]],
        *,
        with_files: bool,
    ) -> Mapping[int, Any]:
        """Return the files of the images of each session, by their digests."""
        files: dict[int, dict[str, bytes]] = {}
        for session in sessions if with_files else ():
            images = (image for turn in turns.get(session.session_pk, ()) for image in placed_images(turn))
            if digests := {image["digest"] for image in images}:
                found = read_media(conn, session.tenant, digests)
                files[session.session_pk] = {digest: file.content for digest, file in found.items()}
        return files

    def join(self, path: Sequence[Turn], trained: Collection[str], loaded: Any) -> tuple[PlacedImage, ...] | None:
        files = loaded or {}
        images = (PlacedImage.of_json(image) for turn in path for image in placed_images(turn))
        found = tuple(
            dataclasses.replace(image, content=files[image.digest]) if image.digest in files else image
            for image in images
        )
        return found or None

    def as_root(self, path: Sequence[Turn]) -> bytes | None:
        images = [image for turn in path for image in placed_images(turn)]
        return pack_images(images) if images else None

    def tell_apart(self, keys: Keys, joined: Sequence[PlacedImage]) -> Keys:
        """Return keys with a negative number, of the id, the image and the place in it, for ids of placeholders."""
        keys = keys.astype(np.int64)
        for image in joined:
            own = slice(image.offset, image.offset + image.length)
            for place, token in enumerate(keys[own].tolist()):
                named = f"{image.digest} {token} {place}".encode()
                keys[image.offset + place] = -1 - int.from_bytes(hashlib.blake2b(named, digest_size=7).digest())
        return keys

    def of_turn(self, packed: bytes | None) -> Json:
        return {"images": None if packed is None else json.loads(packed)}

    def of_experience(self, joined: Sequence[PlacedImage] | None, experience: Experience) -> Json:
        return {"images": [image.as_json() for image in joined or ()]}

    def problems(self, turn: Turn) -> list[tuple[str, str]]:
        """Return which image lies outside of the ids that the turn adds to its parent's, or over the one before it."""
        end = turn.prompt_length - int(turn.prompt_delta.size)
        for number, image in enumerate(map(PlacedImage.of_json, placed_images(turn))):
            begin, end = end, image.offset + image.length
            runs = [(offset, offset + length) for offset, length in image.runs]
            is_inside = begin <= image.offset <= end <= turn.prompt_length
            if not is_inside or any(not image.offset <= first < last <= end for first, last in runs):
                return [(f"images[{number}]", f"lies at {image.offset} to {end}, with features at {runs}")]
        return []


def images_of(experience: Experience) -> Sequence[PlacedImage]:
    """Return the images among a chain's tokens, in order; with their files in the experiences of a claim."""
    found: Sequence[PlacedImage] = experience.parts.get(IMAGES, ())
    return found


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


def pack_images(images: Sequence[Json]) -> bytes:
    return json.dumps(images, separators=(",", ":")).encode()


def placed_images(turn: Turn) -> list[Json]:
    """Return the images in what a turn's prompt adds, each as the JSON of a `PlacedImage`."""
    packed = turn.parts.get(IMAGES)
    return [] if packed is None else json.loads(packed)


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


def _add_new(conn: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    if with_images := [row for row in rows if NAMED_IMAGE in row["messages"]]:
        add_media(conn, with_images)


EXTENSION = Extension(after_append=_add_new, sweep=sweep_media)
