"""`turnwise reward`: rewards from a program, a function, rules or a judging model, as a separate process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.commands.location import at_running_proxy

if TYPE_CHECKING:
    from turnwise.rewards.posting import Poster
    from turnwise.rewards.settings import RewardSettings


class RewardCommand(SettingsCommand):
    """Lets `--json` print the counts."""

    def _invoke(self, **values: Any) -> None:
        self._run = _run_as_json if values["as_json"] else _run
        super()._invoke(**values)


def _run(settings: RewardSettings, *, as_json: bool = False) -> None:
    from turnwise.rewards import posting

    terminal = sys.stderr.isatty()

    def report(text: str) -> None:
        click.echo(f"\r\x1b[K{text}" if terminal else text, err=True, nl=not terminal)

    counts = asyncio.run(posting.post_rewards(at_running_proxy(settings), report, on_start=_stop_on_signals))
    if terminal:
        click.echo(err=True)
    click.echo(json.dumps(dataclasses.asdict(counts), indent=2) if as_json else counts.line())
    if counts.last_error is not None:
        click.echo(f"turnwise: {counts.num_failed} sessions failed, the last: {counts.last_error}", err=True)
    sys.exit(1 if counts.num_failed else 0)


def _run_as_json(settings: RewardSettings) -> None:
    _run(settings, as_json=True)


def _stop_on_signals(poster: Poster) -> None:
    """Let verdicts that have begun end, and begin no more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, poster.stopping.set)


reward = RewardCommand(
    "reward",
    section="reward",
    run=_run,
    help="Give ended sessions their rewards: from a program, a Python function, rules, or a judging model.",
)
