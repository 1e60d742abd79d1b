"""Which of a batch's experiences are trained, and with what credit; the rest is refused group by group, with a reason.

Every learner reads the same ledger and differs only here: policy gradients take the groups whose rewards differ,
behaviour cloning the good sessions, DPO pairs of a better and a worse session.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from trainer.learning.advantages import BY_TOKEN, AdvantageRule, assign, single_rows, uniform_groups
from trainer.learning.distillation import DistillationRule
from trainer.learning.losses import Algorithm
from trainer.learning.rewards import is_truncated, rewards_by_name, shape_rewards
from trainer.learning.sampling import why_untrainable
from trainer.learning.singles import UNIFORM, Floats, Row, is_single, past_values, session_digest, why_without_advantage
from turnwise.experience import Experience
from turnwise.types import GroupKey, SessionKey

LARGEST_VALUE = 1e6
"""Largest reward, return or advantage that is trained: beside a larger one, float32 loses those of the other groups."""


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
    single_rows: Sequence[Row] = ()
    """The values of the batch's single sessions, for the window of later batches."""

    def advantages_by_session(self) -> dict[SessionKey, dict[str, float]]:
        """Return the advantage of each trained turn, by session and turn id."""
        by_session: dict[SessionKey, dict[str, float]] = {}
        for experience, turns in zip(self.experiences, self.advantages, strict=True):
            of_session = by_session.setdefault(experience.session_key, {})
            of_session |= {turn_id: float(value) for turn_id, value in zip(experience.turn_ids, turns, strict=True)}
        return by_session


class SelectionRule(AdvantageRule, DistillationRule):
    """What is trained of a batch."""

    sft_min_reward: float = 1.0
    """Behaviour cloning (`sft`) trains on sessions with at least this reward."""
    dpo_pairs: Literal["best_worst", "all"] = "best_worst"
    """DPO: one pair a group, its best and its worst session, or every two sessions of different reward."""
    max_chain_tokens: int | None = Field(default=None, ge=2)
    """Chains of more tokens are not trained, which bounds memory; they still count in their group's baseline."""


def select(
    experiences: Sequence[Experience],
    keys: Iterable[GroupKey],
    algorithm: Algorithm,
    rule: SelectionRule,
    window: Sequence[Row] = (),
) -> Selection:
    """Choose what is trained.

    Args:
        experiences: Everything that the claimed groups hold.
        keys: The claimed groups.
        algorithm: The loss.
        rule: How rewards become advantages, and what is left out.
        window: Values of earlier single sessions.
    """
    keys, shaped = list(keys), shape_rewards(experiences, rule)
    too_large = _groups_too_large(shaped)
    keys = [key for key in keys if key not in too_large]
    experiences = [experience for experience in shaped if experience.group_key not in too_large]
    reasons = _left_out(experiences, rule)
    fit = [experience for experience, reason in zip(experiences, reasons, strict=True) if reason is None]
    refused = too_large | _groups_left_out(experiences, reasons, keys)
    if algorithm == "sft":
        good = [experience for experience in fit if experience.reward >= rule.sft_min_reward]
        return _flat(good, keys, refused, "reward_too_low")
    if algorithm == "dpo":
        return _pairs(fit, keys, refused, rule)
    # Turns that are left out still count in their group's baseline.
    advantages = assign(experiences, rule, window)
    rows = single_rows(experiences, rule)
    # With advantages token by token, groups of equal rewards teach too.
    uniform = set() if rule.estimator in BY_TOKEN or rule.teachers else uniform_groups(experiences, advantages)
    kept = [
        (experience, turns)
        for experience, turns, reason in zip(experiences, advantages, reasons, strict=True)
        if reason is None and experience.group_key not in uniform
    ]
    return Selection(
        experiences=[experience for experience, _ in kept],
        advantages=[turns for _, turns in kept],
        pairs=None,
        chosen=[True] * len(kept),
        refused=_without_advantage(experiences, uniform, rows, window) | refused,
        single_rows=rows,
    )


def joined(first: Selection, second: Selection) -> Selection:
    """Return the experiences of both, with the refused groups of the first; pairs are numbered on."""
    num_first = len(first.experiences)
    pairs = first.pairs
    if second.pairs is not None:
        start = num_first if first.pairs is None else max(first.pairs, default=-1) + 1
        pairs = [*(first.pairs or range(num_first)), *(start + pair for pair in second.pairs)]
    return Selection(
        experiences=[*first.experiences, *second.experiences],
        advantages=[*first.advantages, *second.advantages],
        pairs=pairs,
        chosen=[*first.chosen, *second.chosen],
        refused=first.refused,
        single_rows=first.single_rows,
    )


