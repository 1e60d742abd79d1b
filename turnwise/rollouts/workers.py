"""Keeps warm worker processes for agents that are a library, and retires one whose run exceeds its time.

A run that exceeds its time limit cannot be stopped inside its process. Its worker is retired: it gets no further runs
and is ended as soon as its other runs have ended or have reached their own limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from typing import Any

from turnwise.errors import MALFORMED, GraderFailed, SettingsError
from turnwise.files import create_private
from turnwise.processes import guard
from turnwise.processes.limited import GRACE_SECONDS, find_program
from turnwise.processes.supervisor import tail_of
from turnwise.rewards.grader import as_rewards
from turnwise.rollouts import agents, worker
from turnwise.rollouts.agents import AGENTS
from turnwise.rollouts.players import AgentEnd, PlannedRun
from turnwise.rollouts.settings import RunSettings
from turnwise.types import Json

log = logging.getLogger(__name__)

START_SECONDS = 180.0
LINE_BYTES = 64 * 1024 * 1024


class CallPlayer:
    """Calls a function for each run, in a pool of worker processes."""

    def __init__(self, settings: RunSettings, target: str) -> None:
        """Initialise the pool; a worker starts when it is first needed.

        `target` is `module:function`; it is called with the task and a `Run`, and may return rewards.

        Raises:
            SettingsError: there is no such interpreter.
        """
        self._settings = settings
        self._target = target
        num_threads = -(-settings.parallel // settings.workers)
        self._argv = [find_program(settings.python, "--python"), str(worker.__file__), target, str(num_threads)]
        self._workers: list[_AgentWorker] = []
        self._retired: list[_AgentWorker] = []
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Import the agent in a first worker.

        Raises:
            SettingsError: it cannot be imported.
        """
        await self._worker()

    async def play(self, run: PlannedRun) -> AgentEnd:
        chosen = await self._worker()
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                answer = await chosen.call(_request(run))
        except TimeoutError:
            self._retire(chosen)
            return AgentEnd(termination_reason="timeout", seconds=time.monotonic() - started, rewards=[])
        finally:
            await self._end_idle()
        return _played(answer, time.monotonic() - started)

    async def close(self) -> None:
        await asyncio.gather(*(each.end() for each in (*self._workers, *self._retired)))
        self._workers, self._retired = [], []

    async def _worker(self) -> _AgentWorker:
        async with self._starting:
            self._workers = [each for each in self._workers if each.is_alive]
            if len(self._workers) < self._settings.workers:
                self._workers.append(await self._started())
            return min(self._workers, key=lambda each: each.num_calls)

    async def _started(self) -> _AgentWorker:
        """Start a worker and wait until it has imported the agent."""
        path = self._settings.directory() / "workers.log"
        create_private(path)
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *guard.guarded(self._argv, GRACE_SECONDS),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                # What an agent prints is in the log also when its worker is killed.
                env={"PYTHONUNBUFFERED": "1", **os.environ},
                start_new_session=True,
                limit=LINE_BYTES,
            )
        fresh = _AgentWorker(process)
        answer = await fresh.first_answer() or {"failed": f"its worker did not start; its log:\n{tail_of(path)}"}
        if "failed" in answer:
            await fresh.end()
            raise SettingsError(f"--call {self._target!r} cannot be imported: {answer['failed']}")
        return fresh

    def _retire(self, chosen: _AgentWorker) -> None:
        if chosen in self._workers:
            self._workers.remove(chosen)
            self._retired.append(chosen)

    async def _end_idle(self) -> None:
        idle = [each for each in self._retired if each.num_calls == 0]
        self._retired = [each for each in self._retired if each not in idle]
        for each in idle:
            await each.end()


class _AgentWorker:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._calls: dict[str, asyncio.Future[Json]] = {}
        self._asked: set[str] = set()
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._reading is not None and not self._reading.done()

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    async def first_answer(self) -> Json:
        """Return whether the agent is imported; nothing where the process ends or takes too long."""
        try:
            async with asyncio.timeout(START_SECONDS):
                first = await self._stdout.readline()
        except TimeoutError:
            first = b""
        answer: Json = json.loads(first) if first else {}
        if "ready" in answer:
            self._reading = asyncio.create_task(self._read())
        return answer

    async def call(self, request: Json) -> Json:
        # A program of the agent can write to the worker's pipe by way of /proc, and cannot guess the name of a call.
        call_id = secrets.token_hex(16)
        answered: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answered
        self._asked.add(call_id)
        try:
            self._stdin.write((json.dumps({**request, "id": call_id}) + "\n").encode())
            await self._stdin.drain()
            return await answered
        except ConnectionError:
            return {"error": _WORKER_DIED}
        finally:
            del self._calls[call_id]

    async def end(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _read(self) -> None:
        """Pass each answer to its call; when the process ends, fail the remaining calls.

        A line that answers no call was not written by the worker: the agent has written it.
        """
        while line := await self._stdout.readline():
            answer = _answer(line)
            if answer is None or answer["id"] not in self._asked:
                log.warning("a line that answers no run is refused: the agent has written %.200r", line)
                continue
            waiting = self._calls.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_result({"error": _WORKER_DIED})


_WORKER_DIED = "its worker process ended during the run; its output is in workers.log"


def _answer(line: bytes) -> Json | None:
    try:
        answer = json.loads(line)
    except MALFORMED:
        return None
    is_answer = (
        isinstance(answer, dict) and isinstance(answer.get("id"), str) and not {"value", "error"}.isdisjoint(answer)
    )
    return answer if is_answer else None


def _request(run: PlannedRun) -> dict[str, Any]:
    environment = {**agents.variables(AGENTS["any"], run.address), **run.variables()}
    described = {
        "session_id": run.session_id,
        "base_url": run.address.base_url,
        "api_key": run.address.api_key,
        "model": run.address.model,
        "directory": str(run.workdir.absolute()),
        "split": run.split,
        "run": run.run,
        "environment": environment,
    }
    return {"task": run.task.fields, "run": described}


def _played(answer: Json, seconds: float) -> AgentEnd:
    if "error" in answer:
        return AgentEnd(termination_reason="error", seconds=seconds, error=answer["error"])
    try:
        rewards = as_rewards(answer["value"])
    except GraderFailed as error:
        return AgentEnd(termination_reason="error", seconds=seconds, error=f"the called function failed: {error}")
    return AgentEnd(termination_reason="exit_status_0", seconds=seconds, rewards=rewards)
