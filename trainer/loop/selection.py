"""Which of a batch's experiences are trained, and with what credit; the rest is refused group by group, with a reason.

Every learner reads the same ledger and differs only here: policy gradients take the groups that tell
something, behaviour cloning the good sessions, DPO the best and the worst session of each group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from trainer.learning.advantages import AdvantageRule, Floats, assign, uniform_groups
from trainer.learning.losses import Algorithm
from trainer.learning.sampling import why_untrainable
from turnwise.types import Experience, GroupKey, SessionKey

UNIFORM = "uniform_rewards"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is trained."""

    experiences: Sequence[Experience]
    advantages: Sequence[Floats]
    """Of each turn of each experience; [K] each."""
    pairs: Sequence[int] | None
    """For DPO the pair of each experience; else None."""
    chosen: Sequence[bool]
    """For DPO whether the experience is of its pair's better session."""
    refused: dict[GroupKey, str]
    """Groups of which nothing is trained, with the reason."""

    def advantages_by_session(self) -> dict[SessionKey, dict[str, float]]:
        """Return the advantage of each trained turn, by session and turn id."""
        by_session: dict[SessionKey, dict[str, float]] = {}
        for experience, turns in zip(self.experiences, self.advantages, strict=True):
            of_session = by_session.setdefault(experience.session_key, {})
            of_session |= {turn_id: float(value) for turn_id, value in zip(experience.turn_ids, turns, strict=True)}
        return by_session


def select(
    experiences: Sequence[Experience],
    keys: Iterable[GroupKey],
    algorithm: Algorithm,
    rule: AdvantageRule,
    sft_min_reward: float,
) -> Selection:
    """Choose what is trained.

    Args:
        experiences: Everything that the claimed groups hold.
        keys: The claimed groups.
        algorithm: The loss.
        rule: How advantages are made.
        sft_min_reward: Least session reward for behaviour cloning.
    """
    keys = list(keys)
    fit = [experience for experience in experiences if None in why_untrainable(experience)]
    refused = {group: "no_trainable_turn" for group in keys if group not in {e.group_key for e in fit}}
    if algorithm == "sft":
        good = [experience for experience in fit if experience.reward >= sft_min_reward]
        return _flat(good, keys, refused, "reward_too_low")
    if algorithm == "dpo":
        return _pairs(fit, keys, refused)
    # Turns that cannot be trained still count in their group's baseline.
    advantages = assign(experiences, rule)
    uniform = uniform_groups(experiences, advantages)
    kept = [
        (experience, turns)
        for experience, turns in zip(experiences, advantages, strict=True)
        if experience.group_key not in uniform and experience.group_key not in refused
    ]
    return Selection(
        experiences=[experience for experience, _ in kept],
        advantages=[turns for _, turns in kept],
        pairs=None,
        chosen=[True] * len(kept),
        refused={group: UNIFORM for group in keys if group in uniform} | refused,
    )


def _flat(good: Sequence[Experience], keys: Sequence[GroupKey], refused: dict[GroupKey, str], reason: str) -> Selection:
    kept = {experience.group_key for experience in good}
    return Selection(
        experiences=good,
        advantages=[np.ones(len(experience.turn_ids)) for experience in good],
        pairs=None,
        chosen=[True] * len(good),
        refused={group: reason for group in keys if group not in kept} | refused,
    )


def _pairs(fit: Sequence[Experience], keys: Sequence[GroupKey], refused: dict[GroupKey, str]) -> Selection:
    kept: list[Experience] = []
    pairs: list[int] = []
    chosen: list[bool] = []
    refused = dict(refused)
    for number, group in enumerate(keys):
        members = [experience for experience in fit if experience.group_key == group]
        rewards = {experience.session_key: experience.reward for experience in members}
        if not rewards or max(rewards.values()) == min(rewards.values()):
            refused.setdefault(group, UNIFORM)
            continue
        best, worst = max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__)
        for experience in members:
            if experience.session_key in (best, worst):
                kept.append(experience)
                pairs.append(number)
                chosen.append(experience.session_key == best)
    return Selection(
        experiences=kept,
        advantages=[np.ones(len(experience.turn_ids)) for experience in kept],
        pairs=pairs,
        chosen=chosen,
        refused=refused,
    )
