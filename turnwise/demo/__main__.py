"""`python -m turnwise.demo`: see an agent learn, on this machine, in minutes."""

from __future__ import annotations

import logging
import sys
import time

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.demo.driver import DemoSettings, main


def run(settings: DemoSettings) -> None:
    """Run the demo, talking to the terminal."""
    logging.basicConfig(level="WARNING")
    started = time.monotonic()

    def say(who: str, text: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {who:8s} {text}")

    sys.exit(main(settings, say))


command = SettingsCommand(
    "demo",
    model="turnwise.demo.driver:DemoSettings",
    section="demo",
    run=run,
    help="Build a small model, start the whole stack, and let an agent learn a task from its rewards.",
)

if __name__ == "__main__":
    command()
