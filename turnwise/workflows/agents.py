"""Base classes of a workflow: agents, which call the model, and environments, which execute the agents' actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from turnwise.types import Json
from turnwise.workflows.episodes import Action, Step, Trajectory


class BaseAgent(ABC):
    """Turns observations into messages, replies into actions, and both into a trajectory."""

    @property
    def chat_completions(self) -> list[Json]:
        """The conversation to send to the model."""
        return []

    @property
    @abstractmethod
    def trajectory(self) -> Trajectory:
        """The steps so far."""

    @abstractmethod
    def update_from_env(self, observation: Any, reward: float, done: bool, info: Json, **kwargs: Any) -> None:
        """Record the answer of the environment."""

    @abstractmethod
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """Record the reply of the model and return the action."""

    @abstractmethod
    def reset(self) -> None:
        """Start a new trajectory."""

    def get_current_state(self) -> Step | None:
        """Return the newest step; None before the first."""
        return self.trajectory.steps[-1] if self.trajectory.steps else None


class BaseEnv(ABC):
    """An environment in which an agent acts."""

    @property
    def idx(self) -> Any:
        """Position in a batch of environments."""
        return getattr(self, "_idx", None)

    @idx.setter
    def idx(self, value: Any) -> None:
        self._idx = value

    @abstractmethod
    def reset(self, task: Json | None = None) -> tuple[Any, Json]:
        """Start a task; return the first observation and its info."""

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, Json]:
        """Perform an action; return observation, reward, whether the task is done, and info."""

    def close(self) -> None:  # noqa: B027 most environments have no resources
        """Release the environment's resources."""

    @staticmethod
    def from_dict(info: Json) -> BaseEnv:
        """Return an environment for a task's description."""
        raise NotImplementedError(f"this environment cannot be made from {sorted(info)!r}: define from_dict on it")

    @staticmethod
    def is_multithread_safe() -> bool:
        """Return whether several threads of one process may use instances."""
        return True
