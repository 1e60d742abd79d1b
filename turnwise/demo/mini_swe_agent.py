"""`python -m turnwise.demo.mini_swe_agent`: a third-party agent learns a task on this machine."""

from __future__ import annotations

import sys

from turnwise.commands.flags import SettingsCommand
from turnwise.demo.__main__ import terminal
from turnwise.demo.agent_driver import AgentDemo, AgentDemoSettings
from turnwise.demo.driver import main


def run(settings: AgentDemoSettings) -> None:
    """Run the demo with output on the terminal."""
    say = terminal()
    sys.exit(main(AgentDemo(settings, say), settings, say))


command = SettingsCommand(
    "demo-agent",
    section="demo",
    settings=lambda: AgentDemoSettings,
    run=run,
    help="Build a small model, start the whole stack, and let mini-swe-agent learn a task from its rewards.",
)

if __name__ == "__main__":
    command()
