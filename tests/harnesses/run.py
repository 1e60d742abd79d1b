"""Runs one agent once against a script, and reads what the database has afterwards."""

import asyncio
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from harnesses.engines import ScriptedEngine
from harnesses.entry import ANSWER, OUTPUT, PROMPT, Harness
from harnesses.proxy_process import ProxyProcess
from turnwise_fake_engine import Fault, Rule
from turnwise_fake_engine.ledger import SeenCall

from turnwise.client import Client
from turnwise.processes.limited import Ended, run_limited
from turnwise.rollouts import agents
from turnwise.rollouts.agents import AGENTS, Address
from turnwise.types import Json

RUN_SECONDS = 240.0
STORED_SECONDS = 30.0
"""Time limit for the last turn of a run to be stored."""
POLL_SECONDS = 0.05
CHECK = f"""\
#!/bin/sh
# Prints the output for a label and some lines; waits as long as the file `hold` is there.
here=$(dirname "$0")
if [ -e "$here/hold" ]; then : > "$here/reached"; fi
while [ -e "$here/hold" ]; do sleep 0.1; done
echo {OUTPUT.rpartition("-")[0]}-$((6*7))-$1
seq "${{2:-0}}"
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    ended: Ended | None
    """None for a run that was cut off."""
    log: str
    turns: list[Json]
    """As the API shows them, in the order of their sessions."""
    calls: list[SeenCall]
    """The calls that the engine received."""

    @property
    def finished(self) -> bool:
        return self.ended is not None and self.ended.exit_status == 0 and ANSWER in self.log

    def has_sent(self, *texts: str) -> bool:
        sent = str([turn["messages"] for turn in self.turns])
        return all(text in sent for text in texts)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    home: Path
    work: Path
    check: Path
    """Prints the tool's output."""

    @property
    def hold(self) -> Path:
        return self.check.with_name("hold")

    @property
    def reached(self) -> Path:
        return self.check.with_name("reached")

    def command(self, label: str, num_lines: int = 0) -> str:
        return f"sh {self.check} {label} {num_lines}"


Rules = Callable[[Place], Sequence[Rule]]
During = Callable[[Place], Awaitable[bool]]
"""What is done beside a run; returns whether the run is then cut off."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    harness: Harness
    directory: Path
    """Where it is installed."""
    proxy: ProxyProcess
    engine: ScriptedEngine
    deadline: float = math.inf
    """When all runs of the agent must have ended, on the monotonic clock."""
    turns: list[Json] = dataclasses.field(default_factory=list)
    """The turns of all runs so far."""

    def attempt(
        self,
        session_id: str | None,
        rules: Rules,
        *,
        faults: Sequence[Fault] = (),
        during: During | None = None,
        holds: bool = False,
    ) -> Attempt:
        """Run the agent once.

        Args:
            session_id: the session in its address; None leaves it out.
            rules: the replies of the engine.
            faults: what the engine does wrong.
            during: a function that is called during the run.
            holds: whether the tool waits for `during`.
        """
        with tempfile.TemporaryDirectory(prefix="harness-") as scratch, Client(self.proxy.url) as client:
            place = _make_place(Path(scratch))
            if holds:
                place.hold.touch()
            before = {session["session_id"] for session in client.sessions()}
            self.engine.set_script(rules(place), faults)
            base_url = f"{self.proxy.url}/v1" if session_id is None else f"{self.proxy.url}/sessions/{session_id}/v1"
            context_tokens = self.harness.context_tokens or self.engine.context_tokens
            address = Address(base_url, "EMPTY", self.engine.model, place.home, context_tokens)
            log = Path(scratch, "log")
            ended = asyncio.run(self._run(address, place, log, during))
            calls = list(self.engine.calls)
            turns = self._read_turns(client, before, calls)
            self.turns.extend(turns)
            return Attempt(ended, log.read_text(errors="replace"), turns, calls)

    async def _run(self, address: Address, place: Place, log: Path, during: During | None) -> Ended | None:
        agent = AGENTS[self.harness.agent]
        agents.write_files(agent, address)
        environment: Mapping[str, str] = {
            **agents.environment(agent, address, scratch_home=True),
            "NO_COLOR": "1",
            "PATH": f"{self.directory / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}",
            **self.harness.environment,
        }
        command = agents.command_line(agent, self.harness.argv(self.directory), address)
        running = asyncio.create_task(
            run_limited(command, cwd=place.work, environment=environment, log=log, timeout_seconds=self._seconds_left())
        )
        beside = asyncio.create_task(during(place)) if during is not None else None
        if beside is not None:
            await asyncio.wait({running, beside}, return_when=asyncio.FIRST_COMPLETED)
            is_cut_off = beside.done() and await beside
            beside.cancel()
            if is_cut_off:
                running.cancel()
                await asyncio.wait({running})
                return None
        return await running

    def _seconds_left(self) -> float:
        return min(RUN_SECONDS, max(1.0, self.deadline - time.monotonic()))

    def _read_turns(self, client: Client, before: set[str], calls: Sequence[SeenCall]) -> list[Json]:
        """Return the new turns, once the engine's calls have ended and there is a turn for each."""
        deadline = time.monotonic() + STORED_SECONDS
        while True:
            session_ids = [s["session_id"] for s in client.sessions() if s["session_id"] not in before]
            turns = [turn for session_id in session_ids for turn in client.turns(session_id, prompt="whole")]
            is_over = len(turns) >= len(calls) and all(call.outcome != "running" for call in calls)
            if is_over or time.monotonic() > deadline:
                return turns
            time.sleep(POLL_SECONDS)


async def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition; the end of the run cancels the wait."""
    while not is_so():  # noqa: ASYNC110  other processes set files, no event
        await asyncio.sleep(POLL_SECONDS)


def reason(failed: Attempt) -> str:
    if failed.ended is None or failed.ended.timed_out:
        return f"it does not end within its time limit, {RUN_SECONDS:g} s at most"
    lines = [line.strip() for line in failed.log.splitlines() if line.strip() and PROMPT not in line]
    errors = [line for line in lines if "rror" in line] or lines[-1:] or ["it prints nothing"]
    return f"exit status {failed.ended.exit_status}, {len(failed.turns)} turns: {errors[-1][:160]}".replace("|", "/")


def _make_place(scratch: Path) -> Place:
    place = Place(scratch / "home", scratch / "work", scratch / "tool" / "check.sh")
    for directory in (place.home, place.work, place.check.parent):
        directory.mkdir()
    (place.work / "README.md").write_text("An empty project.\n")
    place.check.write_text(CHECK)
    return place
