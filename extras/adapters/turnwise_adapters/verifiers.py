"""A finished `vf-eval` run of a verifiers environment as rewarded groups.

verifiers sends each rollout's trace id as `X-Session-ID`, so a run against the proxy is captured without any change: a
trace is a session. This command reads the run's `traces.jsonl`, makes the rollouts of a task a group, and gives each
session its trace's rewards, weighted as the environment weighs them.

    vf-eval my-env --client.base-url http://127.0.0.1:8100/v1 --num-rollouts 8 --run.dir run-1
    python -m turnwise_adapters.verifiers outputs/run-1/traces.jsonl --group-size 8
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from turnwise.client import Client
from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.errors import InvalidRequest, NotFound
from turnwise.types import Json

SOURCE = "verifiers"


def traces(file: Path) -> Iterator[Json]:
    """Yield the traces of a run that its environment lets train.

    Raises:
        InvalidRequest: a line is not an episode of verifiers.
    """
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)["traces"]
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequest(
                    f"line {number} of {str(file)!r} is not an episode of verifiers: {error}"
                ) from error
            yield from (trace for trace in found if (trace.get("agent") or {}).get("trainable", True))


def rewards_of(trace: Json) -> dict[str, float]:
    """Return a trace's rewards by name: score × weight; a reward that was not computed is left out."""
    found: dict[str, Any] = trace.get("rewards") or {}
    return {
        name: float(reward["score"]) * float(reward.get("weight", 1.0))
        for name, reward in found.items()
        if reward is not None
    }


def reward_run(client: Client, file: Path, group_size: int | None) -> Json:
    """Give the sessions of a run their rewards and end them; return how many, and the traces without calls.

    Args:
        client: The proxy.
        file: The run's `traces.jsonl`.
        group_size: Rollouts that complete a group; by default those that the file has of the task.
    """
    by_task: dict[str, list[Json]] = collections.defaultdict(list)
    for trace in traces(file):
        task = trace["task"]
        by_task[task.get("key") or task.get("hash") or json.dumps(task["data"], sort_keys=True)].append(trace)
    run = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    counts = {"sessions": 0, "traces_without_calls": 0, "traces_without_rewards": 0}
    for key, rollouts in by_task.items():
        group_id = f"verifiers-{run}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        for number, trace in enumerate(rollouts):
            name = trace["task"]["data"].get("name")
            try:
                client.session(trace["id"])
            except NotFound:
                counts["traces_without_calls"] += 1
                continue
            client.create_session(
                session_id=trace["id"],
                task_id=str(name or key),
                run=number,
                group_id=group_id,
                group_size=group_size or len(rollouts),
                metadata={"verifiers": {"stop_condition": trace.get("stop_condition"), "info": trace.get("info")}},
            )
            _finish(client, trace, counts)
    return counts


def _finish(client: Client, trace: Json, counts: dict[str, int]) -> None:
    session_id, rewards = trace["id"], rewards_of(trace)
    if rewards:
        lines = [{"session_id": session_id, "name": n, "value": v, "source": SOURCE} for n, v in rewards.items()]
        client.rewards(lines, idempotency_key=f"verifiers-{session_id}")
    else:
        counts["traces_without_rewards"] += 1
    client.end_session(session_id, reason=trace.get("stop_condition"))
    counts["sessions"] += 1


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--proxy", default=DEFAULT_BASE_URL, show_default=True, help="The proxy that the run called.")
@click.option("--api-key", envvar="TURNWISE_API_KEY", help="A key that may give rewards.")
@click.option("--group-size", type=click.IntRange(min=1), help="Rollouts of a group [default: those of the file].")
def main(file: Path, proxy: str, api_key: str | None, group_size: int | None) -> None:
    """Reward the sessions of a `vf-eval` run."""
    with Client(proxy, api_key) as client:
        click.echo(json.dumps(reward_run(client, file, group_size)))


if __name__ == "__main__":
    main()