def without_groups(selection: Selection, reasons: dict[GroupKey, str]) -> Selection:
    """Return the selection without these groups, which are refused for these reasons."""
    kept = [n for n, experience in enumerate(selection.experiences) if experience.group_key not in reasons]
    return Selection(
        experiences=[selection.experiences[n] for n in kept],
        advantages=[selection.advantages[n] for n in kept],
        pairs=None if selection.pairs is None else [selection.pairs[n] for n in kept],
        chosen=[selection.chosen[n] for n in kept],
        refused=selection.refused | reasons,
        single_rows=selection.single_rows,
    )


def _groups_too_large(experiences: Sequence[Experience]) -> dict[GroupKey, str]:
    """Return the groups with a reward or a return that is not finite or too large, with the reason."""
    refused: dict[GroupKey, str] = {}
    for experience in experiences:
        named = rewards_by_name(experience).values()
        values = np.array([experience.reward, *experience.turn_returns, *named], np.float64)
        bad = values[~(np.abs(values) <= LARGEST_VALUE)]
        if len(bad):
            reason = f"reward_too_large: {bad[0]:g}; rewards are trained up to {LARGEST_VALUE:g}, scale them"
            refused.setdefault(experience.group_key, reason)
    return refused


def _without_advantage(
    experiences: Sequence[Experience], groups: Collection[GroupKey], rows: Sequence[Row], window: Sequence[Row]
) -> dict[GroupKey, str]:
    """Return the groups without an advantage, with the reason."""
    past = past_values(window, rows)
    of_session: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_session[row.session].append(row)
    found = {}
    for experience in experiences:
        key = experience.group_key
        if key in groups and key not in found:
            own = of_session[session_digest(experience.session_key)] if is_single(experience) else []
            found[key] = why_without_advantage(own, rows, past) if own else UNIFORM
    return found


def _left_out(experiences: Sequence[Experience], rule: SelectionRule) -> list[str | None]:
    """Return for each experience why it is not trained, None where it is."""
    overlong = {one.session_key for one in experiences if is_truncated(one)} if rule.overlong_mask else set()

    def reason(experience: Experience) -> str | None:
        if None not in why_untrainable(experience):
            return "no_trainable_turn"
        if experience.session_key in overlong:
            return "overlong"
        if rule.max_chain_tokens is not None and len(experience.tokens) > rule.max_chain_tokens:
            return f"chain_too_long: {len(experience.tokens)} tokens, max_chain_tokens={rule.max_chain_tokens}"
        return None

    return [reason(experience) for experience in experiences]


def _groups_left_out(
    experiences: Sequence[Experience], reasons: Sequence[str | None], keys: Sequence[GroupKey]
) -> dict[GroupKey, str]:
    """Return the groups of which nothing is trained, with the reason of their first experience."""
    refused = dict.fromkeys(keys, "no_trainable_turn")
    for experience, reason in reversed(list(zip(experiences, reasons, strict=True))):
        if reason is not None:
            refused[experience.group_key] = reason
    for experience, reason in zip(experiences, reasons, strict=True):
        if reason is None:
            refused.pop(experience.group_key, None)
    return refused


def _flat(good: Sequence[Experience], keys: Sequence[GroupKey], refused: dict[GroupKey, str], reason: str) -> Selection:
    kept = {experience.group_key for experience in good}
    return Selection(
        experiences=good,
        advantages=[np.ones(len(experience.turn_ids)) for experience in good],
        pairs=None,
        chosen=[True] * len(good),
        refused={group: reason for group in keys if group not in kept} | refused,
    )


def _pairs(
    fit: Sequence[Experience], keys: Sequence[GroupKey], refused: dict[GroupKey, str], rule: SelectionRule
) -> Selection:
    """Choose pairs of sessions of a group; a session of several pairs is there once for each."""
    kept: list[Experience] = []
    pairs: list[int] = []
    chosen: list[bool] = []
    refused, number = dict(refused), 0
    for group in keys:
        members = [experience for experience in fit if experience.group_key == group]
        found = _session_pairs({experience.session_key: experience.reward for experience in members}, rule)
        if not found:
            refused.setdefault(group, UNIFORM)
        for best, worst in found:
            for experience in members:
                if experience.session_key in (best, worst):
                    kept.append(experience)
                    pairs.append(number)
                    chosen.append(experience.session_key == best)
            number += 1
    return Selection(
        experiences=kept,
        advantages=[np.ones(len(experience.turn_ids)) for experience in kept],
        pairs=pairs,
        chosen=chosen,
        refused=refused,
    )


def _session_pairs(rewards: dict[SessionKey, float], rule: SelectionRule) -> list[tuple[SessionKey, SessionKey]]:
    """Return the pairs of a better and a worse session."""
    if rule.dpo_pairs == "all":
        return [(a, b) for a, b in itertools.permutations(rewards, 2) if rewards[a] > rewards[b]]
    if not rewards or max(rewards.values()) == min(rewards.values()):
        return []
    return [(max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__))]
