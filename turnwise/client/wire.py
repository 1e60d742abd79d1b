"""Requests of the SDK as plain values, how long it waits before a retry, and the errors that answers become.

This module does no IO. The synchronous and the asynchronous client differ only in how they send a `Call` and how they
sleep, so the rules for paths, retries and errors are written once.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict
from urllib.parse import quote

from turnwise import errors
from turnwise.types import Json

API_KEY_WHEN_NONE = "EMPTY"
"""The key that OpenAI clients send to a proxy without API keys; they do not start without a key."""
UNAUTHORIZED = 401
NO_KEY = (
    "the proxy asks for an API key, and none was given: pass `api_key` to a client; commands take --api-key or "
    "TURNWISE_API_KEY; `turnwise up` writes a key to .turnwise-key in its directory"
)

PAGE_SIZE = 100
RETRIED_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same call may succeed."""
BACKOFF_BASE_SECONDS = 0.25
BACKOFF_MAX_SECONDS = 8.0
READY_POLL_SECONDS = 0.2
RETRY_AFTER_MAX_SECONDS = 120.0
"""Maximum pause; a longer `Retry-After` is shortened to this."""


Prompt = Literal["added", "whole"]
"""How much of a turn's prompt its JSON holds: what it adds to its parent's, or all."""


ForkAt = Literal["after", "before"]
"""Whether a fork continues after the turn's reply, or samples its prompt again."""


class SessionFields(TypedDict, total=False):
    """Fields of a new session; the proxy sets the fields that are left out."""

    session_id: str
    """An id chosen by the caller makes creation idempotent across restarts of the agent; by default a new id."""
    task_id: str
    """Name of the task that the session plays."""
    run: int
    """Which rollout of the task this is, from 0."""
    group_id: str
    """The group of rollouts whose rewards are compared."""
    group_size: int
    """Number of sessions that complete the group."""
    split: str
    """`train`, or `eval`: never trained on."""
    credit: str
    """`propagate`: every turn gets the session's reward; `step_wise`: each turn gets its own step's."""
    gamma: float
    """Discount of a step-wise return, 0 to 1."""
    metadata: Json
    """Any JSON object of the caller; it is stored and returned."""
    policy: str
    """Name of the policy that samples; by default the key's."""
    user_id: str
    """The person or account that the agent serves."""
    train: bool
    """False: nothing of it is ever trained, exported or judged."""
    record: bool
    """False: nor is anything stored that is said in it."""
    sampling: Json
    """Sampling parameters that override those of the session's calls."""
    key_may: Literal["call", "call_and_reward"]
    """Role of the session's key; by default it may only call the model."""
    key_expires_seconds: int
    """How many seconds the session's key is valid; by default as long as the session is open."""


class RewardFields(TypedDict, total=False):
    """Optional fields of a reward: a step or a turn, a name, and the source."""

    step: int
    """The step of the session that the reward is for."""
    turn_id: str
    """The turn that the reward is for: the id of the completion."""
    name: str
    """Rewards of different names add up; a later one of the same name replaces the earlier one."""
    source: str
    """Who gave it."""


class FeedbackFields(TypedDict, total=False):
    """Optional fields of feedback."""

    session_id: str
    """The session that it is about, if it is about no single turn."""
    name: str
    """For thumbs and ratings the name of the reward; it also separates the feedback of several people."""
    scale: tuple[float, float]
    """The lowest and the highest rating: they count as a thumb down and a thumb up."""
    over: Sequence[str]
    """Turns with other replies to the same prompt, which the reply was preferred to."""
    source: str
    """Where it comes from."""


FeedbackKind = Literal["boolean", "float", "comment", "demonstration"]
"""A thumb, a number or a rating, a text, or a better reply."""


@dataclasses.dataclass(frozen=True, slots=True)
class ApiCall:
    """One request to the control plane. Any call may be sent twice: writes have an idempotency key."""

    method: str
    path: str
    body: Any = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    idempotency_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Key": self.idempotency_key} if self.idempotency_key else {}


def get(path: str, **params: Any) -> ApiCall:
    return ApiCall("GET", path, params=given(params))


def write(path: str, body: Any, *, idempotency_key: str | None = None) -> ApiCall:
    return ApiCall("POST", path, body=body, idempotency_key=idempotency_key or uuid.uuid4().hex)


def given(fields: Mapping[str, Any]) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def segment(identifier: str | int) -> str:
    """Return an id as one quoted segment of a path, such as `task:0`, `a/b` or `…#1`."""
    return quote(str(identifier), safe=":")


def session_path(session_id: str, suffix: str = "") -> str:
    return f"/v1/sessions/{segment(session_id)}{suffix}"


