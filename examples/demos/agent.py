"""`python -m examples.demos.agent`: mini-swe-agent, unmodified, learns the trail as files in a real shell.

The agent is a function `play(task, run)` and may have its own virtual environment. It has its own form of the task,
and the model is warmed up with conversations of this form.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from examples.demos.driver import Demo, DemoSettings, demo_command
from examples.demos.plain_agent import Split
from examples.demos.trail_formats import FORMATS
from turnwise.default_models import trail
from turnwise.processes.terminal import Say
from turnwise.types import Json


class AgentDemoSettings(DemoSettings):
    """Settings of `make demo-agent`."""

    agent: Path = Path("examples/mini_swe_agent/agent.py")
    world: Literal["shell_trail", "typed_trail"] = "shell_trail"
    """Format of the agent's tasks and of the model's conversations: shell commands, or calls of a typed tool."""
    trainer_config: Path = Path("examples/mini_swe_agent/train.toml")
    out: Path = Path("runs/demo-agent")
    groups_per_batch: int = Field(default=16, ge=1)
    target_reward: float = Field(default=0.85, gt=0, le=1)
    """Mean reward of a batch of training tasks that starts a held-out evaluation.

    It is below `enough_reward` because training tasks are sampled at temperature 1 and held-out tasks greedily."""
    enough_reward: float = Field(default=0.95, gt=0, le=1)
    python: str = sys.executable
    """Interpreter of the environment that the agent is installed in."""
    parallel: int = Field(default=32, ge=1)
    """Number of concurrent sessions."""


class AgentDemo(Demo):
    """One run of the demo with an agent that `turnwise run` calls itself."""

    def __init__(self, settings: AgentDemoSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._format = FORMATS[settings.world]
        self.warm_up = self._format.warm_up
        self.call = ".".join(settings.agent.with_suffix("").parts) + ":play"
        self.python = settings.python
        self.num_parallel = settings.parallel

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:  # noqa: ARG002  it needs none
        """Return a line of a tasks file, which holds the whole task."""
        return self._format.for_agent(trail.make_task(split, index, self._settings.seed))


command = demo_command(
    "demo-agent",
    AgentDemoSettings,
    AgentDemo,
    "Build a small model, start the whole stack, and let mini-swe-agent learn a task from its rewards.",
)

if __name__ == "__main__":
    command()
