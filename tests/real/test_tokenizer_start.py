"""A proxy's second start reads what its first one kept of a tokenizer, in new interpreters."""

import os
import subprocess
import sys
from pathlib import Path

from turnwise_fake_engine.tokens import write_tokenizer

ROOT = Path(__file__).parents[2]
LOADS = (
    "import sys, proxy.main; from proxy.sessions.template import load_chat_template;"
    "from proxy.features.outline.outlines import shorten;"
    "template = load_chat_template(sys.argv[1], 'string'); shorten(template); print(template.short is not None);"
    "print(*sorted({'transformers', 'torch', 'alembic', 'httpx2'} & sys.modules.keys()))"
)
"""Prints what the checks of a template found, and which heavy packages were imported for it."""


def test_a_second_start_imports_no_transformers_and_repeats_no_checks(tmp_path):
    """The bound on imports holds for the whole proxy, up to its first call."""
    home = tmp_path / "home"
    (tmp_path / "model").mkdir()
    argv = [sys.executable, "-c", LOADS, str(write_tokenizer(tmp_path / "model"))]
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}

    def start() -> list[str]:
        return subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()

    found, imported = start()
    assert "transformers" in imported
    assert start() == [found, ""]
    (result,) = home.rglob("checks-string-*.json")
    result.write_text("null")
    assert (found, start()) == ("True", ["False", ""])  # the checks would have found something else
