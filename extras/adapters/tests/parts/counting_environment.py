"""An environment served by OpenEnv's own server: the agent has to say `four` as many times as the seed."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Asked(Observation):
    text: str = ""


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Asked:
        self._left = seed or 1
        return Asked(text="What is 2 + 2?")

    def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Asked:
        self._left -= 1
        return Asked(text="Sure?", reward=1.0 if action.message == "four" else 0.0, done=self._left == 0)

    @property
    def state(self) -> State:
        return State(step_count=0)


uvicorn.run(
    create_fastapi_app(Counting, Said, Asked, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning"
)
