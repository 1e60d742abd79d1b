"""rLLM's `Workflow` with its agents and environments: a run that returns an episode in all cases, also after a failure.

As in rLLM, a workflow ends with an exception (`TerminationEvent`), so the trajectories that exist at that time are
collected in all cases. Rewards are shaped once, at the end, from the raw rewards of the steps.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import traceback
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

from turnwise import credit
from turnwise.errors import InvalidRequest
from turnwise.types import Json
from turnwise.workflows.episodes import Action, Episode, Step, TerminationEvent, TerminationReason, Trajectory
from turnwise.workflows.rollout import RolloutEngine


class BaseAgent(ABC):
    """Turns observations into messages, replies into actions, and both into a trajectory."""

    @property
    def chat_completions(self) -> list[Json]:
        return []

    @property
    @abstractmethod
    def trajectory(self) -> Trajectory: ...

    @abstractmethod
    def update_from_env(self, observation: Any, reward: float, done: bool, info: Json, **kwargs: Any) -> None: ...

    @abstractmethod
    def update_from_model(self, response: str, **kwargs: Any) -> Action: ...

    @abstractmethod
    def reset(self) -> None: ...

    def get_current_state(self) -> Step | None:
        return self.trajectory.steps[-1] if self.trajectory.steps else None


class BaseEnv(ABC):
    """An environment in which an agent acts."""

    @property
    def idx(self) -> Any:
        return getattr(self, "_idx", None)

    @idx.setter
    def idx(self, value: Any) -> None:
        self._idx = value

    @abstractmethod
    def reset(self, task: Json | None = None) -> tuple[Any, Json]: ...

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, Json]:
        """Perform an action; return observation, reward, whether the task is done, and info."""

    def close(self) -> None:  # noqa: B027 most environments have no resources
        ...

    @staticmethod
    def from_dict(info: Json) -> BaseEnv:
        raise NotImplementedError(f"this environment cannot be made from {sorted(info)!r}: define from_dict on it")

    @staticmethod
    def is_multithread_safe() -> bool:
        return True


logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Workflow(ABC):
    """One agent program. Subclasses write `run`; the engine calls `run_with_termination_handling`."""

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor | None,
        timeout: float = 1e6,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        **_: Any,
    ) -> None:
        """Store the parts of a run; other arguments are for subclasses.

        Blocking calls of environments and tools run in the executor, and a run takes at most `timeout` seconds.
        `gamma` is the discount of step returns, and `reward_bonus_coeff` the weight of a step's improvement over the
        previous step; 0 disables each.
        """
        self.rollout_engine = rollout_engine
        self.executor = executor
        self.timeout = int(timeout)
        self.gamma = gamma
        self.reward_bonus_coeff = reward_bonus_coeff
        self._completed_trajectories: list[Trajectory] = []

    @abstractmethod
    async def run(self, task: Json, uid: str, **kwargs: Any) -> Episode | None:
        """Run the task; call `self.reset(task, uid)` first. A returned episode is used unchanged."""

    async def run_with_termination_handling(self, task: Json, uid: str, **kwargs: Any) -> Episode:
        """Run the task and return its episode, also after an exception."""
        error = None
        try:
            output = await asyncio.wait_for(self.run(task, uid, **kwargs), timeout=self.timeout)
            if isinstance(output, Episode):
                return output
            reason = TerminationReason.UNKNOWN
        except TimeoutError:
            reason = TerminationReason.TIMEOUT
        except TerminationEvent as event:
            reason = event.reason
        except Exception as exception:  # noqa: BLE001 user code: its failure is an outcome of the run, recorded below
            logger.warning("[%s] the workflow failed: %r", uid, exception)
            reason = TerminationReason.ERROR
            error = {
                "error_message": str(exception),
                "error_type": type(exception).__name__,
                "traceback": traceback.format_exc(),
            }
        return self.postprocess_episode(self.collect_trajectories(), reason, error)

    def commit(
        self,
        name: str | None = None,
        agent: BaseAgent | None = None,
        trajectory: Trajectory | None = None,
        reset: bool = False,
    ) -> None:
        """Store a copy of an agent's trajectory or of the given one, unless it has no steps.

        Raises:
            InvalidRequest: both or neither of agent and trajectory are given.
        """
        if (agent is None) == (trajectory is None):
            raise InvalidRequest("commit() takes an agent or a trajectory: give exactly one of them")
        kept = trajectory if agent is None else agent.trajectory
        assert kept is not None
        if name:
            kept.name = name
        if kept.steps:
            self._completed_trajectories.append(copy.deepcopy(kept))
        if agent is not None and reset:
            agent.reset()

    def collect_trajectories(self) -> Episode:
        """Return an episode of the committed trajectories, followed by those of this workflow's public agents."""
        episode = Episode(trajectories=list(self._completed_trajectories))
        committed = {trajectory.uid for trajectory in episode.trajectories}
        for agent in self._public_agents():
            if agent.trajectory.steps and agent.trajectory.uid not in committed:
                episode.trajectories.append(copy.deepcopy(agent.trajectory))
        return episode

    def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
        trajectory.reward = float(sum(step.reward for step in trajectory.steps))

    def adjust_step_rewards(self, trajectory: Trajectory) -> None:
        """Add the bonus, then replace each step's reward by its discounted return."""
        raw = [step.reward for step in trajectory.steps]
        shaped = credit.shape_returns(raw, self.gamma, self.reward_bonus_coeff)
        for step, reward in zip(trajectory.steps, shaped, strict=True):
            step.reward = reward

    def assign_episode_correctness(self, episode: Episode) -> None:
        episode.is_correct = sum(trajectory.reward or 0.0 for trajectory in episode.trajectories) > 0

    def collect_metrics(self, episode: Episode) -> None:
        """Set `{name}_acc` to the mean reward of the trajectories of each name."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for trajectory in episode.trajectories:
            rewards[trajectory.name].append(trajectory.reward)
        episode.metrics = {f"{name}_acc": sum(values) / len(values) for name, values in rewards.items()}

    def postprocess_episode(
        self, episode: Episode, termination_reason: TerminationReason | None = None, error: Json | None = None
    ) -> Episode:
        """Set an episode's names, rewards, correctness, metrics and reason. A second call would shape rewards again."""
        episode.id = self.uid
        episode.task = self.task
        for trajectory in episode.trajectories:
            # An agent that fails between its environment's answer and the model's reply leaves a step without a reply.
            if trajectory.steps and not trajectory.steps[-1].chat_completions:
                trajectory.steps.pop()
            self.compute_trajectory_reward(trajectory)
            if len(trajectory.steps) > 1:
                self.adjust_step_rewards(trajectory)
        self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        episode.info["error"] = error
        episode.termination_reason = termination_reason or TerminationReason.UNKNOWN
        return episode

    def reset(self, task: Json | None = None, uid: str | None = None) -> None:
        """Discard the state of the last run: reset the agents, and reset the environments to the task."""
        self.uid = uid or ""
        self.task = task
        self._completed_trajectories = []
        for agent in self._public_agents():
            agent.reset()
            agent.trajectory.task = task
        for part in self._public_parts():
            if isinstance(part, BaseEnv):
                part.reset(task=task)

    def is_multithread_safe(self) -> bool:
        parts = (getattr(self, name) for name in dir(self))
        return all(part.is_multithread_safe() for part in parts if isinstance(part, BaseEnv))

    async def run_in_executor(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, functools.partial(fn, *args, **kwargs))

    def _public_parts(self) -> Iterator[Any]:
        return (getattr(self, name) for name in dir(self) if not name.startswith("_"))

    def _public_agents(self) -> Iterator[BaseAgent]:
        return (part for part in self._public_parts() if isinstance(part, BaseAgent))
