"""What is trained of a batch: what an algorithm chose, and why the rest is refused by group or left out by turn.

Behaviour logprobs are those of the distribution that was sampled from. Turns whose distribution the trainer cannot
compute (`Chain.without_ratio`) stay in the prompt, carry no loss, and are counted by reason. An algorithm that reads no
behaviour logprobs, such as SFT, trains these turns too.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from trainer.batch.advantages import (
    UNIFORM,
    PastValues,
    RewardRule,
    SingleValue,
    shape_rewards,
    why_without_advantage,
)
from trainer.batch.chain import Chain
from turnwise.credit import Floats
from turnwise.sampling import GREEDY
from turnwise.types import GroupKey, Json, SessionKey, name_digest

IMPOSSIBLE = -9999.0
"""What vLLM writes for a logprob of minus infinity: one such token would refuse its whole group."""
LARGEST_VALUE = 1e6
"""Largest reward, return or advantage that is trained: beside a larger one, float32 loses those of the other groups."""
NO_TRAINABLE_TURN = "no_trainable_turn"
"""Beginning of the reason of a chain of which no turn can be trained, such as one that was sampled greedily."""
NOT_CHOSEN = "not_chosen"
"""Reason of a turn that could be trained, and that the algorithm did not choose."""
UNKNOWN_SUPPORT = "unknown_support"
"""Why a token carries no loss: its turn's sampling was truncated, and what was left for it is not known."""
TOO_LONG = "chain_too_long"
"""Beginning of the reason of a chain over `max_chain_tokens`."""


class Unfit(Exception):
    """A computation failed for some chains, which are left out of it with their groups."""

    def __init__(self, problem: str, members: Iterable[int], why: str) -> None:
        super().__init__(problem)
        self.members = list(members)
        self.why = why


def why_untrainable(experience: Chain, *, needs_behaviour: bool = True) -> list[str | None]:
    """Return for each turn why it cannot be trained, None where it can. [K]."""
    reasons: list[str | None] = [why if needs_behaviour else None for why in experience.without_ratio]
    broken = experience.loss_mask & ~(np.isfinite(experience.logprobs) & (experience.logprobs > IMPOSSIBLE))
    for turn in np.unique(experience.turn_index[broken]):
        reasons[turn] = "broken_logprobs"
    return reasons


class Pair(NamedTuple):
    """An experience's part in a pair of a better and a worse session."""

    number: int
    is_better: bool


