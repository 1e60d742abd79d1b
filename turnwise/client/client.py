"""Sessions and rewards over HTTP, synchronous; `AsyncClient` has the same calls with `await`.

A session returns *real* OpenAI clients with the session's own base URL, so an agent runs unchanged and all its samples
are captured. This module adds only the control plane: creating and ending sessions, rewards, and reading captured data.

    with Client("http://127.0.0.1:8100") as turnwise:
        session = turnwise.create_session(task_id="trail-17", group_id="trail-17", group_size=8)
        answer = my_agent(session.openai())
        session.end(reward=score(answer))
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, Unpack

import httpx2

from turnwise.client import wire
from turnwise.client.async_client import AsyncClient, AsyncSessionHandle
from turnwise.client.connection import DEFAULT_BASE_URL, LIMITS, Connection, SessionState
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


class SessionHandle(SessionState):
    """One open session."""

    def __init__(self, data: Json, client: Client) -> None:
        super().__init__(data, client)
        self._client = client

    def reward(self, value: float, **where: Unpack[RewardFields]) -> int:
        """Add a reward to the session, to one of its steps or turns; return how many turns it reached."""
        return self._client.reward(value, session_id=self.session_id, **where)

    def end(self, *, reason: str | None = None, reward: float | None = None) -> Json:
        """End the session; return its JSON, in which `training_note` says what it waits for until it is trained."""
        return self._client.end_session(self.session_id, reason=reason, reward=reward)

    def turns(self) -> Iterator[Json]:
        """Iterate over what was captured, in order."""
        return self._client.turns(self.session_id)


class Client(Connection):
    """Synchronous client of the control plane. Safe to share between threads."""

    def __init__(self, base_url: str = DEFAULT_BASE_URL, api_key: str | None = None, **options: Any) -> None:
        super().__init__(base_url, api_key, **options)
        self._http = httpx2.Client(**self.options, limits=LIMITS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()
        self.pool.close()

    def asynchronous(self) -> AsyncClient:
        """Return an asynchronous client of the same proxy that shares this client's connections for model calls."""
        return AsyncClient(
            self.base_url,
            self.api_key,
            timeout=self.timeout,
            max_retries=self.max_retries,
            openai_timeout=self.openai_timeout,
            transport=self.transport,
        )

    def create_session(self, **fields: Unpack[SessionFields]) -> SessionHandle:
        """Create a session, or return the existing session of this `session_id`."""
        return SessionHandle(self._json(wire.create_session(fields)), self)

    def fork(self, turn_id: str, *, at: ForkAt = "after", **fields: Unpack[SessionFields]) -> SessionHandle:
        """Create a session that continues after a turn's reply, or before it, with the same tokens."""
        return SessionHandle(self._json(wire.fork(turn_id, at, fields)), self)

    def served_model(self) -> str:
        """Return the name of the model that is served, which model calls have to give."""
        if self.model is None:
            self.model = wire.first_model(self._json(wire.get("/v1/models")))
        return self.model

    def session(self, session_id: str) -> Json:
        """Return a session's JSON."""
        return self._json(wire.get(wire.session_path(session_id)))

    def sessions(self, **filters: Any) -> Iterator[Json]:
        """Iterate over sessions, page by page; filters are those of `GET /v1/sessions`."""
        return self._rows(wire.page_of("/v1/sessions", filters), "session_id")

    def set_label(self, session_id: str, label: str, note: str | None = None) -> Json:
        """Give a session a label, or replace the label's note; return the session's JSON."""
        return self._json(wire.set_label(session_id, label, note))

    def do_not_train(self, session_id: str) -> Json:
        """Mark a session as not to be trained, which nothing lifts; return what was marked."""
        return self._json(wire.do_not_train(session_id))

    def remove_label(self, session_id: str, label: str) -> Json:
        """Remove a label from a session; return the session's JSON."""
        return self._json(wire.remove_label(session_id, label))

    def end_session(self, session_id: str, *, reason: str | None = None, reward: float | None = None) -> Json:
        """End a session; return its JSON, in which `training_note` says what it waits for until it is trained."""
        return self._json(wire.end_session(session_id, reason, reward))

    def turns(self, session_id: str, **filters: Any) -> Iterator[Json]:
        """Iterate over a session's turns in order, page by page; filters are those of `GET /v1/sessions/{id}/turns`."""
        return self._rows(wire.page_of(wire.session_path(session_id, "/turns"), filters), "turn_id")

    def turn(self, turn_id: str, *, prompt: Prompt = "added") -> Json:
        """Return one turn's JSON, with what it adds to its parent's prompt or with its whole prompt."""
        return self._json(wire.get_turn(turn_id, prompt))

    def image(self, digest: str) -> str:
        """Return an image that messages name as `image:DIGEST`, as a data URL."""
        answer = self._send(wire.get_image(digest))
        return wire.data_url(answer.headers["content-type"], answer.content)

    def claim(
        self,
        trainer_id: str,
        *,
        policy: str = "default",
        max_groups: int = 8,
        singles_per_group: int = 1,
        lease_seconds: float = 60.0,
    ) -> Json:
        """Claim rewarded groups to train; return them with their `chains`, both empty where no group is ready."""
        return self._json(wire.claim(trainer_id, policy, max_groups, singles_per_group, lease_seconds))

    def renew_claim(self, held: Json, lease_seconds: float = 60.0) -> Json:
        """Hold claimed groups for longer; return the sessions that must not be trained, and what was deleted."""
        return self._json(wire.change_claim("renew", held, lease_seconds=lease_seconds))

    def release_claim(self, held: Json, reason: str | None = None) -> Json:
        """Give claimed groups back, to be claimed again."""
        return self._json(wire.change_claim("release", held, reason=reason))

    def acknowledge_claim(
        self,
        held: Json,
        trainer_id: str,
        policy_version: int,
        trained: Mapping[str, float],
        *,
        refused: Mapping[str, str] | None = None,
        metrics: Json | None = None,
    ) -> Json:
        """Record that claimed groups were trained: the advantage of each turn, and the published version it made."""
        done = {"trained": dict(trained), "refused": refused, "metrics": metrics}
        return self._json(wire.change_claim("ack", held, trainer_id=trainer_id, policy_version=policy_version, **done))

    def recomputed_logprobs(self, turn_id: str) -> Json:
        """Return a turn's logprobs as stored and as the served version computes them now; needs an admin key."""
        return self._json(wire.recompute_logprobs(turn_id))

    def reward(self, value: float, *, session_id: str | None = None, **where: Unpack[RewardFields]) -> int:
        """Add one reward to the ledger; return how many turns it reached."""
        return self.rewards([wire.reward_line(value, session_id=session_id, **where)])[0]

    def feedback(
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
        return self._json(wire.post_feedback(kind, value, turn_id, fields))

    def withdraw_feedback(self, kind: FeedbackKind, **target: str | None) -> Json:
        """Withdraw feedback, with its reward. The target is `turn_id` or `session_id`, and its `name`."""
        return self._json(wire.delete_feedback(kind, target))

    def feedback_of(self, session_id: str) -> list[Json]:
        """Return the feedback of a session and its turns that is in force, oldest first."""
        rows: list[Json] = self._json(wire.get("/v1/feedback", session_id=session_id))["data"]
        return rows

    def feedback_from(self, source: str) -> Iterator[Json]:
        """Iterate over the feedback that a source gave, of all sessions."""
        return self._rows(wire.get("/v1/feedback", source=source), "session_id")

    def next_rating(self, policy: str = "default", *, rater: str | None = None, days: float | None = None) -> Json:
        """Draw a session for a person to rate; its `session_id` is None where none is left."""
        return self._json(wire.get("/v1/ratings/next", policy=policy, rater=rater, days=days))

    def rate(self, session_id: str, value: bool | float | None = None, **said: Any) -> Json:
        """Rate a session that was drawn, by a thumb or a number; others are those of `POST /v1/ratings`."""
        return self._json(wire.write("/v1/ratings", wire.given({"session_id": session_id, "value": value, **said})))

    def ratings(self, policy: str = "default") -> Json:
        """Return what each version of a policy is worth, by the ratings that were asked for and by the head."""
        return self._json(wire.get("/v1/ratings", policy=policy))

    def rewards(self, lines: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> list[int]:
        """Add several reward lines in one transaction; return how many turns each reached."""
        answer = self._json(wire.post_rewards(lines, idempotency_key=idempotency_key))
        return [row["turns"] for row in answer["data"]]

    def experiences(self, **filters: Any) -> Iterator[Json]:
        """Stream what the trainer would see; filters are those of `GET /v1/experiences`."""
        response = self._send(wire.get("/v1/experiences", **filters), stream=True)
        try:
            yield from (json.loads(line) for line in response.iter_lines() if line)
        finally:
            response.close()

    def policies(self, policy: str | None = None, *, earned: bool = False) -> Iterator[Json]:
        """Iterate over the published versions, of all policies or of one; with `earned`, what their sessions did."""
        wanted = wire.given({"policy": policy, "earned": earned or None})
        return self._rows(wire.page_of("/v1/policies", wanted), "version")

    def policy_summaries(self) -> list[Json]:
        """Return the policies, with a `summary` of what each of them holds."""
        rows: list[Json] = self._json(wire.get("/v1/policies?summary=true&limit=1"))["policies"]
        return rows

    def key_policy(self) -> str:
        """Return the name of the policy that new sessions of this key sample with."""
        name: str = self._json(wire.get("/v1/policies?limit=1"))["key_policy"]
        return name

    def publish_policy(self, path: str, **fields: Any) -> Json:
        """Publish a checkpoint directory as a new policy version."""
        return self._json(wire.write("/v1/policies", {"path": path, **fields}))

    def create_policy(self, name: str, **fields: Any) -> Json:
        """Create a policy of the tenant; `base`, or the adapter in the directory `path`, is what it starts from."""
        return self._json(wire.write("/v1/policies", {"name": name, **fields}))

    def archive_policy(self, name: str, *, archived: bool = True) -> Json:
        """Archive a policy: nothing is sampled with it or trained; `archived=False` takes it into use again."""
        return self._json(wire.archive_policy(name, archived=archived))

    def activate(self, version: int, *, pin: bool = True) -> Json:
        """Serve this policy version, and stay on it; without a pin until a newer version is published."""
        return self._json(wire.activate(version, pin=pin))

    def keys(self) -> list[Json]:
        """Return the tenant's API keys without their secrets; this and the next two need an admin key."""
        return list(self._json(wire.get("/v1/keys"))["data"])

    def create_key(self, **fields: Any) -> Json:
        """Create an API key; fields are those of `POST /v1/keys`. Only this answer has the whole `key`."""
        return self._json(wire.write("/v1/keys", fields))

    def revoke_key(self, key_id: str) -> Json:
        """Revoke an API key; return its JSON."""
        return self._json(wire.revoke_key(key_id))

    def updates(self) -> Iterator[Json]:
        """Iterate over the trainer's updates, newest first."""
        return self._rows(wire.page_of("/v1/updates", {}), "update_id")

    def models(self) -> list[Json]:
        """Return the models that the engine serves."""
        rows: list[Json] = self._json(wire.get("/v1/models"))["data"]
        return rows

    def metrics(self) -> str:
        """Return the proxy's counts in Prometheus' text format."""
        return self._send(wire.get("/metrics")).text

    def wait_until_ready(self, timeout_seconds: float = 60.0) -> None:
        """Wait until the proxy, its store and its engines are ready.

        Raises:
            ProxyUnavailable: they were not ready in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while reason := self._why_not_ready():
            if time.monotonic() >= deadline:
                raise wire.not_ready(self.base_url, timeout_seconds, reason)
            time.sleep(wire.READY_POLL_SECONDS)

    def _why_not_ready(self) -> str | None:
        try:
            response = self._http.get("/readyz", timeout=5.0)
        except httpx2.TransportError as error:
            return f"{type(error).__name__}: {error}"
        return None if response.is_success else f"{response.status_code}: {response.text[:500]}"

    def _rows(self, call: ApiCall | None, id_field: str) -> Iterator[Json]:
        while call is not None:
            page = self._json(call)
            yield from page["data"]
            call = wire.next_page(call, page, id_field)

    def _json(self, call: ApiCall) -> Json:
        answer: Json = self._send(call).json()
        return answer

    def _send(self, call: ApiCall, *, stream: bool = False) -> httpx2.Response:
        attempts = Attempts(self.max_retries, self.api_key)
        while True:
            request = self._http.build_request(**self.request_arguments(call))
            try:
                response = self._http.send(request, stream=stream)
                if response.is_success:
                    return response
                body = response.read()
                response.close()
            except httpx2.TransportError as error:
                pause = attempts.after_broken_connection(str(request.url), error)
            else:
                pause = attempts.after_answer(response.status_code, body, response.headers.get("retry-after"))
            time.sleep(pause)


def _describe_twin(described: type, twin: type) -> None:
    for name, call in vars(described).items():
        if name in vars(twin) and not vars(twin)[name].__doc__:
            vars(twin)[name].__doc__ = call.__doc__


_describe_twin(SessionHandle, AsyncSessionHandle)
_describe_twin(Client, AsyncClient)
