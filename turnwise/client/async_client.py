"""Sessions and rewards over HTTP, asynchronous: the calls of `Client` with `await`, for several event loops."""

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
        """Add a reward to the session, to one of its steps or turns; return how many turns it reached."""
        return await self._client.reward(value, session_id=self.session_id, **where)

    async def end(self, *, reason: str | None = None, reward: float | None = None) -> Json:
        """End the session; return its JSON, in which `training_note` says what it waits for until it is trained."""
        return await self._client.end_session(self.session_id, reason=reason, reward=reward)

    def turns(self) -> AsyncIterator[Json]:
        """Iterate over what was captured, in order."""
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
        """Create a session, or return the existing session of this `session_id`."""
        return AsyncSessionHandle(await self._json(wire.create_session(fields)), self)

    async def fork(self, turn_id: str, *, at: ForkAt = "after", **fields: Unpack[SessionFields]) -> AsyncSessionHandle:
        """Create a session that continues after a turn's reply, or before it, with the same tokens."""
        return AsyncSessionHandle(await self._json(wire.fork(turn_id, at, fields)), self)

    async def served_model(self) -> str:
        """Return the name of the model that is served, which model calls have to give."""
        if self.model is None:
            self.model = wire.first_model(await self._json(wire.get("/v1/models")))
        return self.model

    async def session(self, session_id: str) -> Json:
        """Return a session's JSON."""
        return await self._json(wire.get(wire.session_path(session_id)))

    def sessions(self, **filters: Any) -> AsyncIterator[Json]:
        """Iterate over sessions, page by page; filters are those of `GET /v1/sessions`."""
        return self._rows(wire.page_of("/v1/sessions", filters), "session_id")

    async def set_label(self, session_id: str, label: str, note: str | None = None) -> Json:
        """Give a session a label, or replace the label's note; return the session's JSON."""
        return await self._json(wire.set_label(session_id, label, note))

    async def remove_label(self, session_id: str, label: str) -> Json:
        """Remove a label from a session; return the session's JSON."""
        return await self._json(wire.remove_label(session_id, label))

    async def end_session(self, session_id: str, *, reason: str | None = None, reward: float | None = None) -> Json:
        """End a session; return its JSON, in which `training_note` says what it waits for until it is trained."""
        return await self._json(wire.end_session(session_id, reason, reward))

    def turns(self, session_id: str, **filters: Any) -> AsyncIterator[Json]:
        """Iterate over a session's turns in order, page by page; filters are those of `GET /v1/sessions/{id}/turns`."""
        return self._rows(wire.page_of(wire.session_path(session_id, "/turns"), filters), "turn_id")

    async def turn(self, turn_id: str, *, prompt: Prompt = "added") -> Json:
        """Return one turn's JSON, with what it adds to its parent's prompt or with its whole prompt."""
        return await self._json(wire.get_turn(turn_id, prompt))

    async def recomputed_logprobs(self, turn_id: str) -> Json:
        """Return a turn's logprobs as stored and as the served version computes them now; needs an admin key."""
        return await self._json(wire.recompute_logprobs(turn_id))

    async def reward(self, value: float, *, session_id: str | None = None, **where: Unpack[RewardFields]) -> int:
        """Add one reward to the ledger; return how many turns it reached."""
        return (await self.rewards([wire.reward_line(value, session_id=session_id, **where)]))[0]

    async def feedback(
        self,
        kind: FeedbackKind,
        value: bool | float | str | None = None,
        *,
        turn_id: str | None = None,
        **fields: Unpack[FeedbackFields],
    ) -> Json:
        """Store what a person said about a turn or a session; return it. Later feedback of the same kind replaces it.

        Args:
            kind: `boolean` for a thumb, `float` for a rating, `comment`, or `demonstration` for a better reply.
            value: True or false, a number, or a text. Without one, a demonstration is the turn's reply as it is.
            turn_id: The turn: the id of the completion.
            fields: See `FeedbackFields`.
        """
        return await self._json(wire.post_feedback(kind, value, turn_id, fields))

    async def feedback_of(self, session_id: str) -> list[Json]:
        """Return the feedback of a session and its turns that is in force, oldest first."""
        rows: list[Json] = (await self._json(wire.get("/v1/feedback", session_id=session_id)))["data"]
        return rows

    async def rewards(self, lines: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> list[int]:
        """Add several reward lines in one transaction; return how many turns each reached."""
        answer = await self._json(wire.post_rewards(lines, idempotency_key=idempotency_key))
        return [row["turns"] for row in answer["data"]]

    async def experiences(self, **filters: Any) -> AsyncIterator[Json]:
        """Stream what the trainer would see; filters are those of `GET /v1/experiences`."""
        response = await self._send(wire.get("/v1/experiences", **filters), stream=True)
        try:
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line)
        finally:
            await response.aclose()

    def policies(self, policy: str | None = None) -> AsyncIterator[Json]:
        """Iterate over the published versions, of all policies or of one."""
        return self._rows(wire.page_of("/v1/policies", wire.given({"policy": policy})), "version")

    async def policy_summaries(self) -> list[Json]:
        """Return the policies, with a `summary` of what each of them holds."""
        rows: list[Json] = (await self._json(wire.get("/v1/policies?summary=true&limit=1")))["policies"]
        return rows

    async def key_policy(self) -> str:
        """Return the name of the policy that new sessions of this key sample with."""
        name: str = (await self._json(wire.get("/v1/policies?limit=1")))["key_policy"]
        return name

    async def publish_policy(self, path: str, **fields: Any) -> Json:
        """Publish a checkpoint directory as a new policy version."""
        return await self._json(wire.write("/v1/policies", {"path": path, **fields}))

    async def create_policy(self, name: str, **fields: Any) -> Json:
        """Create a policy of the tenant; `base`, or the adapter in the directory `path`, is what it starts from."""
        return await self._json(wire.write("/v1/policies", {"name": name, **fields}))

    async def archive_policy(self, name: str, *, archived: bool = True) -> Json:
        """Archive a policy: nothing is sampled with it or trained; `archived=False` takes it into use again."""
        return await self._json(wire.archive_policy(name, archived=archived))

    async def activate(self, version: int, *, pin: bool = True) -> Json:
        """Serve this policy version, and stay on it; without a pin until a newer version is published."""
        return await self._json(wire.activate(version, pin=pin))

    async def keys(self) -> list[Json]:
        """Return the tenant's API keys without their secrets; this and the next two need an admin key."""
        return list((await self._json(wire.get("/v1/keys")))["data"])

    async def create_key(self, **fields: Any) -> Json:
        """Create an API key; fields are those of `POST /v1/keys`. Only this answer has the whole `key`."""
        return await self._json(wire.write("/v1/keys", fields))

    async def revoke_key(self, key_id: str) -> Json:
        """Revoke an API key; return its JSON."""
        return await self._json(wire.revoke_key(key_id))

    def updates(self) -> AsyncIterator[Json]:
        """Iterate over the trainer's updates, newest first."""
        return self._rows(wire.page_of("/v1/updates", {}), "update_id")

    async def models(self) -> list[Json]:
        """Return the models that the engine serves."""
        rows: list[Json] = (await self._json(wire.get("/v1/models")))["data"]
        return rows

    async def metrics(self) -> str:
        """Return the proxy's counts in Prometheus' text format."""
        return (await self._send(wire.get("/metrics"))).text

    async def wait_until_ready(self, timeout_seconds: float = 60.0) -> None:
        """Wait until the proxy, its store and its engines are ready.

        Raises:
            ProxyUnavailable: they were not ready in time.
        """
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
