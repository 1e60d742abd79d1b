"""Calls of a proxy's or an engine's control routes: publish policies, read their status, read metrics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families
from support.migrated import writing
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.store import versions
from turnwise.types import PolicyVersion

if TYPE_CHECKING:
    from support.proxies import RunningProxy


def ask(
    url: str, path: str, body: dict | None = None, *, key: str = "", headers: Mapping[str, str] | None = None
) -> dict:
    """GET a path, or POST a body to it; return the decoded reply, or nothing where the reply is no JSON object.

    Raises:
        urllib.error.HTTPError: the reply is an error.
    """
    data = None if body is None else json.dumps(body).encode()
    authorization = {"authorization": f"Bearer {key}"} if key else {}
    sent = {"content-type": "application/json", **authorization, **(headers or {})}
    request = urllib.request.Request(url + path, data, sent)
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        raw = response.read()
    return json.loads(raw) if raw.startswith(b"{") else {}


def publish(proxy: RunningProxy, path: Path, **fields: object) -> int:
    """Publish a directory as a policy; return its version."""
    return ask(proxy.url, "/v1/policies", {"path": str(path), **fields})["version"]


def publish_in_store(proxy: RunningProxy, version: int, path: Path) -> None:
    with writing(proxy.database_url) as connection:
        versions.publish_version(connection, PolicyVersion(version=version, path=str(path)))


def policy(proxy: RunningProxy, version: int) -> dict:
    return next(each for each in ask(proxy.url, "/v1/policies")["data"] if each["version"] == version)


def wait_for_status(proxy: RunningProxy, version: int, status: str = "active") -> dict:
    """Wait until a version has a status; return the version."""
    wait_until(lambda: policy(proxy, version)["status"] == status, f"version {version} is {status}")
    return policy(proxy, version)


def versions_of_engines(proxy: RunningProxy) -> dict[str, int]:
    engines = ask(proxy.url, "/readyz")["engines"]
    return {engine["url"]: engine["policy_version"] for engine in engines if engine["ready"]}


def metric(proxy: RunningProxy, sample: str, *, admin_key: str = "", **labels: str) -> float:
    return metric_at(proxy.url, sample, admin_key=admin_key, **labels)


def metric_at(url: str, sample: str, *, admin_key: str = "", **labels: str) -> float:
    """Return the sum of a metric's samples at a proxy's or an engine's address."""
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(
        each.value
        for family in families
        for each in family.samples
        if each.name == sample and labels.items() <= each.labels.items()
    )
