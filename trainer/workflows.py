"""The names of EvoRL for `Training`: workflows of an environment and an agent, compiled and sharded by `enable_*`.

The environment is the claims of a ledger, and the agent is the policy with its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from trainer.claims.claims import Claims
from trainer.evaluate import Evaluator
from trainer.features import FEATURES, Settings
from trainer.features.devices import Sharded, join_world
from trainer.model.agent import PolicyAgent
from trainer.replay import ReplayBuffer
from trainer.settings import TrainerSettings
from trainer.train import Training, make_parts
from trainer.versions.starts import OptimizerLike

Config = TrainerSettings | Mapping[str, Any]


class RLWorkflow(Training):
    """What every workflow is: five parts, a `State`, and the loop over `step`."""

    has_buffer = False
    """Whether claimed groups go into a replay buffer, from which batches are sampled."""

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @classmethod
    def build_from_config(cls, config: Config, enable_multi_devices: bool = False, enable_jit: bool = True) -> Self:
        settings = as_settings(config)
        make: Callable[..., Self] = cls
        workflow = make(*make_parts(settings, has_buffer=cls.has_buffer, features=FEATURES), settings)
        if enable_multi_devices:
            workflow.enable_multi_devices()
        if enable_jit:
            workflow.enable_jit()
        return workflow

    @property
    def env(self) -> Claims:
        return self.claims

    @property
    def agent(self) -> PolicyAgent:
        return self.learner

    @property
    def config(self) -> TrainerSettings:
        return self.learner.settings

    def enable_jit(self) -> None:
        """Compile this instance's layers with `torch.compile`; before `setup`."""
        self.compile()

    def enable_multi_devices(self) -> None:
        """Train with all processes that `torchrun` started; before `setup`."""
        self.learner.shard(join_world())

    def enable_shmap(self, axis_name: str) -> None:
        """Shard over a mesh of this axis; before `setup`."""
        self.learner.shard(Sharded(axis_name))


class OnPolicyWorkflow(RLWorkflow):
    """Claims rewarded groups, trains on them, publishes a version, and acknowledges them."""

    def __init__(
        self, env: Claims, agent: PolicyAgent, optimizer: OptimizerLike, evaluator: Evaluator | None, config: Config
    ) -> None:
        super().__init__(env, agent, optimizer, evaluator, settings=as_settings(config), features=FEATURES)


class OffPolicyWorkflow(RLWorkflow):
    """Moves finished groups into a buffer and trains on samples of it."""

    has_buffer = True

    def __init__(
        self,
        env: Claims,
        agent: PolicyAgent,
        optimizer: OptimizerLike,
        evaluator: Evaluator | None,
        replay_buffer: ReplayBuffer,
        config: Config,
    ) -> None:
        super().__init__(
            env, agent, optimizer, evaluator, replay_buffer, settings=as_settings(config), features=FEATURES
        )
        self.replay_buffer = replay_buffer


def as_settings(config: Config) -> TrainerSettings:
    if isinstance(config, TrainerSettings):
        return config
    plain: Mapping[str, Any] = config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        plain = OmegaConf.to_container(config, resolve=True)
    return Settings(**{str(key): value for key, value in plain.items()})
