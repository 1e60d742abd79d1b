"""The names of EvoRL for `Training`: workflows of an environment and an agent, compiled and sharded by `enable_*`.

The environment is the claims of a ledger, and the agent is the policy with its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from trainer.claims.claims import Claims
from trainer.features import FEATURES, Settings
from trainer.features.devices import Sharded, join_world
from trainer.features.evaluation import Evaluation, Evaluator
from trainer.features.policies import make_parts
from trainer.features.replay import ReplayBuffer, ReplayClaims
from trainer.model.agent import PolicyAgent
from trainer.settings import TrainerSettings
from trainer.train import Training
from trainer.versions.resume import OptimizerLike
from trainer.versions.state import State
from turnwise.types import Json

Config = Settings | Mapping[str, Any]


class RLWorkflow(Training):
    """What every workflow is: five parts, a `State`, and the loop over `step`."""

    kind: ClassVar[str]
    """The setting `workflow` that it stands for."""
    num_parts: ClassVar[int] = 4

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @classmethod
    def build_from_config(cls, config: Config, enable_multi_devices: bool = False, enable_jit: bool = True) -> Self:
        settings = as_settings(config).model_copy(update={"workflow": cls.kind})
        claims, learner, optimizer = make_parts(settings, features=FEATURES)
        parts = claims, learner, optimizer, Evaluator(claims, settings), ReplayBuffer(claims, settings)
        make: Callable[..., Self] = cls
        workflow = make(*parts[: cls.num_parts], settings)
        if enable_multi_devices:
            workflow.enable_multi_devices()
        if enable_jit:
            workflow.enable_jit()
        return workflow

    def __init__(
        self, env: Claims, agent: PolicyAgent, optimizer: OptimizerLike, evaluator: Evaluator | None, config: Config
    ) -> None:
        super().__init__(env, agent, optimizer, settings=as_settings(config), features=FEATURES)
        beside = [each for each in self.beside if isinstance(each, Evaluation)]
        self.evaluation = beside[0] if beside else Evaluation(env, agent, {})
        self.evaluation.evaluator = evaluator

    def evaluate(self, state: State) -> tuple[Json, State]:
        return self.evaluation.evaluate(state.progress.policy_version), state

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

    kind = "on_policy"


class OffPolicyWorkflow(RLWorkflow):
    """Moves finished groups into a buffer and trains on samples of it."""

    kind = "off_policy"
    num_parts = 5

    def __init__(
        self,
        env: Claims,
        agent: PolicyAgent,
        optimizer: OptimizerLike,
        evaluator: Evaluator | None,
        replay_buffer: ReplayBuffer,
        config: Config,
    ) -> None:
        super().__init__(env, agent, optimizer, evaluator, config)
        if isinstance(env, ReplayClaims):
            env.buffer = replay_buffer
        self.replay_buffer = replay_buffer


def as_settings(config: Config) -> Settings:
    if isinstance(config, Settings):
        return config
    plain: Mapping[str, Any] = config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        plain = OmegaConf.to_container(config, resolve=True)
    return Settings(**{str(key): value for key, value in plain.items()})
