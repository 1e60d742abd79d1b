"""What several control-plane routes share: who is calling, and how records become JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import Request

from proxy.auth import Principal
from proxy.services import services_of
from turnwise.store.lineage import TurnView
from turnwise.types import Experience, Json, PolicyVersion, Reward, Session


async def caller(request: Request) -> Principal:
    """Return who is calling.

    Raises:
        Unauthorized: no key, or one that is unknown.
    """
    return await services_of(request).authenticator.authenticate(dict(request.scope["headers"]))


def page(rows: list[Json], has_more: bool) -> Json:
    """Return one page of a list."""
    return {"object": "list", "data": rows, "has_more": has_more}


def session_json(session: Session) -> Json:
    """Return a session as the API shows it."""
    shown = dataclasses.asdict(session)
    del shown["tenant"]
    return shown


def reward_json(reward: Reward) -> Json:
    """Return one line of the ledger as the API shows it."""
    shown = dataclasses.asdict(reward)
    del shown["tenant"]
    return shown


def turn_json(view: TurnView) -> Json:
    """Return a turn as the API shows it: with its whole prompt."""
    turn = view.turn
    return {
        "turn_id": turn.turn_id,
        "session_id": turn.session_id,
        "parent_turn_id": turn.parent_turn_id,
        "chain_id": turn.chain_id,
        "seq": turn.seq,
        "step": turn.step,
        "dialect": turn.dialect,
        "model": turn.model,
        "messages": view.messages,
        "tools": view.tools,
        "sampling": turn.sampling,
        "response": turn.response,
        "prompt_token_ids": view.prompt_token_ids.tolist(),
        "token_ids": turn.token_ids.tolist(),
        "logprobs": [float(value) for value in turn.logprobs],
        "finish_reason": turn.finish_reason,
        "outcome": turn.outcome.value,
        "reason": turn.reason,
        "policy_version_first": turn.policy_version_first,
        "policy_version_last": turn.policy_version_last,
        "rewards": [reward_json(reward) for reward in view.rewards],
        "created_at": turn.created_at,
        "ttft_seconds": turn.ttft_seconds,
        "duration_seconds": turn.duration_seconds,
    }


def policy_json(policy: PolicyVersion) -> Json:
    """Return a policy version as the API shows it."""
    return dataclasses.asdict(policy)


def experience_json(experience: Experience) -> Json:
    """Return an experience as the API shows it; as in Trinity-RFT, mask and logprobs cover what follows the prompt."""
    after = experience.prompt_length
    shown: dict[str, Any] = {
        "eid": dataclasses.asdict(experience.eid),
        "session_id": experience.session_id,
        "group_id": experience.group_id,
        "turn_ids": list(experience.turn_ids),
        "turn_steps": list(experience.turn_steps),
        "tokens": experience.tokens.tolist(),
        "prompt_length": after,
        "loss_mask": experience.loss_mask[after:].tolist(),
        "logprobs": [float(value) for value in experience.logprobs[after:]],
        "reward": experience.reward,
        "turn_rewards": experience.turn_rewards.tolist(),
        "return": experience.turn_returns.tolist(),
        "policy_version_first": experience.policy_version_first,
        "policy_version_last": experience.policy_version_last,
        "split": experience.split.value,
        "metrics": experience.metrics,
        "info": experience.info,
    }
    return shown
