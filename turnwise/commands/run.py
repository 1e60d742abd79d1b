"""`turnwise run`: any agent's command in its own session, or over all tasks of a file."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.commands.place import at_running_proxy

if TYPE_CHECKING:
    from turnwise.rollouts.settings import RunSettings

INTERRUPTED_STATUS = 130


class RunCommand(SettingsCommand):
    """Names the agent by `--as`."""

    def _flags(self) -> list[click.Parameter]:
        flags = [flag for flag in super()._flags() if flag.name not in {"agent", "as_json"}]
        named = "Known agent whose variables, files and flags the command needs; by default the command's name decides."
        return [
            click.Option(["--as", "agent"], metavar="NAME", help=named),
            click.Option(["--json", "as_json"], is_flag=True, help="Print the results as JSON."),
            *flags,
        ]


def _run(settings: RunSettings, argv: tuple[str, ...], *, as_json: bool) -> None:
    settings = at_running_proxy(settings)
    if settings.tasks is None:
        _run_once(settings, argv, as_json=as_json)
    from turnwise.rollouts import opening
    from turnwise.rollouts import results as report
    from turnwise.rollouts.runner import no_call_cause

    progress = report.RolloutProgress()
    try:
        results = asyncio.run(opening.play_all(settings, argv, progress))
    except asyncio.CancelledError:
        click.echo("turnwise: interrupted; the same command continues where this one stopped", err=True)
        sys.exit(INTERRUPTED_STATUS)
    if as_json:
        runs = [dataclasses.asdict(result) for result in results]
        click.echo(json.dumps({"summary": report.summary(results), "runs": runs}, indent=2))
    else:
        click.echo("\n".join(report.table(results)))
    if progress.num_missing:
        num_all = len(results) + progress.num_missing
        click.echo(
            f"turnwise: interrupted: {len(results)} of {num_all} runs are played; the same command plays the others",
            err=True,
        )
        sys.exit(INTERRUPTED_STATUS)
    if results and not any(result.num_turns for result in results):
        click.echo(f"turnwise: no run made a model call {no_call_cause(results[0], settings)}", err=True)
        sys.exit(1)
    problems = [result for result in results if result.error is not None]
    if problems:
        click.echo(
            f"turnwise: {len(problems)} runs have an error, the first of session {problems[0].session_id}: "
            f"{problems[0].error}",
            err=True,
        )
    sys.exit(1 if problems else 0)


def _run_once(settings: RunSettings, argv: tuple[str, ...], *, as_json: bool) -> None:
    from turnwise.rollouts import single

    def say(text: str) -> None:
        click.echo(f"turnwise: {text}", err=True)

    result = asyncio.run(single.run_once(settings, argv, say))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    reward = "no reward" if result.reward is None else f"reward {result.reward:g}"
    turns = "1 turn" if result.num_turns == 1 else f"{result.num_turns} turns"
    say(f"session {result.session_id} ended: {turns}, {reward}, {result.termination_reason}")
    if result.error is not None:
        say(result.error)
    if result.num_turns == 0:
        say("the command made no model call; point it by TURNWISE_BASE_URL or OPENAI_BASE_URL, or name it with --as")
    sys.exit(single.exit_status(result))


run = RunCommand(
    "run",
    section="run",
    run=_run,
    prints_json=True,
    takes_extra="[-- COMMAND…]",
    help="Run any agent through the proxy: one command in its own session, or all tasks of a file as rollouts.",
)
