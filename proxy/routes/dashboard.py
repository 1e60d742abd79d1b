"""`GET /`: a page for people, over the JSON routes that everybody else has.

One decision: the page itself knows nothing. It is the same few kilobytes for everyone, asks the API with the key that
its viewer typed in, and so shows what that key may see. Its policy lets nothing run or load but itself.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

from fastapi import APIRouter, Response

router = APIRouter()


@router.get("/", include_in_schema=False)
async def dashboard() -> Response:
    """Give the page."""
    html, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html")


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page and the policy under which it runs: its own script and style, by their digests, and no other."""
    html = importlib.resources.files("proxy.routes").joinpath("dashboard.html").read_text("utf-8")
    sources = {tag: _source(html, tag) for tag in ("script", "style")}
    return html, (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _source(html: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
