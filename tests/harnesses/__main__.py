"""`make harnesses`: install pinned agents, play each through the proxy, and write docs/agents.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harnesses import proxy_process
from harnesses.engines import FakeEngine, ScriptedEngine, running_forced_engine
from harnesses.entry import ROOT, Harness
from harnesses.install import InstallFailed, install
from harnesses.page import Verdicts, page
from harnesses.play import Verdict, examine
from harnesses.registry import HARNESSES, ON_VLLM
from harnesses.run import Stage

from turnwise.fake_engine import Script, running_fake_engine

MODEL = "gpt-4.1-mini"
"""The name under which the engine serves its model."""
CONTEXT_TOKENS = 262_144
"""Context length of the fake engine, whose tokens are bytes: some agents' first prompts have more than 100,000."""


def main() -> int:
    """Play the wanted agents and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="agents to play [default: all; on vLLM two of each wire format]")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".harnesses", help="where agents are installed")
    parser.add_argument("--engine", choices=["fake", "vllm"], default="fake", help="what they are played against")
    parser.add_argument("--install-only", action="store_true", help="play nothing")
    wanted = parser.parse_args()
    scratch = wanted.scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    names = wanted.names or (ON_VLLM if wanted.engine == "vllm" else [harness.name for harness in HARNESSES])
    chosen = [harness for harness in HARNESSES if harness.name in names]
    if wanted.install_only:
        return _install(chosen, scratch)
    with (
        tempfile.TemporaryDirectory(prefix="harnesses-") as temporary,
        _engine(wanted.engine, scratch, Path(temporary)) as engine,
        proxy_process.running(engine.url, Path(temporary)) as proxy,
    ):
        for harness in chosen:
            verdict = _examine(harness, scratch, proxy, engine)
            _store(scratch / f"verdicts-{wanted.engine}.json", harness, verdict)
    (ROOT / "docs" / "agents.md").write_text(page(*(_verdicts(scratch, name) for name in ("fake", "vllm"))))
    return 0


def _install(chosen: list[Harness], scratch: Path) -> int:
    for harness in chosen:
        try:
            install(harness, scratch)
        except InstallFailed as error:
            sys.stdout.write(f"{harness.name}: {error}\n")
    return 0


@contextlib.contextmanager
def _engine(kind: str, scratch: Path, temporary: Path) -> Iterator[ScriptedEngine]:
    if kind == "vllm":
        with running_forced_engine(scratch / "long-context-model", temporary) as forced:
            yield forced
    else:
        with running_fake_engine(Script(model=MODEL, max_model_len=CONTEXT_TOKENS)) as fake:
            yield FakeEngine(fake)


def _examine(harness: Harness, scratch: Path, proxy: proxy_process.ProxyProcess, engine: ScriptedEngine) -> Verdict:
    try:
        directory = install(harness, scratch)
    except InstallFailed as error:
        return Verdict({"runs": "not installed"}, [str(error)])
    return examine(Stage(harness, directory, proxy, engine))


def _verdicts(scratch: Path, engine: str) -> Verdicts:
    stored = scratch / f"verdicts-{engine}.json"
    return dict(json.loads(stored.read_text())) if stored.exists() else {}


def _store(stored: Path, harness: Harness, verdict: Verdict) -> None:
    """Add a verdict to those of earlier and concurrent runs, so that single agents can be played again."""
    played = {"version": harness.version, "date": str(datetime.datetime.now(datetime.UTC).date())}
    with stored.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        verdicts = json.loads(file.read() or "{}")
        verdicts[harness.name] = {**played, "cells": verdict.cells, "notes": verdict.notes}
        file.truncate(0)
        file.write(json.dumps(verdicts, indent=2))
    sys.stdout.write(f"{harness.name}: {verdict.cells} {' '.join(verdict.notes)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