class Mixed(NamedTuple):
    """Experiences of no claimed group, which a feature has put behind those of a batch."""

    start: int
    """Index of the first of them."""
    share: float
    """The weight of their loss; that of the others is the rest."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Selection:
    """A batch from its offer to its last optimizer step: what is trained of it, with its credit, and what is refused.

    An algorithm gets it as what was claimed, and puts in what it chose.
    """

    offered: Sequence[Chain] = ()
    """The chains of the claimed groups, with their rewards as shaped."""
    keys: Sequence[GroupKey] = ()
    """The claimed groups that may be trained."""
    reasons: Sequence[str | None] = ()
    """Why each offered chain is not trained whatever the algorithm says; None where it may be."""
    window: Sequence[SingleValue] = ()
    """Values of earlier single sessions."""
    kind_pattern: str | None = None
    experiences: Sequence[Chain] = ()
    advantages: Sequence[Floats] = ()
    """Of each experience those of its K turns, or of its L tokens: [K] or [L] each."""
    pairs: Sequence[Pair] | None = None
    mixed: Mixed | None = None
    single_values: Sequence[SingleValue] = ()
    refused: dict[GroupKey, str] = dataclasses.field(default_factory=dict)
    """Why groups are not trained. An experience may be of a group that was refused after it was chosen."""

    @property
    def fit(self) -> list[Chain]:
        return [one for one, reason in zip(self.offered, self.reasons, strict=True) if reason is None]

    def refuse(self, key: GroupKey, why: str) -> None:
        """Do not train a group; the first reason stays."""
        self.refused.setdefault(key, why)

    def choose(self, experiences: Sequence[Chain], advantages: Sequence[Floats], **more: Any) -> Selection:
        """Return the selection with these experiences to train; `more` are fields of a selection."""
        return dataclasses.replace(self, experiences=experiences, advantages=advantages, **more)

    def trained(self) -> list[Chain]:
        return [one for one in self.experiences if one.group_key not in self.refused]

    def advantages_by_session(self, trained: Collection[str]) -> dict[SessionKey, dict[str, float]]:
        """Return the advantages of the turns of these ids whose groups are not refused."""
        by_session: dict[SessionKey, dict[str, float]] = {}
        for experience, turns in zip(self.experiences, self.advantages, strict=True):
            if experience.group_key in self.refused:
                continue
            for turn_id, value in zip(experience.turn_ids, of_turns(experience, turns), strict=True):
                if turn_id in trained:
                    by_session.setdefault(experience.session_key, {})[turn_id] = float(value)
        return by_session


class SelectionRule(RewardRule):
    """Settings that say what of a batch is trained."""

    kind_pattern: str | None = None
    """Regular expression searched in the `task_id` of single sessions: those with the same match, or the same first
    group of it, are of one kind. None, and sessions without a match: by the agent's system prompt."""
    max_chain_tokens: int | None = Field(default=None, ge=2)
    """Chains of more tokens are not trained, which bounds memory; they still count in their group's baseline."""

    @field_validator("kind_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"kind_pattern {value!r} is no regular expression: {error}") from error
        return value


def offer(
    experiences: Sequence[Chain],
    keys: Iterable[GroupKey],
    rule: SelectionRule,
    window: Sequence[SingleValue],
    reward: Callable[[Mapping[str, float], Json], float | None],
    *,
    needs_behaviour: bool = True,
) -> Selection:
    """Return what can be trained of the claimed groups, which hold these experiences; nothing is chosen yet.

    `window` has the values of earlier single sessions. `reward` returns a session's reward from its rewards by name and
    its metadata; None: as it is stored. `needs_behaviour` says whether an importance ratio is formed for each token.
    """
    shaped = shape_rewards(experiences, rule, reward)
    too_large = _groups_too_large(shaped)
    keys = [key for key in keys if key not in too_large]
    fit = [experience for experience in shaped if experience.group_key not in too_large]
    reasons = _left_out(fit, rule, needs_behaviour=needs_behaviour)
    trained = {one.group_key for one, reason in zip(fit, reasons, strict=True) if reason is None}
    refused = dict.fromkeys((key for key in keys if key not in trained), NO_TRAINABLE_TURN)
    first = {one.group_key: reason for one, reason in reversed(list(zip(fit, reasons, strict=True))) if reason}
    refused |= {key: reason for key, reason in first.items() if key not in trained}
    return Selection(
        offered=fit,
        keys=keys,
        reasons=reasons,
        refused=too_large | refused,
        window=window,
        kind_pattern=rule.kind_pattern,
    )


def left_out(
    experiences: Sequence[Chain],
    refused: Mapping[GroupKey, str],
    trained: Collection[str],
    rule: SelectionRule,
    *,
    needs_behaviour: bool,
) -> tuple[dict[str, int], dict[str, int]]:
    """Count by reason what carries no loss: the turns of groups that are not refused, and the sampled tokens of all.

    `refused` has the groups of which nothing is trained, `trained` the ids of the turns that carry loss.
    """
    turns: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for experience, of_chain in zip(
        experiences, _left_out(experiences, rule, needs_behaviour=needs_behaviour), strict=True
    ):
        refusal, size = refused.get(experience.group_key), len(experience.turn_ids)
        unknown = experience.loss_mask & ~(experience.is_known | (not needs_behaviour))
        sizes, of_unknown = (
            np.bincount(experience.turn_index[of], minlength=size).tolist() for of in (experience.loss_mask, unknown)
        )
        of_turns = why_untrainable(experience, needs_behaviour=needs_behaviour)
        for turn, turn_id in enumerate(experience.turn_ids):
            reason = refusal or of_turns[turn] or of_chain
            if refusal is None and turn_id in trained:
                tokens[UNKNOWN_SUPPORT] += of_unknown[turn]
                continue
            name = NOT_CHOSEN if reason is None else reason.partition(":")[0]
            tokens[name] += sizes[turn]
            turns[name] += refusal is None and reason is not None
    return dict(+turns), dict(+tokens)


def check_advantages(experience: Chain, advantages: Floats) -> None:
    """Check that a chain has one advantage a turn, or one a token.

    Raises:
        ValueError: It has neither.
    """
    turns, tokens = len(experience.turn_ids), len(experience.tokens)
    if np.shape(advantages) not in ((turns,), (tokens,)):
        raise ValueError(
            f"a chain of {turns} turns and {tokens} tokens got advantages of shape {np.shape(advantages)}: return one "
            "number a turn, or one a token"
        )


def of_turns(experience: Chain, advantages: Floats) -> Floats:
    """Return the advantage of each turn: of those by token, the mean over the turn's trained tokens. [K]."""
    if len(advantages) == len(experience.turn_ids):
        return advantages
    turns = experience.turn_index[experience.loss_mask]
    size = len(experience.turn_ids)
    sums = np.bincount(turns, weights=advantages[experience.loss_mask], minlength=size)
    means: Floats = sums / np.maximum(np.bincount(turns, minlength=size), 1)
    return means


def _groups_too_large(experiences: Sequence[Chain]) -> dict[GroupKey, str]:
    refused: dict[GroupKey, str] = {}
    for experience in experiences:
        named = experience.named_rewards.values()
        values = np.array([experience.reward, *experience.turn_returns, *named], np.float64)
        bad = values[~(np.abs(values) <= LARGEST_VALUE)]
        if len(bad):
            reason = f"reward_too_large: {float(bad[0])!r}; rewards are trained up to {LARGEST_VALUE:g}, scale them"
            refused.setdefault(experience.group_key, reason)
    return refused


def without_advantage(
    offer: Selection, groups: Collection[GroupKey], rows: Sequence[SingleValue], past: PastValues
) -> dict[GroupKey, str]:
    of_session: dict[str, list[SingleValue]] = defaultdict(list)
    for row in rows:
        of_session[row.session].append(row)
    found = {}
    for experience in offer.offered:
        key = experience.group_key
        if key in groups and key not in found:
            own = of_session[name_digest(experience.session_key)] if experience.is_single else []
            found[key] = why_without_advantage(own, rows, past) if own else UNIFORM
    return found


def _left_out(experiences: Sequence[Chain], rule: SelectionRule, *, needs_behaviour: bool) -> list[str | None]:
    overlong = {one.session_key for one in experiences if one.is_cut} if rule.overlong_mask else set()

    def reason(experience: Chain) -> str | None:
        reasons = why_untrainable(experience, needs_behaviour=needs_behaviour)
        if None not in reasons:
            named = ("temperature 0" if name == GREEDY else name for name in dict.fromkeys(filter(None, reasons)))
            return f"{NO_TRAINABLE_TURN}: {', '.join(named)}"
        if experience.session_key in overlong:
            return "overlong"
        if rule.max_chain_tokens is not None and len(experience.tokens) > rule.max_chain_tokens:
            return f"{TOO_LONG}: {len(experience.tokens)} tokens, max_chain_tokens={rule.max_chain_tokens}"
        return None

    return [reason(experience) for experience in experiences]
