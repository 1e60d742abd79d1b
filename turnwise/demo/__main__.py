"""`python -m turnwise.demo`: an agent learns a task on this machine in minutes."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.demo.driver import Demo, DemoSettings, main


def terminal() -> Callable[[str, str], None]:
    """Return a function that prints lines to the terminal with the elapsed seconds."""
    logging.basicConfig(level="WARNING")
    started = time.monotonic()

    def say(who: str, text: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {who:8s} {text}")

    return say


def run(settings: DemoSettings) -> None:
    """Run the demo with output on the terminal."""
    say = terminal()
    sys.exit(main(Demo(settings, say), settings, say))


command = SettingsCommand(
    "demo",
    section="demo",
    settings=lambda: DemoSettings,
    run=run,
    help="Build a small model, start the whole stack, and let an agent learn a task from its rewards.",
)

if __name__ == "__main__":
    command()
