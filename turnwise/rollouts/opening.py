"""How `turnwise run` begins and is interrupted: client, player and results become a runner for all passes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from turnwise.client import AsyncClient
from turnwise.errors import SettingsError
from turnwise.processes.limited import find_program, with_script
from turnwise.rollouts.agents import DEFAULT_CONTEXT_TOKENS, Model, find_agent
from turnwise.rollouts.players import CommandPlayer, Player
from turnwise.rollouts.results import Results, RolloutProgress, RunResult
from turnwise.rollouts.runner import OnResult, Pace, Runner
from turnwise.rollouts.settings import RunSettings, check
from turnwise.rollouts.tasks import load_tasks, unfilled
from turnwise.rollouts.workers import CallPlayer

READY_SECONDS = 4.0


@contextlib.asynccontextmanager
async def opened(
    settings: RunSettings, argv: Sequence[str] = (), on_result: OnResult = lambda _: None
) -> AsyncIterator[Runner]:
    """Yield a runner with these settings; its workers end with the block.

    `argv` is the agent's command, unless `call` names a function; the setting `tasks` is not read here.

    Raises:
        SettingsError: the settings do not fit together, or there is no such program.
        ProxyUnavailable: the proxy is not ready.
    """
    check(settings, tuple(argv))
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(settings))
        await client.wait_until_ready(READY_SECONDS)
        plan = {"command": [settings.call] if settings.call else list(argv), "group_size": settings.group_size}
        results = stack.enter_context(Results(settings.directory(), plan))
        player = _player(settings, argv)
        stack.push_async_callback(player.close)
        await player.start()  # before any session is created
        pace = None
        if settings.groups_per_version is not None:
            pace = Pace(client, groups_per_version=settings.groups_per_version, lead=settings.lead)
        model = await served_model(settings, client)
        yield Runner(settings, client, player, results, model=model, pace=pace, on_result=on_result)


async def served_model(settings: RunSettings, client: AsyncClient) -> Model:
    served = (await client.models())[0]
    return Model(settings.model or served["id"], served.get("max_model_len") or DEFAULT_CONTEXT_TOKENS)


def connected(settings: RunSettings) -> AsyncClient:
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    return AsyncClient(settings.url, key, max_retries=10)


async def play_all(settings: RunSettings, argv: Sequence[str], progress: RolloutProgress) -> list[RunResult]:
    """Play all passes of the tasks file; the first interrupt lets running runs end, the second ends them.

    Raises:
        SettingsError: the tasks, the command or the settings cannot be used.
        ProxyUnavailable: the proxy cannot be reached.
        RolloutFailed: the agent never calls the model.
    """
    assert settings.tasks is not None
    for name in unfilled(argv, load_tasks(settings.tasks, settings.split)):
        progress.message(f"no task has a field {name!r}, so the command's arguments keep the text {{{name}}}")
    async with opened(settings, argv, on_result=progress.add) as runner:
        results: list[RunResult] = []
        with _interrupts(runner, progress.message):
            for pass_index in itertools.count() if settings.watch else range(settings.passes):
                tasks = load_tasks(settings.tasks, settings.split)
                before = runner.num_finished(pass_index, settings.split)
                num_runs = settings.passes * len(tasks) * settings.runs_per_task
                progress.num_planned = None if settings.watch else num_runs - before
                if before:
                    progress.message(f"{before} runs of pass {pass_index} are finished and are not played again")
                results += await runner.play(
                    tasks, split=settings.split, group_size=settings.runs_per_task, pass_index=pass_index
                )
                if runner.stopping.is_set():
                    progress.num_missing = 0 if settings.watch else num_runs - len(results)
                    break
        return results


@contextlib.contextmanager
def _interrupts(runner: Runner, message: Callable[[str], None]) -> Any:
    loop, playing = asyncio.get_running_loop(), asyncio.current_task()
    assert playing is not None

    def interrupt() -> None:
        if runner.stopping.is_set():
            playing.cancel()
            return
        runner.stopping.set()
        message("stopping: running runs are played to their end; interrupt again to end them now")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _player(settings: RunSettings, argv: Sequence[str]) -> Player:
    if settings.call is not None:
        return CallPlayer(settings, settings.call)
    if not argv:
        raise SettingsError("give a command after `--`, or --call module:function")
    agent = find_agent(argv, settings.agent)
    return CommandPlayer(
        agent,
        with_script([find_program(argv[0], "the command"), *argv[1:]], settings.workdir),
        timeout_seconds=settings.timeout_seconds,
        scratch_home=settings.scratch_home is not False,
    )
