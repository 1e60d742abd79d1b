"""Harbor jobs through the proxy: each trial is a session, and its verifier's rewards are the session's.

    harbor run … --plugin turnwise_adapters.harbor:TurnwisePlugin --plugin-kwarg proxy=http://127.0.0.1:8100

The plugin gives each trial a base URL of its own, in the environment variables that Harbor's agents read. Attempts at
one task with one agent and model are a group. Harbor is not imported: a plugin is any class with the two methods.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from typing import Any

from turnwise.client import AsyncClient
from turnwise.client.connection import DEFAULT_BASE_URL

log = logging.getLogger(__name__)

SOURCE = "harbor"
KEY_WHEN_NONE = "EMPTY"
IN_PROCESS_AGENTS = ("terminus", "terminus-1", "terminus-2")
"""Agents that run in Harbor's own process and take the URL as an option."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A trial as a rollout."""

    session_id: str
    task_id: str
    group_id: str
    run: int
    group_size: int


class TurnwisePlugin:
    """A plugin of `harbor run`."""

    def __init__(
        self,
        proxy: str = DEFAULT_BASE_URL,
        agent_proxy: str | None = None,
        api_key: str | None = None,
        split: str = "train",
        failed_reward: float | None = None,
    ) -> None:
        """Take the plugin's `--plugin-kwarg` values.

        Args:
            proxy: The proxy as Harbor reaches it.
            agent_proxy: The proxy as agents in their sandboxes reach it; by default the same.
            api_key: A key of the role `agent` that may give rewards, or an admin key.
            split: `train`, or `eval`.
            failed_reward: Reward of a trial without a verifier's result; by default it has none, and its group waits.
        """
        self._client = AsyncClient(proxy, api_key)
        self._agent_proxy = (agent_proxy or proxy).rstrip("/")
        self._key = api_key or KEY_WHEN_NONE
        self._split = split
        self._failed_reward = failed_reward
        self._places: dict[str, Place] = {}

    async def on_job_start(self, job: Any) -> None:
        """Point the agents of all trials to the proxy, and follow the trials."""
        configs = list(job._trial_configs)  # noqa: SLF001  Harbor has no public list of a job's trials
        self._places = places_of(configs, str(job.config.job_name))
        for config in configs:
            place = self._places[config.trial_name]
            config.agent = config.agent.model_copy(update=self._redirected(config.agent, place.session_id))
        job.on_trial_started(self._open)
        job.on_trial_ended(self._close)

    async def on_job_end(self, job_result: Any) -> None:  # noqa: ARG002  Harbor's signature
        """Close the connections."""
        await self._client.aclose()

    def _redirected(self, agent: Any, session_id: str) -> dict[str, Any]:
        """Return the changes that point an agent to its session."""
        url = f"{self._agent_proxy}/sessions/{session_id}"
        environment = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": self._key,
            "GOOGLE_GEMINI_BASE_URL": url,
            "GEMINI_API_KEY": self._key,
        }
        changes: dict[str, Any] = {"env": {**agent.env, **environment}}
        if agent.name in IN_PROCESS_AGENTS:
            changes["kwargs"] = {**agent.kwargs, "api_base": f"{url}/v1"}
        return changes

    async def _open(self, event: Any) -> None:
        place = self._places[event.config.trial_name]
        await self._client.create_session(**dataclasses.asdict(place), split=self._split)

    async def _close(self, event: Any) -> None:
        """Give the verifier's rewards and end the session."""
        session_id = self._places[event.config.trial_name].session_id
        verified = event.result.verifier_result
        rewards = dict((verified.rewards if verified is not None else None) or {})
        if not rewards and self._failed_reward is not None:
            rewards = {"reward": self._failed_reward}
        if rewards:
            lines = [{"value": float(value), "name": name, "source": SOURCE} for name, value in rewards.items()]
            await self._client.rewards(
                [{"session_id": session_id, **line} for line in lines], idempotency_key=f"harbor-{session_id}"
            )
        else:
            log.warning("trial %s has no verifier's result: session %s has no reward", event.trial_name, session_id)
        failure = event.result.exception_info
        await self._client.end_session(session_id, reason=None if failure is None else failure.exception_type)


def places_of(configs: list[Any], job_name: str) -> dict[str, Place]:
    """Return each trial's rollout by its name: attempts at one task with one agent and model are a group."""
    members: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for config in configs:
        agent = config.agent
        task_id = config.task.get_task_id().get_name()
        members[task_id, agent.name or agent.import_path or "", agent.model_name or ""].append(config.trial_name)
    places: dict[str, Place] = {}
    for key, names in members.items():
        for run, name in enumerate(names):
            places[name] = Place(
                session_id=_id("harbor", job_name, name),
                task_id=key[0],
                group_id=_id("harbor", job_name, *key),
                run=run,
                group_size=len(names),
            )
    return places


def _id(*parts: str) -> str:
    """Return an id of characters that a URL holds unchanged."""
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", part) for part in parts if part)
