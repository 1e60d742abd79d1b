"""Act as agents: sessions, completions and rewards, over plain HTTP as in any language.

Turnwise is not imported: the check covers what the containers serve to any client.
"""

import json
import statistics
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compose.deadline import CheckError, wait_until

NUM_GROUPS = 4
GROUP_SIZE = 4
NUM_TURNS = 2
CALL_SECONDS = 120.0
UPDATE_SECONDS = 300.0

# The proxy is on loopback, so an HTTP proxy of the environment is ignored.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Played:
    rewards: list[float] = field(default_factory=list)
    version_before: int = 0
    version_after: int = 0

    @property
    def mean_reward(self) -> float:
        return statistics.fmean(self.rewards)


class Proxy:
    def __init__(self, base_url: str, key: str) -> None:
        self.base_url = base_url
        self._key = key

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET a path, or POST a body to it; return the decoded reply."""
        return ask(self.base_url + path, self._key, body)

    def active_version(self) -> int:
        active = [policy["version"] for policy in self.ask("/v1/policies")["data"] if policy["status"] == "active"]
        return max(active, default=0)


def ask(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    """Send one request.

    Raises:
        CheckError: the answer is not a success.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    try:
        with _OPENER.open(request, timeout=CALL_SECONDS) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise CheckError(f"{url} answered {error.code}: {error.read()[:500]!r}", "proxy") from error
    except OSError as error:
        raise CheckError(f"{url} did not answer: {error}", "proxy") from error


def play(proxy: Proxy, check_running: Callable[[], None]) -> Played:
    """Play from the first completion through rewards and an update to a completion with the new version.

    Args:
        proxy: the proxy to play against.
        check_running: called during the wait for an update; raises if a container has ended.
    """

    def newer_version() -> int | None:
        check_running()
        version = proxy.active_version()
        return version if version > played.version_before else None

    played = Played(version_before=proxy.active_version())
    model = proxy.ask("/v1/models")["data"][0]["id"]
    for number in range(NUM_GROUPS):
        group_id = f"check-{uuid.uuid4().hex}"
        played.rewards += [_play_session(proxy, model, number, run, group_id) for run in range(GROUP_SIZE)]
    print(f"{len(played.rewards)} sessions played, mean reward {played.mean_reward:.3f}", flush=True)
    played.version_after = wait_until(
        f"a version after {played.version_before} to be served",
        UPDATE_SECONDS,
        newer_version,
        service="trainer-cpu",
    )
    _check_new_version_is_sampled(proxy, model, played.version_after)
    return played


def _play_session(proxy: Proxy, model: str, task: int, run: int, group_id: str) -> float:
    """Play one session of a group; return its reward, the share of letters in the policy's replies."""
    opened = proxy.ask(
        "/v1/sessions", {"task_id": f"check-{task}", "group_id": group_id, "group_size": GROUP_SIZE, "run": run}
    )
    messages = [{"role": "user", "content": f"Say something about the number {task}."}]
    text = ""
    for _ in range(NUM_TURNS):
        call = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 1.0}
        reply = ask(f"{opened['base_url']}/chat/completions", opened["api_key"], call)["choices"][0]["message"]
        text += reply["content"] or ""
        messages += [{"role": "assistant", "content": reply["content"] or ""}, {"role": "user", "content": "Go on."}]
    reward = sum(character.isalpha() for character in text) / max(len(text), 1)
    proxy.ask("/v1/rewards", {"session_id": opened["session_id"], "value": reward})
    proxy.ask(f"/v1/sessions/{opened['session_id']}/end", {})
    return reward


def _check_new_version_is_sampled(proxy: Proxy, model: str, version: int) -> None:
    opened = proxy.ask("/v1/sessions", {"split": "eval"})
    call = {"model": model, "messages": [{"role": "user", "content": "Once more."}], "max_tokens": 8}
    ask(f"{opened['base_url']}/chat/completions", opened["api_key"], call)
    turn = proxy.ask(f"/v1/sessions/{opened['session_id']}/turns")["data"][0]
    if turn["policy_version_first"] < version:
        raise CheckError(
            f"a turn after the reload has version {turn['policy_version_first']!r}, not {version}", "proxy"
        )
