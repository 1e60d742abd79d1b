"""The settings of redaction."""

from __future__ import annotations

from turnwise.settings import Settings


class ConsentSettings(Settings):
    """What must not be stored."""

    redactor: str | None = None
    """`module:function`, which gets each text of a turn before it is stored, and returns it without what must not be
    stored, such as `turnwise_redaction:redact` of extras/redaction. A turn in which it replaces something is stored
    without its tokens, and neither trained nor extended from the store."""
