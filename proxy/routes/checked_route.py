"""Routes of the control plane whose requests are checked as model calls are: size, nesting, NaN, lone surrogates.

The caller is authenticated before anything of the request is read. The body is read and decoded by the data plane's
functions before FastAPI sees it, so both planes reject the same bodies with the same messages. Unknown query parameters
are rejected like unknown fields.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field

from proxy.http.asgi import cancelled_when_client_leaves, check_limits, read_body
from proxy.http.connections import LEFT
from proxy.routes.serialise import caller
from proxy.services import services_of
from proxy.settings import ProxySettings
from turnwise.json_text import loads
from turnwise.types import MAX_REWARD

TEXT = r"^[^\x00-\x1f\x7f]*$"
"""Text without control characters; PostgreSQL cannot store NUL."""
Id = Annotated[str, Field(min_length=1, max_length=256, pattern=TEXT)]
"""An id that a client chose."""
LabelName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^/\x00-\x1f\x7f]+$")]
"""A label: one segment of a path."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite JSON number; numeric strings and booleans are rejected."""
RewardValue = Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
"""The value of one reward line."""
Count = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
"""A JSON integer within the range of the store's columns."""
Text = Annotated[str, Field(max_length=1000, pattern=r"^[^\x00]*$")]
"""Free text of a client."""


class Body(BaseModel):
    """Base of all request bodies: a field that the model does not name is an error."""

    model_config = ConfigDict(extra="forbid")


def _check_parameters(request: Request, known: list[str]) -> None:
    """Reject query parameters that the route does not declare, because a misspelt filter would return everything.

    Raises:
        RequestValidationError: the first unknown parameter, with a similar name as a hint.
    """
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            near = near or [each for each in known if each.startswith(name)][:1]
            hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(known) or 'none'}"
            raise RequestValidationError(
                [{"type": "unknown_parameter", "loc": ("query", name), "msg": f"no such query parameter; {hint}"}]
            )


MAX_BYTES = 2**20
MAX_STRINGS = 8_192
"""Bounds of a control-plane body, which is decoded on the event loop."""


class CheckedRequest(Request):
    """A request with strict decoding of its body."""

    decoded: Any = None
    """The body, where the route has decoded it already."""

    async def json(self) -> Any:
        """Return the decoded body; FastAPI rejects a body that cannot be decoded."""
        return loads(await self.body()) if self.decoded is None else self.decoded


class CheckedRoute(APIRoute):
    """A route that reads its body under the proxy's limits."""

    def limits(self, settings: ProxySettings) -> tuple[int, dict[str, int]]:
        """Return the limit of the body's bytes, and those of its JSON."""
        limits = settings.json_limits
        return min(settings.max_body_bytes, MAX_BYTES), limits | {
            "max_strings": min(limits["max_strings"], MAX_STRINGS)
        }

    async def authorise(self, request: Request) -> None:
        """Check that the caller may use the route.

        Raises:
            Unauthorized: no key, or one that is unknown, expired or revoked.
            Forbidden: the key's role or session does not allow it.
        """
        await caller(request)

    async def decode(self, raw: bytes) -> Any:  # noqa: ARG002
        """Return a body that the route decodes itself; None leaves it to FastAPI."""
        return None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, preceded by the checks of the caller and of the limits."""
        handle = super().get_route_handler()
        declared = itertools.chain(self.dependant.query_params, *(d.query_params for d in self.dependant.dependencies))
        known = sorted(parameter.alias for parameter in declared)

        async def handle_checked(request: Request) -> Response:
            await self.authorise(request)
            _check_parameters(request, known)
            services = services_of(request)
            checked = CheckedRequest(request.scope, request.receive)
            if request.method not in ("POST", "PUT"):
                return await handle(checked)
            with contextlib.ExitStack() as held:
                with cancelled_when_client_leaves(request.scope["extensions"][LEFT]):
                    held.enter_context(
                        await services.bodies.reserve(await caller(request), dict(request.scope["headers"]))
                    )
                    max_bytes, limits = self.limits(services.settings)
                    raw = await read_body(request.receive, max_bytes=max_bytes)
                    await check_limits(raw, **limits)
                checked._body = raw  # noqa: SLF001  Starlette's cache of the body
                checked.decoded = await self.decode(raw)
                return await handle(checked)

        return handle_checked
