"""Plays any agent as rollouts: each run has its own session, is graded and recorded once, and can be resumed.

`opened(settings)` yields a `Runner`; its `play(tasks, group_size=8)` plays the tasks and returns the results.
"""

from turnwise.rollouts.opening import opened, play_all
from turnwise.rollouts.results import RunResult
from turnwise.rollouts.runner import Runner
from turnwise.rollouts.settings import RunSettings
from turnwise.rollouts.tasks import Task, load_tasks

__all__ = ["RunResult", "RunSettings", "Runner", "Task", "load_tasks", "opened", "play_all"]
