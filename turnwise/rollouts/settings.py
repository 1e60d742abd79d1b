"""Settings of `turnwise run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr

from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.errors import SettingsError
from turnwise.settings import FromJson, Settings

DEFAULT_TIMEOUT_SECONDS = 600.0


class RunSettings(Settings):
    """Settings of `turnwise run`."""

    url: str = DEFAULT_BASE_URL
    """Address of the proxy; by default that of the `turnwise up` that runs in this directory."""
    api_key: SecretStr | None = None
    """Key of the proxy that may create sessions and give rewards; none if the proxy has no keys."""
    agent: str | None = None
    """Known agent whose variables, files and flags the command needs; by default the command's name decides."""
    model: str | None = None
    """Model name for the agents; by default the served one."""
    tasks: Path | None = None
    """JSON Lines file with one task per line; without it the command runs once, in this directory."""
    split: Literal["train", "eval"] = "train"
    """Which tasks to play; sessions of `eval` are never trained on."""
    group_size: int = Field(default=1, ge=1)
    """Number of runs of each training task, whose rewards are compared with each other. Held-out tasks are played once
    in each pass."""
    parallel: int = Field(default=4, ge=1)
    """Number of concurrent runs."""
    workdir: Path | None = None
    """Directory that is copied for each run; by default each run starts in an empty directory."""
    reward_command: str | None = None
    """Grader: reads the session as JSON, answers with an exit status, a number or JSON Lines."""
    reward_timeout: float = Field(default=60.0, gt=0)
    """Seconds that the grader may take."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that a run may take before its process tree is ended; 600 with tasks, no limit without."""
    credit: Literal["propagate", "step_wise"] = "propagate"
    """How rewards reach the turns: the session's reward to all, or each step's own."""
    gamma: float = Field(default=0.0, ge=0, le=1)
    """Discount of the return over steps."""
    sampling: Annotated[dict[str, Any], FromJson] = Field(default_factory=dict)
    """Sampling parameters that replace those of the agent's calls, such as {"temperature": 0} for held-out tasks."""
    passes: int = Field(default=1, ge=1)
    """Number of times that all tasks are played."""
    watch: bool = False
    """Play pass after pass until interrupted, and read the tasks file again for each."""
    groups_per_version: int | None = Field(default=None, ge=1)
    """Groups that make one policy version: rollouts wait for the trainer; by default they do not wait."""
    lead: float = Field(default=2.0, ge=1)
    """With groups_per_version: versions' worth of groups that may be played before the trainer has used them."""
    out: Path | None = None
    """Directory of results, logs and copies; the same directory resumes. By default runs/ and the tasks file's name."""
    keep_workdirs: bool = False
    """Keep each run's copy of the directory after it is graded."""
    scratch_home: bool | None = None
    """Give runs their own HOME; by default known agents and all runs of tasks get one."""
    call: str | None = None
    """`module:function` to call instead of a command, in warm worker processes."""
    workers: int = Field(default=1, ge=1)
    """Number of worker processes of `call`; the parallel runs are divided among them."""
    python: str = sys.executable
    """Interpreter of the workers; the agent's packages may live in its own environment."""

    @property
    def runs_per_task(self) -> int:
        return self.group_size if self.split == "train" else 1

    @property
    def timeout_seconds(self) -> float:
        return self.timeout or DEFAULT_TIMEOUT_SECONDS

    def directory(self) -> Path:
        if self.out is not None:
            return self.out
        return Path("runs") / (self.tasks.stem if self.tasks is not None else "run")


def check(settings: RunSettings, argv: tuple[str, ...]) -> None:
    """Check the combination of the settings.

    Raises:
        SettingsError: the settings do not fit together.
    """
    if bool(argv) == bool(settings.call):
        raise SettingsError("give either a command after `--`, or --call module:function")
    if settings.call is not None and settings.tasks is None:
        raise SettingsError("--call needs --tasks: the function is called with a task")
    if settings.call is not None and ":" not in settings.call:
        raise SettingsError(f"--call {settings.call!r} names no function; write module:function")
    if settings.workdir is not None and not settings.workdir.is_dir():
        raise SettingsError(f"--workdir {str(settings.workdir)!r} is no directory; each run gets a copy of it")
    if settings.tasks is None:
        for name in ("workdir", "watch", "groups_per_version"):
            if getattr(settings, name):
                raise SettingsError(f"--{name.replace('_', '-')} needs --tasks")
