"""Plays one agent through a real proxy in front of a fake engine, and checks the captured turns."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from harnesses.entries import ANSWER, PROMPT, Harness
from support.proxies import RunningProxy

from turnwise.client import Client
from turnwise.fake_engine import Fault, FaultKind, Reply, Rule, RunningFakeEngine
from turnwise.processes.limited import Ended, run_limited
from turnwise.rollouts import agents
from turnwise.rollouts.agents import AGENTS, Address
from turnwise.types import Json

RUN_SECONDS = 150.0
DOCUMENTED_URL = re.compile(r"http://127\.0\.0\.1:8100[^\"]*/v1")
"""Address in the examples; the run's address replaces it."""
MAX_MODEL_LENGTH = 262_144
"""Context length of the fake engine, whose tokens are bytes: some agents' first prompts have more than 100,000."""


@dataclasses.dataclass(slots=True)
class Verdict:
    """The observations of one agent."""

    cells: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


COLUMNS = {
    "runs": "it calls its tool and ends with the model's answer",
    "streams": "its replies are streamed",
    "exact": "its own conversation is one chain, and every turn of it is exact",
    "side calls": "calls beside its own conversation, such as titles",
    "retry": "the engine fails once: it goes on, and no turn is stored twice",
    "inferred": "without a session in its address: its conversation is found again in one session",
}
"""The columns of the table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One run and its results."""

    ended: Ended
    log: str
    turns: list[Json]
    session_ids: list[str]

    @property
    def finished(self) -> bool:
        """Whether the agent ended well, with the answer that the engine gave after the tool."""
        return self.ended.exit_status == 0 and ANSWER in self.log


def examine(harness: Harness, directory: Path, proxy: RunningProxy, engine: RunningFakeEngine) -> Verdict:
    """Play an agent three times: in a session, through a failure, and without a session in its address."""
    verdict = Verdict()
    plain = attempt(harness, directory, proxy, engine, f"{proxy.url}/sessions/{_slug(harness)}/v1")
    verdict.cells["runs"] = _mark(plain.finished)
    if not plain.finished:
        verdict.notes.append(_reason(plain))
        return verdict
    main, side = split(plain.turns)
    streamed = [bool(call.body.get("stream")) for call in engine.calls]
    verdict.cells["streams"] = _mark(any(streamed))
    verdict.cells["exact"] = _mark(is_one_exact_chain(main))
    if not is_one_exact_chain(main):
        verdict.notes.append("; ".join(f"{turn['outcome']} {turn['reason'] or ''}".strip() for turn in main))
    verdict.cells["side calls"] = str(len(side)) if side else "none"
    failing = Fault(kind=FaultKind.STATUS, status=500, count=1)
    retried = attempt(harness, directory, proxy, engine, f"{proxy.url}/sessions/{_slug(harness)}-retry/v1", failing)
    kept = [turn for turn in split(retried.turns)[0] if turn["outcome"] != "error"]
    verdict.cells["retry"] = _mark(retried.finished and is_one_exact_chain(kept) and len(kept) == len(main))
    if verdict.cells["retry"] == "no":
        verdict.notes.append(f"after one failure: {_reason(retried)}")
    inferred = attempt(harness, directory, proxy, engine, f"{proxy.url}/v1")
    kept = split(inferred.turns)[0]
    one = len({turn["session_id"] for turn in kept}) == 1
    verdict.cells["inferred"] = _mark(inferred.finished and one and is_one_exact_chain(kept))
    return verdict


def attempt(
    harness: Harness,
    directory: Path,
    proxy: RunningProxy,
    engine: RunningFakeEngine,
    base_url: str,
    fault: Fault | None = None,
) -> Attempt:
    """Run the agent once against this address and read the turns captured during the run."""
    with Client(proxy.url) as client:
        before = {session["session_id"] for session in client.sessions()}
        engine.calls.clear()
        engine.state.script.rules[:] = _rules(harness)
        engine.state.script.faults[:] = [fault] if fault else []
        ended, log = _run(
            harness, directory, Address(base_url, "EMPTY", engine.state.script.model, Path(), MAX_MODEL_LENGTH)
        )
        engine.state.script.faults.clear()
        session_ids = [s["session_id"] for s in client.sessions() if s["session_id"] not in before]
        turns = [turn for session_id in session_ids for turn in client.turns(session_id)]
    return Attempt(ended, log, turns, session_ids)


def split(turns: list[Json]) -> tuple[list[Json], list[Json]]:
    """Return the turns of the agent's own conversation, and the others: they offer other tools, or none."""
    offered = {turn["turn_id"]: turn["tools"] for turn in turns}
    chains: dict[str, list[Json]] = {}
    for turn in turns:
        tools = offered.get(turn["chain_id"]) or turn["tools"] or []
        chains.setdefault(str(sorted(tool["function"]["name"] for tool in tools)), []).append(turn)
    if not chains:
        return [], []
    main = max(chains.items(), key=lambda chain: (chain[0] != "[]", len(chain[1])))[0]
    return chains[main], [turn for key, chain in chains.items() if key != main for turn in chain]


def is_one_exact_chain(turns: list[Json]) -> bool:
    """Return whether turns are exact and extend each other."""
    return (
        bool(turns)
        and all(turn["outcome"] == "exact" for turn in turns)
        and len({turn["chain_id"] for turn in turns}) == 1
        and all(later["parent_turn_id"] == earlier["turn_id"] for earlier, later in pairwise(turns))
    )


def _rules(harness: Harness) -> list[Rule]:
    return [
        Rule(contains=harness.output, reply=harness.last),
        Rule(
            contains=harness.prompt, reply=Reply(text="I look.", tool_calls=[harness.tool]), count=1, needs_tools=True
        ),
        Rule(reply=harness.last),
    ]


def _run(harness: Harness, directory: Path, address: Address) -> tuple[Ended, str]:
    with tempfile.TemporaryDirectory(prefix="harness-") as scratch:
        home, work = Path(scratch, "home"), Path(scratch, "work")
        home.mkdir()
        work.mkdir()
        (work / "README.md").write_text("An empty project.\n")
        address = dataclasses.replace(address, home=home)
        agent, log = AGENTS[harness.agent], Path(scratch, "log")
        agents.write_files(agent, address)
        environment: Mapping[str, str] = {
            **agents.environment(agent, address, scratch_home=True),
            **harness.environment,
            "NO_COLOR": "1",
        }
        argv = harness.argv(directory)
        if harness.program is not None:
            program = work / "agent.py"
            program.write_text(DOCUMENTED_URL.sub(address.base_url, harness.program.read_text()))
            argv = [*argv, str(program)]
        command = agents.command_line(agent, argv, address)
        ended = asyncio.run(
            run_limited(command, cwd=work, environment=environment, log=log, timeout_seconds=RUN_SECONDS)
        )
        return ended, log.read_text(errors="replace")


def _reason(failed: Attempt) -> str:
    """Return why an attempt did not end well, in a few words."""
    if failed.ended.timed_out:
        return f"it does not end within {RUN_SECONDS:g} s"
    lines = [line.strip() for line in failed.log.splitlines() if line.strip() and PROMPT not in line]
    errors = [line for line in lines if "rror" in line] or lines[-1:] or ["it prints nothing"]
    return f"exit status {failed.ended.exit_status}, {len(failed.turns)} turns: {errors[-1][:160]}".replace("|", "/")


def _mark(value: bool) -> str:
    return "yes" if value else "no"


def _slug(harness: Harness) -> str:
    return harness.package.replace("/", "-").replace("@", "")
