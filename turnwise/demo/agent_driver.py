"""The demo with a third-party agent: mini-swe-agent, unmodified, learns the trail as files in a real shell.

It is the demo of `driver` with another model format. The agent is a function `play(task, run)` and may have its own
virtual environment. `AGENT_WORLDS` lists the formats of tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from turnwise.demo import shell_trail, trail, typed_trail
from turnwise.demo.driver import Demo, DemoSettings
from turnwise.demo.plain_agent import Split
from turnwise.processes.printer import Say
from turnwise.types import Json

AGENT_WORLDS = {"shell_trail": shell_trail, "typed_trail": typed_trail}
"""The modules that write an agent's tasks; the model is warmed with conversations of the same module."""


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
        self.world = settings.world
        self.call = ".".join(settings.agent.with_suffix("").parts) + ":play"
        self.python = settings.python
        self.num_parallel = settings.parallel

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:  # noqa: ARG002  it needs none
        """Return a line of a tasks file, which holds the whole task."""
        line: Json = AGENT_WORLDS[self.world].for_agent(trail.make_task(split, index, self._settings.seed))
        return line
