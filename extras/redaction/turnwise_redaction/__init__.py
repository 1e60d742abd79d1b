"""Removes e-mail addresses, telephone numbers and API keys from texts: `redactor = "turnwise_redaction:redact"`.

Telephone numbers are found by Google's library, secrets by the patterns of detect-secrets that know an issuer's format;
its guesses by entropy and by variable names would take identifiers of code for secrets. Neither needs a model, and
neither sends anything. Names of people and addresses are not found: they need a model, which is a redactor of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import phonenumbers
from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.plugins.base import RegexBasedDetector

EMAIL = re.compile(r"[\w.%+-]{1,64}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,24}\b")
NEWER_KEYS = re.compile(
    r"\b(?:sk-(?:ant-|proj-|or-)?[\w-]{20,}|AIza[\w-]{35}|hf_[A-Za-z0-9]{30,}|tw-[0-9a-f]{16}-[\w-]{32,})"
)
"""Keys of model providers, and of Turnwise, that detect-secrets 1.5 does not know."""
PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
LEFT_OUT = frozenset(
    {
        *("IBM Cloud IAM Key", "IBM COS HMAC Credentials", "Cloudant Credentials", "SoftLayer Credentials"),
        *("Public IP (ipv4)", "Private Key"),
    }
)
"""Patterns that go by the name of a variable and take most of the time, and two that find something else: an address,
and the first line alone of a private key."""
Span = tuple[int, int, str]


def _key_patterns() -> Iterator[re.Pattern[str]]:
    for name, detector in get_mapping_from_secret_type_to_class().items():
        if issubclass(detector, RegexBasedDetector) and name not in LEFT_OUT:
            yield from detector().denylist
    yield from (NEWER_KEYS, PRIVATE_KEY)


class Redactor:
    """Replaces what it finds in a text by `[EMAIL]`, `[PHONE]` and `[KEY]`."""

    def __init__(self, regions: Sequence[str] = ("US",)) -> None:
        """Find international telephone numbers, and national ones of these regions, as ISO 3166 names them."""
        self._regions = regions or (None,)
        self._keys = tuple(_key_patterns())

    def __call__(self, text: str) -> str:
        """Return the text without what was found; the same text where nothing was."""
        pieces, end = [], 0
        for start, stop, name in sorted(self._found(text)):
            if start >= end:
                pieces += (text[end:start], f"[{name}]")
            end = max(end, stop)
        return "".join((*pieces, text[end:])) if pieces else text

    def _found(self, text: str) -> Iterator[Span]:
        for pattern in self._keys:
            yield from ((*match.span(), "KEY") for match in pattern.finditer(text))
        if "@" in text:
            yield from ((*match.span(), "EMAIL") for match in EMAIL.finditer(text))
        for region in self._regions:
            found = phonenumbers.PhoneNumberMatcher(text, region, phonenumbers.Leniency.VALID)
            yield from ((match.start, match.end, "PHONE") for match in found)


redact = Redactor()
