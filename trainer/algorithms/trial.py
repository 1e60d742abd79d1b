"""One call of an algorithm on a small made-up batch, before anything is loaded: its faults end the start."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm, select
from trainer.batch.batch import Batch, build
from trainer.batch.chain import Chain, chain_of
from trainer.batch.ratios import RESERVED, TrainedTokens
from trainer.batch.selection import Selection, SelectionRule, check_advantages
from turnwise.chains import Experience
from turnwise.errors import SettingsError
from turnwise.types import Role

REWARDS = (0.0, 0.5, 1.0)
LOGPROB = -1.5
"""The logprob of each token under every policy but the trained one."""


def try_algorithm(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the names of the algorithm's own gauges, after it chose from a small batch and computed a loss.

    Raises:
        SettingsError: It fails, or returns something else than an algorithm must.
    """
    try:
        return _tried(algorithm)
    except Exception as error:  # whatever a class of the user raises
        raise SettingsError(
            f"algorithm={str(algorithm)!r} fails on a small batch{_place(algorithm, error)}: {type(error).__name__}: "
            f"{error}; docs/algorithms.md says what each method gets and returns"
        ) from error


def _place(algorithm: Algorithm, error: Exception) -> str:
    own = inspect.getfile(type(algorithm))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f" in line {lines[-1]} of {Path(own).name}" if lines else ""


def _tried(algorithm: Algorithm) -> tuple[str, ...]:
    experiences = [_experience(group, run, reward) for group in "ab" for run, reward in enumerate(REWARDS)]
    experiences += [_experience("single", run, reward) for run, reward in enumerate(REWARDS)]
    chosen = select(experiences, sorted({one.group_key for one in experiences}), algorithm, SelectionRule())
    for experience, advantages in zip(chosen.experiences, chosen.advantages, strict=True):
        check_advantages(experience, advantages)
        if not np.isfinite(advantages).all():
            raise ValueError(f"an advantage is not finite: {advantages}")
    if not chosen.experiences:  # settings may ask for what this batch does not have
        chosen = Selection(experiences=experiences, advantages=[np.ones(2)] * len(experiences))
    batch = build(chosen.experiences, chosen.advantages, policy_version=0, pairs=chosen.pairs)
    members = range(len(batch.experiences))
    _check_shape("weights", torch.from_numpy(algorithm.weights(batch, members)), len(batch.table))
    if algorithm.credits_tokens:
        inspect.signature(algorithm.credit).bind(batch, members, None)
    tokens = _tokens(algorithm, batch)
    loss = algorithm.loss(tokens)
    _check_shape("loss", loss, len(batch.table))
    if not loss.requires_grad:
        raise TypeError("loss has no gradient: it must depend on tokens.logprobs")
    if algorithm.needs_values:
        _check_shape("critic_loss", algorithm.critic_loss(tokens), len(batch.table))
    with torch.no_grad():
        gauges = algorithm.gauges(tokens)
    for name, values in gauges.items():
        _check_shape(f"the gauge {name!r}", values, len(batch.table))
        if name in RESERVED:
            raise ValueError(f"the name {name!r} is that of a gauge of the trainer: choose another one")
    return tuple(gauges)


def _check_shape(what: str, values: Tensor, size: int) -> None:
    if not isinstance(values, Tensor) or values.shape != (size,):
        shown = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        raise TypeError(f"{what} is {shown}, not one number for each of the {size} tokens")


def _tokens(algorithm: Algorithm, batch: Batch) -> TrainedTokens:
    size = len(batch.table)

    def column(value: float, *, is_needed: bool = True) -> Tensor | None:
        return torch.full((size,), value) if is_needed else None

    return TrainedTokens(
        logprobs=(LOGPROB + 0.01 * torch.arange(size)).requires_grad_(),
        entropy=torch.ones(size),
        behaviour=torch.full((size,), LOGPROB),
        advantages=torch.from_numpy(batch.table.advantages),
        weights=torch.full((size,), 1 / size),
        sequence=torch.from_numpy(batch.table.experience),
        proximal=column(LOGPROB, is_needed=algorithm.needs_proximal),
        reference=column(LOGPROB, is_needed=algorithm.needs_reference),
        values=column(0.0, is_needed=algorithm.needs_values),
        old_values=column(0.0, is_needed=algorithm.needs_values),
        returns=column(1.0, is_needed=algorithm.needs_values),
        pair=torch.from_numpy(np.unique(np.array(batch.unit_of), return_inverse=True)[1]),
        chosen=torch.tensor(batch.chosen),
    )


def _experience(group: str, run: int, reward: float) -> Chain:
    """Return a session of one chain: two turns of a prompt token and two sampled ones.

    The first turns of a group observe the same state; so do the second ones, but for that of its last session.
    """
    is_apart = run == len(REWARDS) - 1
    mask = np.array([False, True, True] * 2)
    session_id = f"{group}-{run}"
    stored = Experience(
        task_id=group,
        run=run,
        session_id=session_id,
        group_id=session_id if group == "single" else group,
        turn_ids=(f"{session_id}-0", f"{session_id}-1"),
        turn_steps=(0, 1),
        tokens=np.array([1, 2 + run, 3, 9 if is_apart else 4, 5, 6 + run], np.int32),
        prompt_length=1,
        loss_mask=mask,
        turn_index=np.array([-1, 0, 0, -1, 1, 1], np.int32),
        turn_messages=(
            [{"role": "user", "content": "Go."}],
            [{"role": "user", "content": "Back." if is_apart else "On."}],
        ),
        logprobs=np.where(mask, LOGPROB, 0.0).astype(np.float32),
        turn_rewards=np.array([0.0, reward]),
        turn_own_rewards=np.zeros(2),
        turn_returns=np.array([reward, reward]),
        turn_shares=np.ones((2, 2)),
        reward=reward,
        policy_version_first=0,
        policy_version_last=0,
        info={
            "single": group == "single",
            "roles": [Role.MAIN, Role.MAIN],
            "rewards": {"reward": reward},
            "metadata": {},
        },
    )
    return chain_of(stored)
