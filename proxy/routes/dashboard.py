"""`GET /`: a page for people, over the JSON routes that every client has.

The page holds no data. Its files are the same for everyone; its script reads the API with the key that the viewer
enters, so it shows what that key may read. Its policy allows scripts, styles and requests of this origin only.
"""

from __future__ import annotations

import functools
import importlib.resources

from fastapi import APIRouter, Response

from turnwise.errors import NotFound

router = APIRouter()

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def dashboard() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/web/{name:path}", include_in_schema=False)
async def web_file(name: str) -> Response:
    """Return a script or a style of the page, or the licence of a part of it."""
    return _file(name)


def _file(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        raise NotFound(f"the page has no file {name!r:.80}")
    return Response(content, headers=HEADERS, media_type=MEDIA_TYPES[name.rpartition(".")[2]])


@functools.cache
def _files() -> dict[str, bytes]:
    """Return the page's files by their paths."""
    web = importlib.resources.files("proxy.routes.web")
    found = {file.name: file for file in web.iterdir()}
    found |= {f"vendor/{file.name}": file for file in web.joinpath("vendor").iterdir()}
    return {name: file.read_bytes() for name, file in found.items() if name.rpartition(".")[2] in MEDIA_TYPES}
