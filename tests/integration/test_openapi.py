"""The OpenAPI document is true: what its schemas allow is answered as they say, and nothing is answered with a 5xx.

Schemathesis makes the requests, in all of its phases. What a schema cannot say, such as that a directory holds a
checkpoint or that an id is known, is refused all the same, so requests that a schema allows may be refused; and of a
call's body the engine is the judge, so what the schema of a call does not allow may be accepted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.proxies import RunningProxy, running_proxy

from turnwise.fake_engine import running_fake_engine
from turnwise.processes.stack import command

EXAMPLES = [pytest.param(3), pytest.param(100, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[tuple[RunningProxy, str]]:
    """A proxy and an admin's key to it."""
    directory = tmp_path_factory.mktemp("openapi")
    url = f"sqlite:///{directory}/turnwise.db"
    for arguments in (["db", "upgrade"], ["keys", "create", "--role", "admin"]):
        argv = command(*arguments, "--database", url, "--json")
        printed = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    with running_fake_engine() as engine, running_proxy(engine.url, url, directory) as proxy:
        yield proxy, printed["key"]


def schemathesis(proxy: RunningProxy, key: str, directory: Path, *arguments: str) -> None:
    """Run schemathesis; a failure shows what it found."""
    argv = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{proxy.url}/openapi.json"),
        *("-H", f"Authorization: Bearer {key}", "--phases", "examples,coverage,fuzzing,stateful"),
        *("--generation-deterministic", "--continue-on-failure", "--no-color", "--warnings", "off", *arguments),
    ]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    print(done.stdout[-400:])


@pytest.mark.parametrize("examples", EXAMPLES)
def test_the_control_plane_answers_as_its_schemas_say(keyed, tmp_path, examples):
    # A deleted tenant has no key to go on with.
    exclude = ("--exclude-tag", "calls", "--exclude-path", "/v1/tenant")
    exclude += ("--exclude-checks", "positive_data_acceptance")
    schemathesis(*keyed, tmp_path, "-n", str(examples), *exclude)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_calls_answer_as_their_schemas_say(keyed, tmp_path, examples):
    checks = ("--exclude-checks", "positive_data_acceptance,negative_data_rejection")
    schemathesis(*keyed, tmp_path, "-n", str(examples), "--include-tag", "calls", *checks)
