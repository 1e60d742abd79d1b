"""The ids of the running request: log lines and the request to the engine take them from here.

They are a context variable, so that no function has to pass them on. The format is W3C's trace context.
"""

from __future__ import annotations

import contextvars
import random
import re
from typing import Any, NamedTuple

SAMPLED = "01"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestContext(NamedTuple):
    """The ids of one request."""

    request_id: str
    trace_id: str
    parent_id: str | None
    """The caller's span, 16 hex digits; None without a caller that traces."""
    span_id: str
    flags: str = SAMPLED
    trace: Any = None
    """The request's spans, which a feature makes (`proxy.features.tracing.spans.RequestTrace`); None without them."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


current_request: contextvars.ContextVar[RequestContext | None] = contextvars.ContextVar("current_request", default=None)
"""The request that the running task serves; None outside of requests."""


def make_context(request_id: str, traceparent: str) -> RequestContext:
    """Return the context of a new request from its headers; a missing or malformed header is replaced."""
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    is_valid = match is not None and set(match[1]) != {"0"} and set(match[2]) != {"0"}
    given = bool(request_id) and _REQUEST_ID.fullmatch(request_id) is not None
    noise = random_hex(80)
    return RequestContext(
        request_id=request_id if given else noise[:32],
        trace_id=match[1] if match is not None and is_valid else noise[32:64],
        parent_id=match[2] if match is not None and is_valid else None,
        span_id=noise[64:80],
        flags=match[3] if match is not None and is_valid else SAMPLED,
    )


def random_hex(num_digits: int) -> str:
    """Return random hex digits for an id, which is no secret: this takes no system call."""
    return f"{random.getrandbits(4 * num_digits):0{num_digits}x}"
