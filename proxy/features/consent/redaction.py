"""Redaction: what a program of the operator's leaves of texts before they are stored."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxy.calls.steps import CallStep
from proxy.features.consent.settings import ConsentSettings
from turnwise.features.consent import REDACTED, without_tokens
from turnwise.image_urls import STORED_IMAGE
from turnwise.settings import load_object
from turnwise.store.rows import TURNS

if TYPE_CHECKING:
    from proxy.services import Services
    from proxy.settings import ProxySettings
    from turnwise.store.turns import TurnRow

log = logging.getLogger(__name__)
_MEDIA_URL = re.compile(rf"data:[\w/.+;=-]{{0,200}};base64,[A-Za-z0-9+/=]*|{STORED_IMAGE.pattern}")


class Redaction(CallStep):
    """Redacts the turns that are stored, and the documents that clients give the control plane."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        assert isinstance(settings, ConsentSettings)
        assert settings.redactor is not None
        self._redact = load_object(settings.redactor, "redactor")
        services.stored_document, services.stored_text = self._document, self._text
        self.rows = (functools.partial(_row_redactor, settings.redactor),)

    @classmethod
    def is_on(cls, settings: ProxySettings) -> bool:
        return isinstance(settings, ConsentSettings) and settings.redactor is not None

    def _document(self, document: Any) -> Any:
        return redacted_document(document, self._redact)

    def _text(self, text: str | None) -> str | None:
        """Return what is stored of a free text; `redactor_failed` where that cannot be found, as with turns."""
        try:
            return None if text is None else self._redact(text)
        except Exception:  # the redactor is another program's
            log.exception("the redactor failed at a reason or a note, which is stored without its text")
            return "redactor_failed"


def _row_redactor(redactor: str) -> Callable[[TurnRow], TurnRow]:
    return functools.partial(redacted, redact=load_object(redactor, "redactor"))


def redacted_document(document: Any, redact: Callable[[str], str]) -> Any:
    """Return a JSON document with all of its texts redacted, but for media in `data:` URLs and names of images."""
    if isinstance(document, str):
        return document if _MEDIA_URL.fullmatch(document) else redact(document)
    if isinstance(document, list):
        return [redacted_document(each, redact) for each in document]
    if isinstance(document, dict):
        return {redact(name): redacted_document(value, redact) for name, value in document.items()}
    return document


def redacted(row: TurnRow, redact: Callable[[str], str]) -> TurnRow:
    """Return a row without what the redactor replaces in its texts, and then also without its tokens.

    A redactor that fails must not let a text pass: nothing of the turn's texts and tokens is stored then.
    """
    found: TurnRow = {}
    try:
        for name in filter(row.get, TURNS.documents):
            document = json.loads(row[name]) if isinstance(row[name], str) else row[name]
            if (clean := redacted_document(document, redact)) != document:
                found[name] = clean
    except Exception:  # the redactor is another program's; what it raises is counted as the turn's reason
        log.exception("the redactor failed at turn %s, which is stored without its texts and tokens", row["turn_id"])
        return without_tokens(row, "redactor_failed", with_texts=False)
    return without_tokens(row | found, REDACTED) if found else row
