"""The command `reward`, which gives ended sessions their rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
from typing import TYPE_CHECKING

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.commands.place import at_running_proxy

if TYPE_CHECKING:
    from turnwise.rewards.posting import Poster
    from turnwise.rewards.settings import RewardSettings


def _run_reward(settings: RewardSettings, *, as_json: bool) -> None:
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


def _stop_on_signals(poster: Poster) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, poster.stopping.set)


reward = SettingsCommand(
    "reward",
    section="reward",
    run=_run_reward,
    prints_json=True,
    help="Give ended sessions their rewards: from a program, a Python function, rules, or a judging model.",
)
