"""A session in memory, and the place of one call in it."""

from __future__ import annotations

import dataclasses

from proxy.continuation.forest import Forest, KnownTurn
from proxy.dialects.object_sizes import json_bytes
from turnwise.types import Session, SessionKey

SESSION_BYTES = 1_000
"""Memory of a session without turns and documents."""


@dataclasses.dataclass(slots=True)
class LiveSession:
    """A session in memory."""

    session: Session
    forest: Forest = dataclasses.field(default_factory=Forest)
    _document_bytes: int = dataclasses.field(init=False)
    num_read: int = 0
    """The `seq` up to which stored turns have been read, or were found to be known."""

    @property
    def key(self) -> SessionKey:
        """Tenant and id."""
        return self.session.tenant, self.session.session_id

    @property
    def num_bytes(self) -> int:
        """Memory, roughly, without the tokens of its turns."""
        return SESSION_BYTES + self._document_bytes + self.forest.num_bytes

    def __post_init__(self) -> None:
        """Count the session's documents, which do not change while it is in memory."""
        self._document_bytes = json_bytes(self.session.metadata) + json_bytes(self.session.sampling)


@dataclasses.dataclass(slots=True)
class Placement:
    """The session that a call belongs to, and how it was found."""

    live: LiveSession
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""
    parent: KnownTurn | None = None
    """The turn that the call extends, while it is reserved for the call."""
