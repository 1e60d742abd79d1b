"""`turnwise run -- CMD` without tasks: one command, in this directory and terminal, in its own session."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from turnwise.client import AsyncSessionHandle
from turnwise.client.wire import SessionFields
from turnwise.processes.limited import find_program, run_limited
from turnwise.rollouts import agents
from turnwise.rollouts.agents import Address, Agent, Model, find_agent
from turnwise.rollouts.grading import Grading
from turnwise.rollouts.opening import READY_SECONDS, connected, served_model
from turnwise.rollouts.players import AgentEnd, PlannedRun
from turnwise.rollouts.results import RunResult
from turnwise.rollouts.settings import RunSettings, check
from turnwise.rollouts.tasks import Task


async def run_once(settings: RunSettings, argv: Sequence[str], say: Callable[[str], None]) -> RunResult:
    """Run the command once, reward it if there is a grader, and end its session.

    Raises:
        SettingsError: there is no such program or agent.
        ProxyUnavailable: the proxy cannot be reached.
    """
    check(settings, tuple(argv))
    agent = find_agent(argv, settings.agent)
    command = [find_program(argv[0], "the command"), *argv[1:]]
    async with connected(settings) as client:
        await client.wait_until_ready(READY_SECONDS)
        model = await served_model(settings, client)
        grading = Grading(settings, client)
        session = await client.create_session(
            **SessionFields(
                session_id=f"run-{uuid.uuid4().hex[:12]}",
                split=settings.split,
                credit=settings.credit,
                gamma=settings.gamma,
                sampling=settings.sampling,
                metadata={"agent": agent.name},
            )
        )
        with tempfile.TemporaryDirectory(prefix="turnwise-run-") as scratch:
            run = _run(session, settings, model, Path(scratch))
            say(f"session {session.session_id}, agent {agent.name}, model {model.name}, {session.base_url}")
            played = await _play(agent, command, run, settings)
            ended, error = await grading.grade(run, played)
    return RunResult(
        session_id=session.session_id,
        task_id="",
        run=0,
        pass_index=0,
        split=settings.split,
        reward=ended["reward"],
        termination_reason=played.termination_reason,
        num_turns=ended["num_turns"],
        seconds=round(played.seconds, 3),
        error=error,
    )


def exit_status(result: RunResult) -> int:
    """Return the exit status of the command, as a shell counts it; 124 for the time limit."""
    if result.termination_reason == "timeout":
        return 124
    return int(result.termination_reason.removeprefix("exit_status_"))


def _run(session: AsyncSessionHandle, settings: RunSettings, model: Model, scratch: Path) -> PlannedRun:
    home = scratch / "home"
    home.mkdir()
    return PlannedRun(
        task=Task("", {}),
        run=0,
        split=settings.split,
        session_id=session.session_id,
        directory=scratch,
        workdir=Path.cwd(),
        address=Address(session.base_url, session.api_key, model.name, home, model.context_tokens),
    )


async def _play(agent: Agent, command: list[str], run: PlannedRun, settings: RunSettings) -> AgentEnd:
    agents.write_files(agent, run.address)
    scratch_home = agent.scratch_home if settings.scratch_home is None else settings.scratch_home
    environment = agents.environment(agent, run.address, scratch_home=scratch_home)
    environment |= {name: value for name, value in run.variables().items() if name.startswith("TURNWISE_SESSION")}
    argv = agents.command_line(agent, command, run.address)
    if settings.timeout is not None:
        ended = await run_limited(
            argv, cwd=run.workdir, environment=environment, log=Path("/dev/stderr"), timeout_seconds=settings.timeout
        )
        reason = "timeout" if ended.timed_out else f"exit_status_{ended.exit_status}"
        return AgentEnd(termination_reason=reason, seconds=ended.seconds)
    started = time.monotonic()
    code = await _in_this_terminal(argv, environment)
    return AgentEnd(termination_reason=f"exit_status_{code}", seconds=time.monotonic() - started)


async def _in_this_terminal(argv: list[str], environment: dict[str, str]) -> int:
    """Run a command with this process's terminal and return its exit status, as a shell counts it.

    A terminal sends an interrupt to the command as well, so it is ignored here; a term signal is passed on. The caller
    ends the session in both cases.
    """
    process = await asyncio.create_subprocess_exec(*argv, env=environment)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the command receives it too
    loop.add_signal_handler(signal.SIGTERM, process.terminate)
    try:
        code = await process.wait()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
    return code if code >= 0 else 128 - code
