"""How a stored message names an image: by the SHA-256 of its file."""

from __future__ import annotations

import re
from collections.abc import Iterable

from turnwise.types import Json

IMAGE_URL = "image:"
"""Begin of the URL of a stored image, before the SHA-256 of its file in hexadecimal."""
STORED_IMAGE = re.compile(IMAGE_URL + r"([0-9a-f]{64})")


def image_digests(messages: Iterable[Json]) -> list[str]:
    """Return the digests of the stored images that messages show, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    images = (part.get("image_url") for part in parts if part.get("type") == "image_url")
    found = (STORED_IMAGE.fullmatch(str(image.get("url"))) for image in images if isinstance(image, dict))
    return [match[1] for match in found if match is not None]
