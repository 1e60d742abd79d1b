"""A redactor for tests: it replaces e-mail addresses, and fails at one word."""

import re

EMAIL = re.compile(r"\w+@\w+\.\w+")
FAILS_AT = "dynamite"


def redact(text: str) -> str:
    if FAILS_AT in text:
        raise ValueError("no text with this word")
    return EMAIL.sub("[EMAIL]", text).replace("exit_status_0", "[CODE]")
