"""A group as an algorithm sees it: sessions, their chains, the turns of a chain; views on the stored experiences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from trainer.learning.rewards import rewards_by_name
from turnwise.experience import Experience
from turnwise.types import Json, TokenIds


@dataclasses.dataclass(frozen=True)
class Turn:
    """One sampled reply."""

    experience: Experience
    index: int
    """Its place in the chain, from 0."""

    @property
    def turn_id(self) -> str:
        """Its id in the store."""
        return self.experience.turn_ids[self.index]

    @property
    def step(self) -> int:
        """The step that it belongs to."""
        return self.experience.turn_steps[self.index]

    @property
    def reward(self) -> float:
        """Its reward under the session's credit policy."""
        return float(self.experience.turn_rewards[self.index])

    @property
    def total(self) -> float:
        """Its return: its reward after bonus and discount."""
        return float(self.experience.turn_returns[self.index])

    @property
    def messages(self) -> Sequence[Json]:
        """What its prompt adds to the reply before it: all messages at the root."""
        found = self.experience.turn_messages
        return found[self.index] if found else ()

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Positions of its sampled tokens in the chain's tokens."""
        return np.flatnonzero(self.experience.turn_index == self.index)

    @property
    def observed(self) -> TokenIds:
        """The prompt tokens between the reply before it and its own reply; at the root the whole prompt."""
        before = np.flatnonzero(self.experience.turn_index[: self.places[0]] >= 0)
        return self.experience.tokens[before[-1] + 1 if len(before) else 0 : self.places[0]]

    @property
    def num_tokens(self) -> int:
        """Its sampled tokens."""
        return len(self.places)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Turns whose tokens extend each other: one sequence."""

    experience: Experience

    @functools.cached_property
    def turns(self) -> list[Turn]:
        """The turns that are trained here, in order."""
        return [Turn(self.experience, index) for index in range(len(self.experience.turn_ids))]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and replies."""
        return len(self.experience.tokens)


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of an agent."""

    chains: Sequence[Chain]

    @property
    def session_id(self) -> str:
        """Its id."""
        return self.chains[0].experience.session_id

    @property
    def task(self) -> str:
        """The id of its task; empty where it has none."""
        return self.chains[0].experience.eid.task

    @property
    def reward(self) -> float:
        """Its reward, shaped by the trainer's settings."""
        return self.chains[0].experience.reward

    @property
    def rewards(self) -> dict[str, float]:
        """Its rewards by name, as they were posted."""
        return rewards_by_name(self.chains[0].experience)

    @property
    def metadata(self) -> Json:
        """What the client stored with it."""
        return self.chains[0].experience.info.get("metadata") or {}

    @property
    def num_sampled(self) -> int:
        """Sampled tokens that are trained."""
        return sum(int(chain.experience.loss_mask.sum()) for chain in self.chains)


@dataclasses.dataclass(frozen=True)
class Group:
    """The sessions whose rewards are compared."""

    chains: Sequence[Chain]
    """All chains of all sessions."""

    @functools.cached_property
    def sessions(self) -> list[Session]:
        """The sessions, in the order of their first chains."""
        found: dict[str, list[Chain]] = {}
        for chain in self.chains:
            found.setdefault(chain.experience.session_id, []).append(chain)
        return [Session(chains) for chains in found.values()]

    @property
    def experiences(self) -> list[Experience]:
        """What is stored of the chains."""
        return [chain.experience for chain in self.chains]
