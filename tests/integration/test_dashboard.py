"""The page at `/`: one file for everyone, which brings no data, loads nothing, and runs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx2
import pytest
from support.proxies import StartProxy

from turnwise.fake_engine import RunningFakeEngine
from turnwise.store import keys
from turnwise.store.database import Database

PUBLIC = {"readyz"}


@pytest.fixture
def http(fake_engine: RunningFakeEngine, start_proxy: StartProxy, tmp_path):
    """A client, without a key, of a proxy that wants one."""
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(url)
    database.upgrade()
    with database.write() as connection:
        keys.create_key(connection, "default", keys.Role.ADMIN, "me")
    database.close()
    with httpx2.Client(base_url=start_proxy(fake_engine.url, database_url=url).url) as client:
        yield client


def test_the_page_needs_no_key_and_what_it_asks_for_does(http: httpx2.Client):
    """Every route that its script names is there, and refuses a stranger."""
    page = http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    asked = set(re.findall(r'ask\(["`]([^"`?$]+)', page.text)) | set(re.findall(r"path = `([^`$]+)\$", page.text))
    assert asked == {"readyz", "v1/policies", "v1/counts", "metrics", "v1/sessions", "v1/sessions/"}
    statuses = {path: http.get(f"/{path}{'x' if path.endswith('/') else ''}").status_code for path in asked}
    assert statuses == {path: 200 if path in PUBLIC else 401 for path in asked}


def test_nothing_runs_or_loads_but_the_page_itself(http: httpx2.Client):
    """Its own script and style by their digests; no address of elsewhere, and no way from text to markup."""
    page = http.get("/")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"""https?:|["'(]//|innerHTML|outerHTML|insertAdjacent|document\.write|\son\w+=""", page.text)
