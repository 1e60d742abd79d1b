"""`python -m examples.demos.small`: an agent learns a task on this machine in minutes."""

from __future__ import annotations

from examples.demos.driver import Demo, DemoSettings, demo_command

command = demo_command(
    "demo-small",
    DemoSettings,
    Demo,
    "Build a small model, start the whole stack, and let an agent learn a task from its rewards.",
)

if __name__ == "__main__":
    command()
