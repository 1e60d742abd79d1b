"""`make harnesses`: install pinned agents, play each through the proxy, and write docs/agents.md.

One file holds the verdicts of the tables, each with the commit that it was made on. `--resume` keeps those of the
present commit and plays the others, so that a table may be made in parts and survives a kill; names play those agents.
"""

import argparse
import contextlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from harnesses.checks import COMPACTION_REASONS, asks_for_summary
from harnesses.engines import FakeEngine, ScriptedEngine, running_forced_engine
from harnesses.entry import ROOT, Harness
from harnesses.install import InstallFailed, install
from harnesses.page import page
from harnesses.play import SAMPLES, Verdict, examine, examine_sampling
from harnesses.proxy_process import ProxyProcess
from harnesses.recording import Recordings, play_to_record
from harnesses.registry import HARNESSES, SHORTENING
from harnesses.run import Stage
from harnesses.shortening import ShorteningHarness, examine_shortening
from harnesses.verdicts import FILE, Verdicts, present_commit
from turnwise_fake_engine import Script, running_fake_engine

MODEL = "gpt-4.1-mini"
"""The name under which the fake engine serves its model."""
CONTEXT_TOKENS = 262_144
"""Context length of the fake engine, whose tokens are bytes: some agents' first prompts have more than 100,000."""
AGENT_SECONDS = 900.0
"""Time limit for all runs of one agent."""


def main() -> int:
    """Play the wanted agents and write the page; return 1 if some are left for `--resume`."""
    wanted = _parser().parse_args()
    scratch = wanted.scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    chosen = [harness for harness in (*HARNESSES, *SHORTENING) if not wanted.names or harness.name in wanted.names]
    if wanted.install_only:
        return _install(chosen, scratch)
    verdicts = Verdicts(wanted.verdicts, present_commit())
    if not (wanted.resume or wanted.names or wanted.sampling or wanted.record):
        verdicts.clear()
    left = [harness for harness in chosen if not (wanted.resume and verdicts.has(harness))]
    deadline = time.monotonic() + 60 * wanted.minutes
    with (
        tempfile.TemporaryDirectory(prefix="harnesses-") as temporary,
        _engine(wanted.engine, scratch, Path(temporary)) as engine,
        contextlib.closing(ProxyProcess(engine.url, Path(temporary))) as proxy,
    ):
        while left and time.monotonic() < deadline:
            harness = left.pop(0)
            if wanted.record:
                _record(harness, scratch, proxy, engine)
                continue
            verdict = _examine(harness, scratch, proxy, engine, only_sampling=wanted.sampling)
            if wanted.sampling:
                verdicts.amend(harness, {name: cell for name, cell in verdict.cells.items() if name == SAMPLES})
            else:
                verdicts.add(harness, wanted.engine, verdict)
            sys.stdout.write(f"{harness.name}: {verdict.cells} {' '.join(verdict.notes)}\n")
            sys.stdout.write(
                f"  {verdict.num_taken} of {verdict.num_ordinary} ordinary calls are taken for compaction\n"
            )
            sys.stdout.flush()
    if not wanted.record:
        wanted.page.write_text(page(verdicts.read()))
    if left:
        sys.stdout.write(f"{len(left)} agents are left: {', '.join(each.name for each in left)}; use --resume\n")
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="agents to play [default: all]")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".harnesses", help="where agents are installed")
    parser.add_argument("--engine", choices=["vllm", "fake"], default="vllm", help="what they are played against")
    parser.add_argument("--install-only", action="store_true", help="play nothing")
    parser.add_argument("--sampling", action="store_true", help="renew only the column `samples with` of played agents")
    parser.add_argument("--record", action="store_true", help="only record their calls, for tests/contract")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts that were made on this commit")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further agent after this time")
    parser.add_argument("--verdicts", type=Path, default=FILE, help="the file of verdicts to read and write")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "agents.md", help="the page to write")
    return parser


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


def _record(harness: Harness, scratch: Path, proxy: ProxyProcess, engine: ScriptedEngine) -> None:
    try:
        stage = Stage(harness, install(harness, scratch), proxy, engine, time.monotonic() + AGENT_SECONDS)
        calls = play_to_record(stage)
    except Exception as error:  # noqa: BLE001  one agent must not end the others' recordings
        sys.stdout.write(f"{harness.name}: not recorded: {type(error).__name__}: {error}\n")
        return
    Recordings().add(harness.name, calls)
    sys.stdout.write(f"{harness.name}: {len(calls)} calls\n")
    sys.stdout.flush()


def _examine(
    harness: Harness, scratch: Path, proxy: ProxyProcess, engine: ScriptedEngine, *, only_sampling: bool
) -> Verdict:
    try:
        directory = install(harness, scratch)
    except InstallFailed as error:
        return Verdict({"runs": "not installed"}, [str(error)])
    try:
        stage = Stage(harness, directory, proxy, engine, time.monotonic() + AGENT_SECONDS)
        if only_sampling:
            return examine_sampling(stage)
        verdict = examine_shortening(stage) if isinstance(harness, ShorteningHarness) else examine(stage)
    except Exception as error:  # noqa: BLE001  one agent must not end the others' checks; its row says what failed
        traceback.print_exc()
        return Verdict({"runs": "no"}, [f"the check failed: {type(error).__name__}: {error}"])
    ordinary = [turn for turn in stage.turns if not asks_for_summary(harness, turn["messages"])]
    verdict.num_ordinary = len(ordinary)
    verdict.num_taken = sum(turn["role_reason"] in COMPACTION_REASONS for turn in ordinary)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
