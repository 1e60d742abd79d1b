"""A session in memory, and the place of one call in it."""

from __future__ import annotations

import dataclasses

from proxy.continuation.plan import Forest, KnownTurn
from turnwise.types import Session


@dataclasses.dataclass(slots=True)
class LiveSession:
    """A session in memory."""

    session: Session
    forest: Forest = dataclasses.field(default_factory=Forest)
    num_read: int = 0
    """The `seq` up to which stored turns have been read, or were found to be known."""


@dataclasses.dataclass(slots=True)
class Placement:
    """The session that a call belongs to, and how it was found."""

    live: LiveSession
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""
    parent: KnownTurn | None = None
    """The turn that the call extends, while it is reserved for the call."""
