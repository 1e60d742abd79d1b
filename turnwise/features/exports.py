"""An experience as the API's JSON, for exports and for trainers of others."""

from __future__ import annotations

import dataclasses

from turnwise.chains import Experience
from turnwise.parts import known
from turnwise.types import Json


def experience_json(experience: Experience) -> Json:
    """Return an experience as the API's JSON; as in Trinity-RFT, mask, logprobs and support begin after the prompt."""
    after = experience.prompt_length
    return {
        "eid": dataclasses.asdict(experience.eid),
        "session_id": experience.session_id,
        "group_id": experience.group_id,
        "status": experience.info.get("status"),
        "turn_ids": list(experience.turn_ids),
        "turn_steps": list(experience.turn_steps),
        "tokens": experience.tokens.tolist(),
        "prompt_length": after,
        "loss_mask": experience.loss_mask[after:].tolist(),
        "logprobs": [float(value) for value in experience.logprobs[after:]],
        **_fields(experience, is_always_shown=True),
        "reward": experience.own_reward,
        "return": experience.turn_returns.tolist(),
        "advantage": None if experience.turn_advantages is None else experience.turn_advantages.tolist(),
        "turn_rewards": experience.turn_rewards.tolist(),
        "turn_own_rewards": experience.turn_own_rewards.tolist(),
        "session_reward": experience.reward,
        "policy_version_first": experience.policy_version_first,
        "policy_version_last": experience.policy_version_last,
        "policy": experience.policy,
        "split": experience.split.value,
        "trained_in": experience.trained_in,
        "metrics": experience.metrics,
        "info": experience.info,
        **_fields(experience, is_always_shown=False),
    }


def _fields(experience: Experience, *, is_always_shown: bool) -> Json:
    """Return the fields of an experience's JSON that show its parts: those that every experience has, or the others."""
    return {
        field: value
        for name, each in known.items()
        if each.is_always_shown is is_always_shown and (is_always_shown or name in experience.parts)
        for field, value in each.of_experience(experience.parts.get(name), experience).items()
    }
