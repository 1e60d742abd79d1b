"""Every error that Turnwise raises on purpose. A class names the boundary that failed; none knows an HTTP code.

    TurnwiseError
    ├── ClientError            the caller's fault: the message says what to change
    │   ├── InvalidRequest     a body, parameter or id that cannot be served
    │   ├── Unauthorized       no key, or one that is unknown or revoked
    │   ├── Forbidden          a known key whose role does not reach this far
    │   ├── NotFound           no such session, turn, policy or route for this tenant
    │   ├── Conflict           the target's state does not allow it (a session that has ended, a changed replay)
    │   ├── TooLarge           over a limit of size, depth or count
    │   ├── UnsupportedMediaType  a body that is not JSON
    │   └── Overloaded         too much at once; try again after `retry_after_seconds`
    ├── EngineError            vLLM's side
    │   ├── EngineUnavailable  cannot be reached, or went away before its first byte
    │   ├── EngineRefused      answered with an error status; its body is passed on
    │   ├── EngineUnsuitable   reachable, but without what exact capture needs
    │   └── ReloadFailed       new weights were not taken; the last good version is served
    ├── ProxyUnavailable       the proxy cannot be reached by the SDK, or failed on its own side
    ├── RolloutFailed          a run of a workflow that failed on every attempt, or rollouts that cannot go on
    ├── GraderFailed           a reward source that gave no usable reward
    ├── StoreError             the database's side
    │   ├── StoreUnavailable   cannot be reached, is full, or is locked for too long
    │   ├── SchemaMismatch     the tables are not those of this release: run `turnwise db upgrade`
    │   └── LeaseLost          a stale fencing token: somebody else holds the lease now
    ├── PolicyError            a checkpoint's side
    │   ├── BadCheckpoint      incomplete, corrupt, or of another architecture
    │   └── BatchRefused       a batch that must not be trained on, with the gauge that says so
    ├── ChildFailed            a supervised process that does not stay up
    └── SettingsError          a configuration that cannot work
"""

from __future__ import annotations


class TurnwiseError(Exception):
    """The root of the tree: what Turnwise raises on purpose."""


class ClientError(TurnwiseError):
    """The caller's fault; the message says what to change."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The offending field of the request, in OpenAI's error body."""
        self.code = code
        """A stable word for programs, where the class alone does not say it."""


class InvalidRequest(ClientError):
    """A body, parameter or id that cannot be served."""


class Unauthorized(ClientError):
    """No key, or one that is unknown or revoked."""


class Forbidden(ClientError):
    """A known key whose role does not reach this far."""


class NotFound(ClientError):
    """No such session, turn, policy or route for this tenant."""


class Conflict(ClientError):
    """The target's state does not allow it."""


class TooLarge(ClientError):
    """Over a limit of size, depth or count."""


class UnsupportedMediaType(ClientError):
    """A body that is not JSON."""


class Overloaded(ClientError):
    """Too much at once."""

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """When a retry is worth it, seconds."""


class EngineError(TurnwiseError):
    """vLLM's side."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or went away before its first byte."""


class EngineRefused(EngineError):
    """The engine answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the engine answered {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        """HTTP status of the engine's answer."""
        self.body = body
        """The engine's own error body, passed on as it is."""


class EngineUnsuitable(EngineError):
    """The engine lacks what exact capture needs."""


class ReloadFailed(EngineError):
    """New weights were not taken; the last good version is served."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        """Whether a later attempt may succeed: the engine was busy, or short of memory for a moment."""


class ProxyUnavailable(TurnwiseError):
    """The proxy cannot be reached by the SDK, failed on its own side, or is stopping."""


class RolloutFailed(TurnwiseError):
    """A run of a workflow that failed on every attempt, or rollouts that cannot go on."""


class GraderFailed(TurnwiseError):
    """A reward source that gave no usable reward."""


class StoreError(TurnwiseError):
    """The database's side."""


class StoreUnavailable(StoreError):
    """The database cannot be reached, is full, or is locked for too long."""


class SchemaMismatch(StoreError):
    """The tables are not those of this release."""


class LeaseLost(StoreError):
    """A stale fencing token: somebody else holds the lease now."""


class PolicyError(TurnwiseError):
    """A checkpoint's side."""


class BadCheckpoint(PolicyError):
    """A checkpoint that is incomplete, corrupt, or of another architecture."""


class BatchRefused(PolicyError):
    """A batch that must not be trained on."""


class SettingsError(TurnwiseError):
    """A configuration that cannot work."""


class ChildFailed(TurnwiseError):
    """A supervised process that does not stay up; the message ends with the end of its log."""
