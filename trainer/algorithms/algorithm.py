"""What an algorithm is: the class that every file in this folder, and every user's own file, derives from.

The trainer claims sessions, computes logprobs, packs rows, weighs tokens, steps and publishes. An algorithm decides
what of a batch is trained (`choose`), with what loss a token (`loss`), and says which further numbers it needs. It
holds no state of the run. It sees a group as sessions, their chains and the turns of a chain, which are views on the
stored experiences. Legend: M trained tokens, K turns and L tokens of a chain.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from trainer.batch import selection
from trainer.batch.advantages import SingleValue
from trainer.batch.batch import Aggregation, Batch, Reals, Row
from trainer.batch.chain import Chain
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Selection, SelectionRule
from trainer.world import World
from turnwise.settings import Settings as BaseSettings
from turnwise.types import GroupKey, Json


class Scorer(Protocol):
    """Computes a batch's tokens with the trained model, before the first optimizer step of the batch."""

    world: World
    """The processes that train together; all call a method in step."""

    def logprobs_of(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the logprobs of the members' trained tokens. [M]."""

    def column_of(self, name: str, batch: Batch, members: Sequence[int]) -> Reals:
        """Return a column of the members' trained tokens that a head computes, such as a critic's `values`. [M]."""


class Algorithm(abc.ABC):
    """A learning algorithm."""

    name: ClassVar[str] = ""

    class Settings(BaseSettings): ...

    settings: BaseSettings

    needs_behaviour: bool = True
    """Whether it reads the logprobs under the policy that sampled. One that does not can train imported sessions, and
    turns that were sampled greedily or from a part of the distribution."""
    needs_proximal: bool = False
    """Whether it reads the logprobs under the weights at the start of a batch."""
    needs_reference: bool = False
    """Whether it reads the logprobs under the base model."""
    needs_values: bool = False
    """Whether a critic is trained beside the policy, with `critic_loss`."""
    critic_rate: float | None = None
    """Learning rate of the critic's own weights; None: ten times that of the policy."""
    credits_tokens: bool = False
    """Whether `credit` computes the advantages, so that groups without a difference in reward are trained too."""
    trains_pairs: bool = False
    """Whether chains are trained in pairs of a better and a worse session."""

    def __init__(self, settings: BaseSettings) -> None:
        self.settings = settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Algorithm) and type(other) is type(self) and other.settings == self.settings

    def __hash__(self) -> int:
        return hash(type(self))

    def __str__(self) -> str:
        kind = type(self)
        return str(vars(kind).get("name") or f"{kind.__module__}:{kind.__qualname__}")

    def table(self) -> Json:
        return {"name": str(self), **self.settings.model_dump(mode="json", exclude_none=True)}

    def reward(self, rewards: Mapping[str, float], metadata: Json) -> float | None:  # noqa: ARG002  for subclasses
        """Return the reward of a session from its rewards by name and its metadata; None: as it is stored."""
        return None

    @abc.abstractmethod
    def choose(self, offer: Selection) -> Selection:
        """Return the batch that is offered with what is trained of it, and with what credit."""

    def credit(self, batch: Batch, members: Sequence[int], scorer: Scorer) -> tuple[Batch, Json]:  # noqa: ARG002
        """Return the batch with the advantages of the members' tokens, and gauges; where `credits_tokens`."""
        return batch, {}

    def weights(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the weight of each trained token in the optimizer step over these members; they sum to 1. [M]."""
        return batch.weights(members, "token_mean", 1)

    def parts(self, tokens: TrainedTokens, batch: Batch, row: Row) -> Sequence[tuple[TrainedTokens, Algorithm]]:  # noqa: ARG002
        """Return the tokens of a row by the algorithm whose loss they have; this one's are first, and alone gauged."""
        return [(tokens, self)]

    @abc.abstractmethod
    def loss(self, tokens: TrainedTokens) -> Tensor:
        """Return the loss of each token. [M]."""

    def critic_loss(self, tokens: TrainedTokens) -> Tensor:
        """Return the critic's loss of each token; where `needs_values`. [M]."""
        raise NotImplementedError(f"{self} needs values and has no critic_loss")

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:  # noqa: ARG002  for subclasses
        """Return numbers of each token by name; their means are recorded with each batch. [M] each."""
        return {}

    def close(self) -> None:  # noqa: B027  most algorithms hold nothing
        ...


class Weighed(Algorithm):
    """An algorithm with a setting for how tokens are weighed against each other."""

    class Settings(BaseSettings):
        aggregation: Aggregation = "token_mean"
        """How tokens are weighed: `token_mean`, `session_mean` or `session_sum`."""

    settings: Settings

    session_tokens: int = 1024
    """The constant that `session_sum` divides by."""

    def weights(self, batch: Batch, members: Sequence[int]) -> Reals:
        return batch.weights(members, self.settings.aggregation, self.session_tokens)


def select(
    experiences: Sequence[Chain],
    keys: Iterable[GroupKey],
    algorithm: Algorithm,
    rule: SelectionRule,
    window: Sequence[SingleValue] = (),
) -> Selection:
    """Return what is trained of the experiences of the claimed groups with these keys."""
    needs = algorithm.needs_behaviour
    offered = selection.offer(experiences, keys, rule, window, algorithm.reward, needs_behaviour=needs)
    return algorithm.choose(offered)


def loss_of(tokens: TrainedTokens, algorithm: Algorithm) -> Tensor:
    if not len(tokens.logprobs):
        return tokens.logprobs.sum()
    return (tokens.weights * algorithm.loss(tokens)).sum()


def needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the batch was built without what this loss needs"
    return tensor


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of an agent."""

    chains: Sequence[Chain]

    @property
    def session_id(self) -> str:
        return self.chains[0].session_id

    @property
    def task(self) -> str:
        return self.chains[0].task_id

    @property
    def reward(self) -> float:
        return self.chains[0].reward

    @property
    def rewards(self) -> dict[str, float]:
        return self.chains[0].named_rewards

    @property
    def metadata(self) -> Json:
        return self.chains[0].metadata

    @property
    def num_sampled(self) -> int:
        return sum(int(chain.loss_mask.sum()) for chain in self.chains)


@dataclasses.dataclass(frozen=True)
class Group:
    """The sessions whose rewards are compared."""

    chains: Sequence[Chain]

    @functools.cached_property
    def sessions(self) -> list[Session]:
        found: dict[str, list[Chain]] = {}
        for chain in self.chains:
            found.setdefault(chain.session_id, []).append(chain)
        return [Session(chains) for chains in found.values()]

    @property
    def experiences(self) -> Sequence[Chain]:
        return self.chains
