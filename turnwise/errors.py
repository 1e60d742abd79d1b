"""All errors that Turnwise raises on purpose. A class names the part that failed; no class has an HTTP status.

    TurnwiseError
    ├── ClientError            an error of the caller: the message says what to change
    │   ├── InvalidRequest     a body, parameter or id that cannot be served
    │   │   ├── PromptTooLong  a prompt that cannot fit into the model's context
    │   │   ├── BadLine        a line of a file that cannot be imported
    │   │   └── SkippedLine    a line that holds no conversation, such as a failed call of a log
    │   ├── Unauthorized       no key, or one that is unknown or revoked
    │   ├── Forbidden          a known key whose role does not allow the request
    │   ├── NotFound           no such session, turn, policy or route for this tenant
    │   │   └── SessionDeleted  the call's session was deleted before its reply could be stored; a retry gets a new one
    │   ├── Conflict           the target's state does not allow the request (an ended session, a changed replay)
    │   ├── TooLarge           over a limit of size, depth or count
    │   ├── TooSlow            a request whose body arrives too slowly
    │   ├── UnsupportedMediaType  a body that is not JSON, or is compressed
    │   ├── Overloaded         too many requests; retry after `retry_after_seconds`
    │   ├── BudgetSpent        a token budget is spent; an early retry fails again
    │   └── ClientLeft         closed its connection before it had its reply; no client sees this error
    ├── EngineError            an error of the engine (vLLM)
    │   ├── EngineUnavailable  cannot be reached, or disconnected before its first byte
    │   │   └── EngineReplyTooLong  sent a reply over the limit of bytes, and was cut off
    │   ├── EngineRefused      answered with an error status; its body is passed on
    │   ├── EngineUnsuitable   reachable, but without a feature that exact capture requires
    │   └── ReloadFailed       new weights were not loaded; the last good version is served
    ├── ProxyUnavailable       the SDK cannot reach the proxy, or the proxy failed
    ├── RolloutFailed          a run of a workflow that failed on every attempt, or rollouts that cannot continue
    ├── GraderFailed           a reward source that gave no usable reward
    ├── ExportFailed           an endpoint that does not take what is exported
    ├── StoreError             an error of the database
    │   ├── StoreUnavailable   cannot be reached, is full, or is locked for too long
    │   ├── SchemaMismatch     the tables are not those of this release: run `turnwise db upgrade`
    │   └── LeaseLost          a stale fencing token: another process holds the lease
    ├── PolicyError            an error of a checkpoint or batch
    │   ├── BadCheckpoint      incomplete, corrupt, or of another architecture
    │   ├── NotWritten         a version or state cannot be written, as on a full disk; a later start may
    │   ├── FilesNotRead       a version's files are still being read, or their file system does not answer
    │   ├── BatchRefused       a batch that must not be trained, with the gauge that shows it
    │   └── EngineDisagrees    nearly all groups have other logprobs than the trainer computes
    ├── ChildFailed            a supervised process that does not keep running, with the end of its log
    └── SettingsError          a configuration that cannot work
"""

from __future__ import annotations

from typing import Any

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What Python raises where a value from outside has another shape than the code that reads it expects."""


class TurnwiseError(Exception): ...


class ClientError(TurnwiseError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The offending field of the request, in OpenAI's error body."""
        self.code = code
        """A stable error code for programs, if it is more specific than the class."""


class InvalidRequest(ClientError): ...


class PromptTooLong(InvalidRequest):
    def __init__(self, message: str, *, num_tokens: int) -> None:
        super().__init__(message, param="messages", code="context_length_exceeded")
        self.num_tokens = num_tokens
        """Least number of tokens of the messages that are too long, which limits count."""


class BadLine(InvalidRequest): ...
class SkippedLine(InvalidRequest): ...
class Unauthorized(ClientError): ...
class Forbidden(ClientError): ...
class NotFound(ClientError): ...
class SessionDeleted(NotFound): ...
class Conflict(ClientError): ...
class TooLarge(ClientError): ...
class TooSlow(ClientError): ...
class UnsupportedMediaType(ClientError): ...


class Overloaded(ClientError):
    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class BudgetSpent(ClientError):
    def __init__(self, message: str, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """Seconds until the budget is renewed, at least in part; None for a budget that is never renewed."""


class ClientLeft(ClientError):
    def __init__(self) -> None:
        super().__init__("the client closed its connection before it had its reply")


class EngineError(TurnwiseError): ...
class EngineUnavailable(EngineError): ...
class EngineReplyTooLong(EngineUnavailable): ...


class EngineRefused(EngineError):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the engine answered {status}: {body[:500].decode(errors='replace')}")
        self.status = status
        self.body = body

    @property
    def is_transient(self) -> bool:
        return self.status == 429 or self.status >= 500


class EngineUnsuitable(EngineError): ...


class ReloadFailed(EngineError):
    def __init__(self, message: str, *, is_transient: bool = False, evidence: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        """Whether a later attempt may succeed: the engine was busy, or temporarily out of memory."""
        self.evidence = evidence or {}


class ProxyUnavailable(TurnwiseError): ...
class RolloutFailed(TurnwiseError): ...
class GraderFailed(TurnwiseError): ...
class ExportFailed(TurnwiseError): ...
class StoreError(TurnwiseError): ...


class StoreUnavailable(StoreError):
    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent
        """Whether a repetition fails in the same way: the login is refused, the file is damaged or read-only, or a
        statement takes longer than the database allows."""


class SchemaMismatch(StoreError): ...
class LeaseLost(StoreError): ...
class PolicyError(TurnwiseError): ...
class BadCheckpoint(PolicyError): ...
class NotWritten(PolicyError): ...
class FilesNotRead(PolicyError): ...
class BatchRefused(PolicyError): ...
class EngineDisagrees(PolicyError): ...
class SettingsError(TurnwiseError): ...
class ChildFailed(TurnwiseError): ...
