"""Sessions and rewards over HTTP, asynchronous: the calls of `Client` with `await`, for several event loops.

Each call has the description of the same call of `Client`, which that module sets.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Self, Unpack

import httpx2

from turnwise.client import wire
from turnwise.client.connection import DEFAULT_BASE_URL, Connection, SessionState
from turnwise.client.wire import (
    ApiCall,
    Attempts,
    FeedbackFields,
    FeedbackKind,
    ForkAt,
    Prompt,
    RewardFields,
    SessionFields,
)
from turnwise.types import Json


class AsyncSessionHandle(SessionState):
    """One open session, of an asynchronous client."""

    def __init__(self, data: Json, client: AsyncClient) -> None:
        super().__init__(data, client)
        self._client = client

    async def reward(self, value: float, **where: Unpack[RewardFields]) -> int:
        return await self._client.reward(value, session_id=self.session_id, **where)

    async def end(self, *, reason: str | None = None, reward: float | None = None) -> Json:
        return await self._client.end_session(self.session_id, reason=reason, reward=reward)

    def turns(self) -> AsyncIterator[Json]:
        return self._client.turns(self.session_id)


class AsyncClient(Connection):
    """Asynchronous client of the control plane. May be used from several event loops."""

    def __init__(self, base_url: str = DEFAULT_BASE_URL, api_key: str | None = None, **options: Any) -> None:
        super().__init__(base_url, api_key, **options)
        self._http = httpx2.AsyncClient(**self.options, transport=self.transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the running loop's connections; another call opens new ones."""
        await self.pool.aclose()

    async def create_session(self, **fields: Unpack[SessionFields]) -> AsyncSessionHandle:
        return AsyncSessionHandle(await self._json(wire.create_session(fields)), self)

    async def fork(self, turn_id: str, *, at: ForkAt = "after", **fields: Unpack[SessionFields]) -> AsyncSessionHandle:
        return AsyncSessionHandle(await self._json(wire.fork(turn_id, at, fields)), self)

    async def served_model(self) -> str:
        if self.model is None:
            self.model = wire.first_model(await self._json(wire.get("/v1/models")))
        return self.model

    async def session(self, session_id: str) -> Json:
        return await self._json(wire.get(wire.session_path(session_id)))

    def sessions(self, **filters: Any) -> AsyncIterator[Json]:
        return self._rows(wire.page_of("/v1/sessions", filters), "session_id")

    async def set_label(self, session_id: str, label: str, note: str | None = None) -> Json:
        return await self._json(wire.set_label(session_id, label, note))

    async def do_not_train(self, session_id: str) -> Json:
        return await self._json(wire.do_not_train(session_id))

    async def remove_label(self, session_id: str, label: str) -> Json:
        return await self._json(wire.remove_label(session_id, label))

    async def end_session(self, session_id: str, *, reason: str | None = None, reward: float | None = None) -> Json:
        return await self._json(wire.end_session(session_id, reason, reward))

    def turns(self, session_id: str, **filters: Any) -> AsyncIterator[Json]:
        return self._rows(wire.page_of(wire.session_path(session_id, "/turns"), filters), "turn_id")

    async def turn(self, turn_id: str, *, prompt: Prompt = "added") -> Json:
        return await self._json(wire.get_turn(turn_id, prompt))

    async def image(self, digest: str) -> str:
        answer = await self._send(wire.get_image(digest))
        return wire.data_url(answer.headers["content-type"], answer.content)

    async def claim(
        self,
        trainer_id: str,
        *,
        policy: str = "default",
        max_groups: int = 8,
        singles_per_group: int = 1,
        lease_seconds: float = 60.0,
    ) -> Json:
        return await self._json(wire.claim(trainer_id, policy, max_groups, singles_per_group, lease_seconds))

    async def renew_claim(self, held: Json, lease_seconds: float = 60.0) -> Json:
        return await self._json(wire.change_claim("renew", held, lease_seconds=lease_seconds))

    async def release_claim(self, held: Json, reason: str | None = None) -> Json:
        return await self._json(wire.change_claim("release", held, reason=reason))

    async def acknowledge_claim(
        self,
        held: Json,
        trainer_id: str,
        policy_version: int,
        trained: Mapping[str, float],
        *,
        refused: Mapping[str, str] | None = None,
        metrics: Json | None = None,
    ) -> Json:
        done = {"trained": dict(trained), "refused": refused, "metrics": metrics}
        return await self._json(
            wire.change_claim("ack", held, trainer_id=trainer_id, policy_version=policy_version, **done)
        )

    async def recomputed_logprobs(self, turn_id: str) -> Json:
        return await self._json(wire.recompute_logprobs(turn_id))

    async def reward(self, value: float, *, session_id: str | None = None, **where: Unpack[RewardFields]) -> int:
        return (await self.rewards([wire.reward_line(value, session_id=session_id, **where)]))[0]

    async def feedback(
        self,
        kind: FeedbackKind,
        value: bool | float | str | None = None,
        *,
        turn_id: str | None = None,
        **fields: Unpack[FeedbackFields],
    ) -> Json:
        return await self._json(wire.post_feedback(kind, value, turn_id, fields))

    async def withdraw_feedback(self, kind: FeedbackKind, **target: str | None) -> Json:
        return await self._json(wire.delete_feedback(kind, target))

    async def feedback_of(self, session_id: str) -> list[Json]:
        rows: list[Json] = (await self._json(wire.get("/v1/feedback", session_id=session_id)))["data"]
        return rows

    def feedback_from(self, source: str) -> AsyncIterator[Json]:
        return self._rows(wire.get("/v1/feedback", source=source), "session_id")

    async def next_rating(
        self, policy: str = "default", *, rater: str | None = None, days: float | None = None
    ) -> Json:
        return await self._json(wire.get("/v1/ratings/next", policy=policy, rater=rater, days=days))

    async def rate(self, session_id: str, value: bool | float | None = None, **said: Any) -> Json:
        fields = wire.given({"session_id": session_id, "value": value, **said})
        return await self._json(wire.write("/v1/ratings", fields))

    async def ratings(self, policy: str = "default") -> Json:
        return await self._json(wire.get("/v1/ratings", policy=policy))

    async def rewards(self, lines: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> list[int]:
        answer = await self._json(wire.post_rewards(lines, idempotency_key=idempotency_key))
        return [row["turns"] for row in answer["data"]]

    async def experiences(self, **filters: Any) -> AsyncIterator[Json]:
        response = await self._send(wire.get("/v1/experiences", **filters), stream=True)
        try:
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line)
        finally:
            await response.aclose()

    def policies(self, policy: str | None = None, *, earned: bool = False) -> AsyncIterator[Json]:
        wanted = wire.given({"policy": policy, "earned": earned or None})
        return self._rows(wire.page_of("/v1/policies", wanted), "version")

    async def policy_summaries(self) -> list[Json]:
        rows: list[Json] = (await self._json(wire.get("/v1/policies?summary=true&limit=1")))["policies"]
        return rows

    async def key_policy(self) -> str:
        name: str = (await self._json(wire.get("/v1/policies?limit=1")))["key_policy"]
        return name

    async def publish_policy(self, path: str, **fields: Any) -> Json:
        return await self._json(wire.write("/v1/policies", {"path": path, **fields}))

    async def create_policy(self, name: str, **fields: Any) -> Json:
        return await self._json(wire.write("/v1/policies", {"name": name, **fields}))

    async def archive_policy(self, name: str, *, archived: bool = True) -> Json:
        return await self._json(wire.archive_policy(name, archived=archived))

    async def activate(self, version: int, *, pin: bool = True) -> Json:
        return await self._json(wire.activate(version, pin=pin))

    async def keys(self) -> list[Json]:
        return list((await self._json(wire.get("/v1/keys")))["data"])

    async def create_key(self, **fields: Any) -> Json:
        return await self._json(wire.write("/v1/keys", fields))

    async def revoke_key(self, key_id: str) -> Json:
        return await self._json(wire.revoke_key(key_id))

    def updates(self) -> AsyncIterator[Json]:
        return self._rows(wire.page_of("/v1/updates", {}), "update_id")

    async def models(self) -> list[Json]:
        rows: list[Json] = (await self._json(wire.get("/v1/models")))["data"]
        return rows

    async def metrics(self) -> str:
        return (await self._send(wire.get("/metrics"))).text

    async def wait_until_ready(self, timeout_seconds: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while reason := await self._why_not_ready():
            if time.monotonic() >= deadline:
                raise wire.not_ready(self.base_url, timeout_seconds, reason)
            await asyncio.sleep(wire.READY_POLL_SECONDS)

    async def _why_not_ready(self) -> str | None:
        try:
            response = await self._http.get("/readyz", timeout=5.0)
        except httpx2.TransportError as error:
            return f"{type(error).__name__}: {error}"
        return None if response.is_success else f"{response.status_code}: {response.text[:500]}"

    async def _rows(self, call: ApiCall | None, id_field: str) -> AsyncIterator[Json]:
        while call is not None:
            page = await self._json(call)
            for row in page["data"]:
                yield row
            call = wire.next_page(call, page, id_field)

    async def _json(self, call: ApiCall) -> Json:
        answer: Json = (await self._send(call)).json()
        return answer

    async def _send(self, call: ApiCall, *, stream: bool = False) -> httpx2.Response:
        attempts = Attempts(self.max_retries, self.api_key)
        while True:
            request = self._http.build_request(**self.request_arguments(call))
            try:
                response = await self._http.send(request, stream=stream)
                if response.is_success:
                    return response
                body = await response.aread()
                await response.aclose()
            except httpx2.TransportError as error:
                pause = attempts.after_broken_connection(str(request.url), error)
            else:
                pause = attempts.after_answer(response.status_code, body, response.headers.get("retry-after"))
            await asyncio.sleep(pause)
