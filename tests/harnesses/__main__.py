"""`make harnesses`: install pinned agents, play each through the proxy, and write docs/agents.md."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path

from harnesses.entries import HARNESSES, ROOT, Harness
from harnesses.install import InstallFailed, install, version
from harnesses.page import page
from harnesses.play import MAX_MODEL_LENGTH, Verdict, examine
from support.proxies import running_proxy

from turnwise.fake_engine import Script, running_fake_engine

MODEL = "gpt-4.1-mini"
"""Model name that the examples request."""


def main() -> int:
    """Play the wanted agents and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="agents to play [default: all]")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".harnesses", help="where agents are installed")
    wanted = parser.parse_args()
    wanted.scratch.mkdir(parents=True, exist_ok=True)
    stored = wanted.scratch / "verdicts.json"
    verdicts: dict[str, dict[str, object]] = json.loads(stored.read_text()) if stored.exists() else {}
    for harness in HARNESSES:
        if wanted.names and harness.name not in wanted.names:
            continue
        verdict = _examine(harness, wanted.scratch.absolute())
        played = {"version": version(harness), "date": str(datetime.datetime.now(datetime.UTC).date())}
        verdicts[harness.name] = {**played, "cells": verdict.cells, "notes": verdict.notes}
        stored.write_text(json.dumps(verdicts, indent=2))
        sys.stdout.write(f"{harness.name}: {verdict.cells} {' '.join(verdict.notes)}\n")
        sys.stdout.flush()
    (ROOT / "docs" / "agents.md").write_text(page(verdicts))
    return 0


def _examine(harness: Harness, scratch: Path) -> Verdict:
    try:
        directory = install(harness, scratch)
    except InstallFailed as error:
        return Verdict({"runs": "no"}, [f"cannot be installed: {str(error)[:160]}"])
    with tempfile.TemporaryDirectory(prefix="harnesses-") as temporary:
        database = f"sqlite:///{temporary}/turnwise.db"
        with (
            running_fake_engine(Script(model=MODEL, max_model_len=MAX_MODEL_LENGTH)) as engine,
            running_proxy(engine.url, database, Path(temporary)) as proxy,
        ):
            return examine(harness, directory, proxy, engine)


if __name__ == "__main__":
    sys.exit(main())
