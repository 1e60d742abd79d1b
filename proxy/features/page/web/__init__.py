"""`GET /`: the page for people: its files, and which scripts and addresses a browser allows it.

The page holds no data. Its files are the same for everyone; its script reads the API with the key that the viewer
enters, so it shows what that key may read. Its policy allows scripts, styles and requests of this origin only.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class PageFiles(StaticFiles):
    """The page's scripts and styles, and the licences of its parts."""

    def __init__(self) -> None:
        super().__init__(packages=[("proxy.features.page", "web")])

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response

    async def index(self, request: Request) -> Response:
        return await self.get_response("index.html", request.scope)
