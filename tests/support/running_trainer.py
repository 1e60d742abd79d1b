"""A trainer as a process of its own, which publishes versions of the tests' small model."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import pytest
from support.proxies import RunningProxy
from support.servers import end_group
from support.waiting import WAIT_SECONDS

from turnwise.client import Client
from turnwise.client.wire import SessionFields
from turnwise.processes.stack import command

GROUPS = 2
GROUP_SIZE = 4


@contextlib.contextmanager
def running_trainer(
    proxy: RunningProxy, model_dir: Path, directory: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--database", proxy.database_url, "--model", str(model_dir), "--policies-dir", str(directory / "policies")]
    flags += ["--groups-per-batch", str(GROUPS), "--num-threads", "1", "--no-progress"]
    # The small model is hardly warmed up; what is tested is the loop, so a step must change something.
    flags += ["--learning-rate", "0.01", "--max-staleness", "100", *more]
    with (directory / "trainer.log").open("ab") as log:
        process = subprocess.Popen(command("train", *flags), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        end_group(process)


def play_group(client: Client, number: int, **fields: Unpack[SessionFields]) -> None:
    """Play one group with rewards that differ, so that there is something to learn; `fields` are of its sessions."""
    for run in range(GROUP_SIZE):
        session = client.create_session(
            session_id=f"g{number}-{run}",
            task_id=f"task-{number}",
            run=run,
            group_id=f"g{number}",
            group_size=GROUP_SIZE,
            **fields,
        )
        reply = session.openai().chat.completions.create(
            model="small", messages=[{"role": "user", "content": "Hello."}], max_completion_tokens=8, temperature=1.0
        )
        assert reply.choices[0].finish_reason in {"stop", "length"}
        session.reward(float(run % 2))
        session.end()


def wait_for_version(client: Client, version: int, trainer_log: Path) -> dict:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for policy in client.policies():
            assert policy["status"] != "failed", policy
            if policy["version"] == version and policy["status"] == "active":
                return policy
        time.sleep(0.1)
    pytest.fail(f"version {version} did not become active; the trainer said:\n{trainer_log.read_text()[-3000:]}")
