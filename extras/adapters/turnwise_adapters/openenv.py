"""An OpenEnv environment as tasks of `turnwise run`: the model plays it, and each step's reward is that of its turn.

    turnwise run --tasks tasks.jsonl --group-size 8 --call turnwise_adapters.openenv:play

A task names the environment's address and what a reply is to it:

    {"task_id": "seed-1", "env": "http://127.0.0.1:8000", "action": "message", "reset": {"seed": 1}}

The reply's text is the field `action` of the environment's action, and the observation's field `observation` (all of
it as JSON by default) is the next message. Environments whose actions are more than one text need a function of their
own, in this one's shape.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

DEFAULT_ACTION = "message"
DEFAULT_STEPS = 32
NO_TEXT = ("reward", "done", "metadata")
"""Fields of an observation that are not for the model."""


async def play(task: dict[str, Any], run: Any) -> list[dict[str, Any]]:
    """Play one episode; return the reward of each step that has one.

    Args:
        task: `env` (required), `action`, `observation`, `reset` (arguments of the environment's reset),
            `instruction` (a system message), `max_steps`, `max_completion_tokens`.
        run: The rollout, as `turnwise run --call` gives it.
    """
    from openai import AsyncOpenAI

    connect = importlib.import_module("openenv.core").GenericEnvClient
    messages: list[Any] = [{"role": "system", "content": task["instruction"]}] if task.get("instruction") else []
    rewards: list[dict[str, Any]] = []
    async with (
        AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as model,
        connect(base_url=task["env"]) as environment,
    ):
        result = await environment.reset(**task.get("reset", {}))
        for step in range(task.get("max_steps", DEFAULT_STEPS)):
            if result.done:
                break
            messages.append({"role": "user", "content": observed(result.observation, task.get("observation"))})
            reply = await model.chat.completions.create(
                model=run.model,
                messages=messages,
                max_completion_tokens=task.get("max_completion_tokens"),
                extra_headers={"X-Step": str(step)},
            )
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            result = await environment.step({task.get("action", DEFAULT_ACTION): text})
            if result.reward is not None:
                rewards.append({"value": float(result.reward), "step": step})
    return rewards


def observed(observation: dict[str, Any], field: str | None) -> str:
    """Return the text of an observation: one of its fields, or what is for the model as JSON."""
    if field is None:
        return json.dumps({name: value for name, value in observation.items() if name not in NO_TEXT})
    value = observation[field]
    return value if isinstance(value, str) else json.dumps(value)
