"""On which turn a reward falls: the reward and the return of each turn, and comparisons of rewards. numpy only.

Credit is computed when experiences are read, never when rewards are written, so a late or revised line, or another
credit policy, does not rewrite stored data. The shaping is rLLM's, over steps: with raw rewards r, bonus coefficient c
and discount γ,

    r'_0 = r_0,   r'_t = r_t + c · (r_t - r_{t-1}),   G_t = r'_t + γ · G_{t+1}
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from turnwise.chains import is_trainable
from turnwise.types import Credit, Reward, Turn

Floats = npt.NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to the standard deviation before a division by it."""
UNIFORM_TOLERANCE = 1e-12
"""Relative spread up to which values count as equal, so that a division does not amplify their rounding."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionCredit:
    """The rewards and returns that the reward lines of a session give to its turns."""

    reward: float
    turn_rewards: dict[str, float]
    turn_returns: dict[str, float]
    by_name: dict[str, float] = dataclasses.field(default_factory=dict)
    own_rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sum of the lines for each single turn, by turn id; 0 or left out for turns without such lines."""
    shares: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """What 1 more for the session adds to the reward and to the return of each turn, by turn id."""


def latest_lines(lines: Iterable[Reward]) -> list[Reward]:
    return list({(line.turn_id, line.step, line.name): line for line in lines}.values())


def session_reward(lines: Iterable[Reward], credit: Credit) -> float | None:
    """Return the reward of a whole session; None without a line.

    With `step_wise` it is the sum of all effective lines. With `propagate` it is the sum of the lines for the whole
    session, or of all effective lines if there are none for the whole session.
    """
    in_force = latest_lines(lines)
    if not in_force:
        return None
    if credit is Credit.PROPAGATE:
        in_force = [line for line in in_force if is_for_session(line)] or in_force
    return sum(line.value for line in in_force)


def shape_returns(raw: Sequence[float], gamma: float = 0.0, reward_bonus_coeff: float = 0.0) -> list[float]:
    """Return the step rewards after bonus and discount; the value 0 disables each of them, as in rLLM.

    `gamma` is γ. The bonus has the weight c and is the improvement over the previous step, computed from the raw
    rewards.
    """
    shaped = list(raw)
    if reward_bonus_coeff > 0:
        for t in range(1, len(raw)):
            shaped[t] += reward_bonus_coeff * (raw[t] - raw[t - 1])
    if gamma > 0:
        for t in reversed(range(len(shaped) - 1)):
            shaped[t] += gamma * shaped[t + 1]
    return shaped


def assign_credit(
    turns: Sequence[Turn],
    lines: Iterable[Reward],
    credit: Credit,
    *,
    gamma: float = 0.0,
    reward_bonus_coeff: float = 0.0,
) -> SessionCredit:
    """Compute the reward and the return of each turn of a session from its reward lines in order of arrival.

    With `propagate` each turn gets the session's reward; discount and bonus are over steps, and are not used.
    """
    in_force = latest_lines(lines)
    reward = session_reward(in_force, credit) or 0.0
    by_name = _by_name(in_force, credit)
    if credit is Credit.PROPAGATE:
        rewards = {turn.turn_id: reward for turn in turns}
        shares = dict.fromkeys(rewards, (1.0, 1.0))
        return SessionCredit(reward, rewards, dict(rewards), by_name, shares=shares)
    of_turn, of_step, step_total = _step_rewards(turns, in_force)
    steps = sorted(step_total)
    last = _last_step(turns)
    shaped, shared = (
        dict(zip(steps, shape_returns(raw, gamma, reward_bonus_coeff), strict=True))
        for raw in ([step_total[step] for step in steps], [float(step == last) for step in steps])
    )
    rewards = {turn.turn_id: of_turn[turn.turn_id] + of_step[_step(turn)] for turn in turns}
    # A turn with a reward of its own differs from its step's return by as much as from its step's reward.
    returns = {turn.turn_id: shaped[_step(turn)] + (rewards[turn.turn_id] - step_total[_step(turn)]) for turn in turns}
    shares = {turn.turn_id: (float(_step(turn) == last), shared[_step(turn)]) for turn in turns}
    return SessionCredit(reward, rewards, returns, by_name, dict(of_turn), shares)


def _step_rewards(
    turns: Sequence[Turn], in_force: Iterable[Reward]
) -> tuple[dict[str, float], dict[int, float], dict[int, float]]:
    of_turn: dict[str, float] = defaultdict(float)
    of_step: dict[int, float] = defaultdict(float)
    last = _last_step(turns)
    for line in in_force:
        if line.turn_id is not None:
            of_turn[line.turn_id] += line.value
        else:
            of_step[last if line.step is None else line.step] += line.value
    step_total = {_step(turn): of_step[_step(turn)] for turn in turns}
    for turn in turns:
        step_total[_step(turn)] += of_turn[turn.turn_id]
    return of_turn, of_step, step_total


def _last_step(turns: Sequence[Turn]) -> int:
    """Return the step of the session's reward: the last one that can be trained, unlike that of an aborted call."""
    trained_steps = [_step(turn) for turn in turns if is_trainable(turn)]
    return max(trained_steps or [_step(turn) for turn in turns], default=0)


def _by_name(in_force: Sequence[Reward], credit: Credit) -> dict[str, float]:
    names = sorted({line.name for line in in_force})
    counted = in_force
    if credit is Credit.PROPAGATE:
        counted = [line for line in in_force if is_for_session(line)] or in_force
    return {name: sum(line.value for line in counted if line.name == name) for name in names}


def _step(turn: Turn) -> int:
    return turn.seq if turn.step is None else turn.step


def is_for_session(line: Reward) -> bool:
    return line.turn_id is None and line.step is None


def normalised(values: Floats) -> Floats:
    """Return (x_i − mean) / (std + ε), the std with G − 1 as in torch. Shao et al. 2024 (arXiv:2402.03300), 4.1.2."""
    scaled: Floats = (values - values.mean()) / (values.std(ddof=1) + STD_EPSILON)
    return scaled


def is_uniform(values: Floats) -> bool:
    return bool(np.ptp(values) <= UNIFORM_TOLERANCE * np.abs(values).max())
