"""The places of a prompt's images, as a part of a turn: equal token ids of different images are different tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from turnwise.chains import Experience
from turnwise.parts import Keys, Part
from turnwise.store.media import read_media
from turnwise.types import Json, Turn

if TYPE_CHECKING:
    import sqlalchemy as sa

    from turnwise.store.rows import StoredRow

IMAGES = "images"
SHOWN = (
    "The images in `prompt_delta`, in order, each as a `PlacedImage`; None without one, or if their places are not "
    "known."
)


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
        for index, image in enumerate(map(PlacedImage.of_json, placed_images(turn))):
            begin, end = end, image.offset + image.length
            runs = [(offset, offset + length) for offset, length in image.runs]
            is_inside = begin <= image.offset <= end <= turn.prompt_length
            if not is_inside or any(not image.offset <= first < last <= end for first, last in runs):
                return [(f"images[{index}]", f"lies at {image.offset} to {end}, with features at {runs}")]
        return []


def pack_images(images: Sequence[Json]) -> bytes:
    return json.dumps(images, separators=(",", ":")).encode()


def placed_images(turn: Turn) -> list[Json]:
    """Return the images in what a turn's prompt adds, each as the JSON of a `PlacedImage`."""
    packed = turn.parts.get(IMAGES)
    return [] if packed is None else json.loads(packed)


def images_of(experience: Experience) -> Sequence[PlacedImage]:
    """Return the images among a chain's tokens, in order; with their files in the experiences of a claim."""
    found: Sequence[PlacedImage] = experience.parts.get(IMAGES, ())
    return found
