"""Settings of `turnwise reward`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.errors import SettingsError
from turnwise.settings import Settings

DEFAULT_RUBRIC = "How well did the assistant do what it was asked to do? 0 is not at all, 10 is perfectly."


class RewardSettings(Settings):
    """Settings of `turnwise reward`."""

    source: Literal["command", "python", "judge"]
    """Who decides: a program, a Python function, or a judging model."""
    url: str = DEFAULT_BASE_URL
    """Address of the proxy; by default that of the `turnwise up` that runs in this directory."""
    api_key: SecretStr | None = None
    """Key of the proxy that may read sessions and give rewards; none where the proxy asks for none."""
    name: str = "reward"
    """Name of the rewards; another name gives rewards of another kind beside them."""
    unrewarded: bool = True
    """Only sessions without any reward. Off, also others: a reward of a session replaces those of its turns and steps
    in its sum (docs/rewards.md)."""
    split: Literal["train", "eval"] | None = None
    """Only sessions of this split."""
    task_id: str | None = None
    """Only sessions of this task."""
    command: str | None = None
    """For the source `command`: reads a session as JSON, answers with an exit status, a number or JSON Lines."""
    function: str | None = None
    """For the source `python`: `module:function`, called with the session; returns what a grader would print."""
    workdir: Path = Path()
    """Working directory of the command."""
    judge_url: str | None = None
    """For the source `judge`: an OpenAI-compatible base URL, with `/v1`; by default an eval session of the proxy."""
    judge_model: str | None = None
    """Model of the judge; by default the first that it serves."""
    judge_key: SecretStr | None = None
    """API key of the judge."""
    rubric: str = DEFAULT_RUBRIC
    """What the judge is asked; it answers with a score from 0 to 10, and the reward is a tenth of it."""
    relative: bool = False
    """The judge compares the sessions of a group with each other, in one call, instead of scoring each alone."""
    votes: int = Field(default=2, ge=1)
    """Calls of the judge for each verdict, which are averaged. Each sees the sessions of a group in another order."""
    judge_cache: Path | None = None
    """File in which a judge's answers are kept; no vote on the same prompt is asked for again."""
    check: Path | None = None
    """JSON Lines file with `session_id` and `reward` of sessions whose outcome is known: the source decides on them
    first, and posts nothing if it disagrees."""
    min_agreement: float = Field(default=0.7, ge=0, le=1)
    """With check: share of the pairs of sessions with different outcomes that the source must rank as they are."""
    parallel: int = Field(default=4, ge=1)
    """Verdicts at a time."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds that one verdict may take."""
    attempts: int = Field(default=3, ge=1)
    """Attempts before a session is left without a reward."""
    watch: bool = False
    """Go on with sessions that end later, until interrupted."""
    max_sessions: int | None = Field(default=None, ge=1)
    """Stop after this number of sessions."""
    state: Path | None = None
    """File of the sessions that have their reward; by default runs/reward-SOURCE-NAME.jsonl."""

    def state_path(self) -> Path:
        return self.state or Path("runs") / f"reward-{self.source}-{self.name}.jsonl"


def check(settings: RewardSettings) -> None:
    """Check what no single setting shows.

    Raises:
        SettingsError: the settings do not fit together.
    """
    needed = {"command": "command", "python": "function"}.get(settings.source)
    if needed is not None and getattr(settings, needed) is None:
        raise SettingsError(f"--source {settings.source} needs --{needed}")
    if settings.function is not None and ":" not in settings.function:
        raise SettingsError(f"--function {settings.function!r} names no function; write module:function")
    if settings.judge_cache is not None and settings.source != "judge":
        raise SettingsError(f"--judge-cache is for --source judge, not for {settings.source}")
    if settings.relative and settings.source != "judge":
        raise SettingsError(f"--relative is for --source judge, not for {settings.source}")