def set_label(session_id: str, label: str, note: str | None) -> ApiCall:
    return ApiCall("PUT", session_path(session_id, f"/labels/{segment(label)}"), body=given({"note": note}))


def do_not_train(session_id: str) -> ApiCall:
    return ApiCall("POST", "/v1/consent", body={"kind": "session", "name": session_id})


def remove_label(session_id: str, label: str) -> ApiCall:
    return ApiCall("DELETE", session_path(session_id, f"/labels/{segment(label)}"))


def get_turn(turn_id: str, prompt: Prompt) -> ApiCall:
    return get(f"/v1/turns/{segment(turn_id)}", prompt=prompt)


def get_image(digest: str) -> ApiCall:
    return get(f"/v1/images/{segment(digest)}")


def data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def recompute_logprobs(turn_id: str) -> ApiCall:
    return get(f"/v1/turns/{segment(turn_id)}/logprobs")


def activate(version: int, *, pin: bool) -> ApiCall:
    return write(f"/v1/policies/{segment(version)}/activate", {"pin": pin})


def archive_policy(name: str, *, archived: bool) -> ApiCall:
    return write(f"/v1/policies/{segment(name)}/archive", {"archived": archived})


def claim(trainer_id: str, policy: str, max_groups: int, singles_per_group: int, lease_seconds: float) -> ApiCall:
    body = {"trainer_id": trainer_id, "policy": policy, "max_groups": max_groups, "lease_seconds": lease_seconds}
    return write("/v1/claims", body | {"singles_per_group": singles_per_group})


def change_claim(how: Literal["renew", "release", "ack"], held: Json, **fields: Any) -> ApiCall:
    groups = [{name: each[name] for name in ("group", "group_id", "fencing_token")} for each in held["groups"]]
    return write(f"/v1/claims/{how}", {"groups": groups, **given(fields)})


def revoke_key(key_id: str) -> ApiCall:
    return write(f"/v1/keys/{segment(key_id)}/revoke", {})


def create_session(fields: SessionFields) -> ApiCall:
    named = {"session_id": uuid.uuid4().hex, **given(fields)}
    return write("/v1/sessions", named, idempotency_key=named["session_id"])


def fork(turn_id: str, at: ForkAt, fields: SessionFields) -> ApiCall:
    named = {"session_id": uuid.uuid4().hex, **given(fields), "at": at}
    return write(f"/v1/turns/{segment(turn_id)}/fork", named, idempotency_key=named["session_id"])


def page_of(path: str, filters: Mapping[str, Any]) -> ApiCall:
    return get(path, **{"limit": PAGE_SIZE, **filters})


def not_ready(base_url: str, timeout_seconds: float, reason: str) -> errors.ProxyUnavailable:
    """Return the error for a proxy that was not ready in time, with the reason that it gave last."""
    return errors.ProxyUnavailable(
        f"the proxy at {base_url!r} was not ready within {timeout_seconds} s; its last answer: {reason}; "
        "start one with `turnwise up`, or give the address of the one that runs"
    )


def first_model(models: Json) -> str:
    return str(models["data"][0]["id"])


def reward_line(
    value: float,
    *,
    session_id: str | None = None,
    turn_id: str | None = None,
    step: int | None = None,
    name: str | None = None,
    source: str | None = None,
) -> Json:
    """Return one line for the ledger.

    Raises:
        InvalidRequest: neither a session nor a turn is given, or the value is not a finite number.
    """
    value = _finite(value)
    if session_id is None and turn_id is None:
        raise errors.InvalidRequest("a reward needs a target: give session_id or turn_id", param="session_id")
    fields = {"turn_id": turn_id} if turn_id else {"session_id": session_id}
    return {**fields, **given({"step": step, "name": name, "source": source}), "value": value}


def end_session(session_id: str, reason: str | None, reward: float | None) -> ApiCall:
    value = None if reward is None else _finite(reward)
    return write(session_path(session_id, "/end"), given({"termination_reason": reason, "reward": value}))


def _finite(value: float) -> float:
    with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
        if math.isfinite(value):
            return float(value)
    raise errors.InvalidRequest(f"a reward is a finite number, not {value!r:.40}; leave it out", param="value")


