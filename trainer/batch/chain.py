"""A chain as it is trained: what its session's facts and its calls' parameters mean, found once, when it is claimed.

The stored form keeps these facts as JSON for readers of exports. Behaviour logprobs are those of the distribution that
was sampled from. By itself the trainer computes that distribution for a temperature alone; the terms of features
compute more of them (`trainer.model.terms`). Legend: L tokens and K turns of a chain.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.chains import NO_POLICY, Experience
from turnwise.parts import part
from turnwise.sampling import GRAMMARS, first_of, left_out_by, temperature_of
from turnwise.types import Json, Role, TokenIds

PROCESSED: Mapping[str, Callable[[Any], bool]] = {
    **GRAMMARS,
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words"), bool),
    "min_tokens": lambda value: value > 0,
    "repetition_penalty": lambda value: value != 1,
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), lambda value: value != 0),
}
"""Parameters that change logits in another way than a temperature, and when."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(Experience):
    """Turns whose tokens extend each other: one sequence."""

    is_single: bool
    """Whether its session has no group, and is compared with others of its kind."""
    is_cut: bool
    """Whether one of its replies ended at the token limit."""
    role: str
    agent: str
    """Digest of the system prompt; empty where it is not known."""
    rewards: Mapping[str, float]
    """The session's rewards by name, as they were posted; empty without one."""
    metadata: Json
    temperatures: npt.NDArray[np.float32]
    """Of each turn, 1 where the call set none or 0. [K]"""
    without_ratio: Sequence[str | None]
    """Why no distribution can be computed for a turn, so that no loss with ratios trains it; None where one can. [K]"""
    is_known: npt.NDArray[np.bool_]
    """Whether the distribution of a token can be computed, of turns for which one can. [L]"""
    terms: Mapping[str, Any]
    """What the terms of features found at the claim, by their names."""

    @functools.cached_property
    def turns(self) -> list[Turn]:
        return [Turn(self, index) for index in range(len(self.turn_ids))]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def experience(self) -> Chain:
        """The chain itself, with all fields of the stored one."""
        return self

    @property
    def named_rewards(self) -> dict[str, float]:
        """The session's rewards by name; one without names is its reward under the name `reward`."""
        return dict(self.rewards) or {"reward": self.reward}

    @property
    def needed_terms(self) -> frozenset[str]:
        """The terms without which the model would read other things than the policy that sampled."""
        return frozenset(name for name in self.parts if part(name).is_of_prompt)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One sampled reply."""

    chain: Chain
    index: int
    """Its place in the chain, from 0."""

    @property
    def turn_id(self) -> str:
        return self.chain.turn_ids[self.index]

    @property
    def step(self) -> int:
        return self.chain.turn_steps[self.index]

    @property
    def reward(self) -> float:
        return float(self.chain.turn_rewards[self.index])

    @property
    def total(self) -> float:
        return float(self.chain.turn_returns[self.index])

    @property
    def messages(self) -> Sequence[Json]:
        found = self.chain.turn_messages
        return found[self.index] if found else ()

    @functools.cached_property
    def places(self) -> np.ndarray:
        return np.flatnonzero(self.chain.turn_index == self.index)

    @property
    def observed(self) -> TokenIds:
        """The prompt tokens between the reply before it and its own reply; at the root the whole prompt."""
        before = np.flatnonzero(self.chain.turn_index[: self.places[0]] >= 0)
        return self.chain.tokens[before[-1] + 1 if len(before) else 0 : self.places[0]]

    @property
    def num_tokens(self) -> int:
        return len(self.places)


def chain_of(experience: Experience) -> Chain:
    """Return a stored chain as it is trained, without any term of a feature."""
    info, num_turns = experience.info, len(experience.turn_ids)
    samplings = samplings_of(experience)
    is_sampled = experience.policy_version_first > NO_POLICY
    return Chain(
        **{field.name: getattr(experience, field.name) for field in dataclasses.fields(Experience)},
        is_single=bool(info.get("single")),
        is_cut="length" in (info.get("finish_reasons") or ()),
        role=str((info.get("roles") or [Role.MAIN])[0]),
        agent=str(info.get("agent", "")),
        rewards=info.get("rewards") or {},
        metadata=info.get("metadata") or {},
        temperatures=np.array([temperature_of(sampling) or 1.0 for sampling in samplings], np.float32),
        without_ratio=[left_out_by(each, ()) or first_of(PROCESSED, each) for each in samplings]
        if is_sampled
        else [None] * num_turns,
        is_known=np.ones(len(experience.tokens), np.bool_),
        terms={},
    )


def samplings_of(experience: Experience) -> list[Json]:
    """Return the sampling parameters of each turn. [K]."""
    return list(experience.info.get("sampling") or [{}] * len(experience.turn_ids))
