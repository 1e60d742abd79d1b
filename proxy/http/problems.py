"""Maps the proxy's errors to HTTP statuses and OpenAI's error body."""

from __future__ import annotations

import orjson

from turnwise import errors
from turnwise.types import Json

STATUS: dict[type[errors.TurnwiseError], tuple[int, str, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_request"),
    errors.Unauthorized: (401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: (403, "permission_error", "forbidden"),
    errors.NotFound: (404, "not_found_error", "not_found"),
    errors.TooSlow: (408, "invalid_request_error", "request_timeout"),
    errors.Conflict: (409, "conflict_error", "conflict"),
    errors.TooLarge: (413, "invalid_request_error", "too_large"),
    errors.UnsupportedMediaType: (415, "invalid_request_error", "unsupported_media_type"),
    errors.Overloaded: (429, "rate_limit_error", "overloaded"),
    errors.BudgetSpent: (429, "insufficient_quota", "token_budget_spent"),
    errors.ClientLeft: (499, "client_error", "client_left"),
    errors.EngineReplyTooLong: (502, "engine_error", "engine_reply_too_long"),
    errors.EngineUnavailable: (503, "engine_error", "engine_unavailable"),
    errors.EngineUnsuitable: (503, "engine_error", "engine_unsuitable"),
    errors.ReloadFailed: (502, "engine_error", "reload_failed"),
    errors.BadCheckpoint: (422, "policy_error", "bad_checkpoint"),
    errors.FilesNotRead: (503, "policy_error", "files_not_read"),
    errors.ProxyUnavailable: (503, "server_error", "proxy_unavailable"),
    errors.SchemaMismatch: (503, "store_error", "schema_mismatch"),
    errors.LeaseLost: (409, "store_error", "lease_lost"),
    errors.StoreUnavailable: (503, "store_error", "store_unavailable"),
    errors.StoreError: (500, "store_error", "store_error"),
}
"""Class of error → HTTP status, OpenAI `type`, `code`; a subclass without an entry uses its base class's."""
RETRYABLE = frozenset({429, 503})
"""Statuses that carry `Retry-After`."""
UNEXPECTED = errors.TurnwiseError("the proxy failed to serve this request; its log has the traceback, retry")
"""Answers an exception that is not an error of ours."""


def lookup(error: errors.TurnwiseError) -> tuple[int, str, str]:
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500, "server_error", "internal_error"


def code_of(error: errors.TurnwiseError) -> str:
    """Return the code that an error is counted by: its answer's, or `engine_STATUS` for an engine's own answer."""
    if isinstance(error, errors.EngineRefused):
        return f"engine_{error.status}"
    return getattr(error, "code", None) or lookup(error)[2]


def answer(error: errors.TurnwiseError) -> tuple[int, bytes, dict[str, str]]:
    """Return the status, body and extra headers that answer an error."""
    if isinstance(error, errors.EngineRefused):
        return error.status, _passed_on(error), _retry_after(error.status, error)
    status, kind, _ = lookup(error)
    return (
        status,
        orjson.dumps(body(str(error), kind, code_of(error), getattr(error, "param", None))),
        _retry_after(status, error),
    )


def _retry_after(status: int, error: errors.TurnwiseError) -> dict[str, str]:
    """Return the headers that tell a client when to retry, or whether the SDKs' automatic retries help.

    The connection of a request that never becomes whole is of no further use.
    """
    seconds = getattr(error, "retry_after_seconds", 1)
    headers = {"retry-after": str(seconds)} if status in RETRYABLE and seconds is not None else {}
    if isinstance(error, errors.TooSlow):
        return {"connection": "close"}
    if isinstance(error, errors.BudgetSpent):
        return {**headers, "x-should-retry": "false"}
    return {**headers, "x-should-retry": "true"} if isinstance(error, errors.SessionDeleted) else headers


def _passed_on(error: errors.EngineRefused) -> bytes:
    """Return the engine's own error body; a body of another form is converted to OpenAI's error object."""
    try:
        if isinstance(orjson.loads(error.body).get("error"), dict):
            return error.body
    except (orjson.JSONDecodeError, AttributeError):
        pass
    return orjson.dumps(body(str(error), "engine_error", "engine_error"))


def body(message: str, kind: str, code: str | None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