def post_rewards(lines: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> ApiCall:
    return write("/v1/rewards", [dict(line) for line in lines], idempotency_key=idempotency_key)


def post_feedback(
    kind: FeedbackKind, value: bool | float | str | None, turn_id: str | None, fields: FeedbackFields
) -> ApiCall:
    """Return the call that stores what a person said.

    Raises:
        InvalidRequest: neither a turn nor a session is given.
    """
    if turn_id is None and "session_id" not in fields:
        raise errors.InvalidRequest("feedback needs a target: give turn_id or session_id", param="turn_id")
    return write("/v1/feedback", given({"turn_id": turn_id, "kind": kind, "value": value, **fields}))


def delete_feedback(kind: FeedbackKind, target: Mapping[str, str | None]) -> ApiCall:
    return ApiCall("DELETE", "/v1/feedback", params=given({"kind": kind, **target}))


def next_page(call: ApiCall, page: Json, id_field: str) -> ApiCall | None:
    """Return the call for the next page; None after the last page."""
    rows = page["data"]
    # A page of a search names where it stopped, and may have no rows.
    after = page.get("next_after") or (rows[-1][id_field] if rows else None)
    if not page.get("has_more") or after is None:
        return None
    return dataclasses.replace(call, params={**call.params, "after": after})


def pause_seconds(attempt: int, retry_after: str | None) -> float:
    """Return the pause before attempt `attempt + 2`: `Retry-After`, otherwise exponential backoff, with jitter."""
    asked = _seconds(retry_after)
    if asked is not None:
        # Jitter only increases the pause: no client may retry before `Retry-After`.
        return min(asked, RETRY_AFTER_MAX_SECONDS) + random.uniform(0, BACKOFF_BASE_SECONDS)  # noqa: S311 not a secret
    doubled: float = min(BACKOFF_BASE_SECONDS * 2**attempt, BACKOFF_MAX_SECONDS)
    return doubled * random.uniform(0.5, 1.0)  # noqa: S311 not a secret


def _seconds(retry_after: str | None) -> float | None:
    try:
        return max(0.0, float(retry_after)) if retry_after else None
    except ValueError:  # an HTTP date; the proxy never sends one, but a gateway may
        return None


_ERROR_OF_STATUS: dict[int, type[errors.ClientError]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.TooLarge,
}


_ERROR_OF_CODE: dict[str, type[errors.TurnwiseError]] = {
    "token_budget_spent": errors.BudgetSpent,
    "engine_unavailable": errors.EngineUnavailable,
    "engine_unsuitable": errors.EngineUnsuitable,
    "reload_failed": errors.ReloadFailed,
    "store_unavailable": errors.StoreUnavailable,
    "schema_mismatch": errors.SchemaMismatch,
    "bad_checkpoint": errors.BadCheckpoint,
}
"""The proxy's error code → class, for errors whose class the status does not tell."""


def error_of(status: int, body: bytes, retry_after: str | None = None) -> errors.TurnwiseError:
    """Return the error for an answer, with the server's message."""
    detail = _detail(body)
    message = str(detail.get("message") or f"the proxy answered {status}: {body[:500].decode(errors='replace')!r}")
    if status == 429 and detail.get("code") != "token_budget_spent":
        return errors.Overloaded(message, retry_after_seconds=round(_seconds(retry_after) or 1))
    boundary = _ERROR_OF_CODE.get(str(detail.get("code")))
    if boundary is not None:
        return boundary(message)
    if status >= 500:
        return errors.ProxyUnavailable(message)
    kind = _ERROR_OF_STATUS.get(status, errors.InvalidRequest)
    return kind(message, param=detail.get("param"), code=detail.get("code"))


def _detail(body: bytes) -> Json:
    try:
        detail = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return {}
    return detail if isinstance(detail, dict) else {"message": detail}


@dataclasses.dataclass(slots=True)
class Attempts:
    """Counts the attempts of a call; after each failure it returns the pause before the next attempt, or raises."""

    limit: int
    api_key: str = ""
    """The key of the call, for the error of a missing one."""
    failed: int = 0

    def after_broken_connection(self, url: str, error: Exception) -> float:
        """Return the pause before the next attempt.

        Raises:
            ProxyUnavailable: it was the last attempt.
        """
        if self.failed >= self.limit:
            message = (
                f"cannot reach the proxy at {url!r} ({type(error).__name__}: {error}); start it with `turnwise up`"
            )
            raise errors.ProxyUnavailable(message) from error
        return self._pause(None)

    def after_answer(self, status: int, body: bytes, retry_after: str | None) -> float:
        """Return the pause before the next attempt.

        Raises:
            TurnwiseError: the answer is final, or it was the last attempt.
        """
        if status not in RETRIED_STATUSES or self.failed >= self.limit:
            if status == UNAUTHORIZED and self.api_key == API_KEY_WHEN_NONE:
                raise errors.Unauthorized(NO_KEY)
            raise error_of(status, body, retry_after)
        return self._pause(retry_after)

    def _pause(self, retry_after: str | None) -> float:
        pause = pause_seconds(self.failed, retry_after)
        self.failed += 1
        return pause
