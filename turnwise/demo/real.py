"""`python -m turnwise.demo.real`: a pretrained model of 135 M parameters learns a task of three turns."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from turnwise.commands.flags import SettingsCommand
from turnwise.demo import bosses
from turnwise.demo.__main__ import terminal
from turnwise.demo.driver import Demo, DemoSettings, main
from turnwise.demo.pretrained import write_pretrained


class RealDemoSettings(DemoSettings):
    """Settings of `make demo-real`."""

    agent: Path = Path("examples/bosses/agent.py")
    trainer_config: Path = Path("examples/bosses/train.toml")
    out: Path = Path("runs/demo-real")
    groups_per_batch: int = Field(default=8, ge=1)
    target_reward: float = Field(default=0.92, gt=0, le=1)
    enough_reward: float = Field(default=0.9, gt=0, le=1)
    num_eval_tasks: int = Field(default=128, ge=1)
    max_versions: int = Field(default=30, ge=1)


class RealDemo(Demo):
    """The demo with pretrained weights."""

    tasks = bosses
    num_parallel = 16

    def _build_model(self) -> str:
        directory = self._settings.out / "SmolLM2-135M-Instruct"
        self._say("model", f"SmolLM2-135M-Instruct (quantised to 4 bits before) in {directory}")
        return str(write_pretrained(directory))


def run(settings: RealDemoSettings) -> None:
    """Run the demo with output on the terminal."""
    say = terminal()
    sys.exit(main(RealDemo(settings, say), settings, say))


command = SettingsCommand(
    "demo-real",
    section="demo",
    settings=lambda: RealDemoSettings,
    run=run,
    help="Let a pretrained model learn a task from its rewards, everything real.",
)

if __name__ == "__main__":
    command()
