"""Sessions that were marked as not to be trained while their batch was waited for."""

from __future__ import annotations

from collections.abc import Collection

from trainer.claims.holds import Hold
from trainer.settings import TrainerSettings
from turnwise.features.consent import denied_since
from turnwise.store.database import Connection
from turnwise.types import SessionKey


class Consent(Hold[TrainerSettings]):
    """Leaves out what was denied since it was read."""

    def denied(self, conn: Connection, read: Collection[SessionKey]) -> set[SessionKey]:
        return denied_since(conn, read)
