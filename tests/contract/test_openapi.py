"""The OpenAPI document matches the proxy: answers to requests that its schemas allow fit them, and none is a 5xx.

Schemathesis makes the requests, in all of its phases. A schema cannot express that a directory holds a checkpoint or
that an id exists, so requests that it allows may be refused.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.migrated import migrated, writing
from support.proxies import RunningProxy, running_proxy
from turnwise_fake_engine import running_fake_engine

from turnwise.store import keys

REVOKE = "/v1/keys/{key_id}/revoke"
EXAMPLES = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 100))]
"""Random requests to each operation, besides those of the phases `examples` and `coverage`, which are always made; with
0 these are made for all operations but the calls, whose bad bodies `tests/contract/test_bad_input.py` has.
"""
ENGINE_VALIDATES = """\
[[operations]]
include-tag = "calls"
checks.negative_data_rejection.enabled = false
"""
"""The engine validates the body of a call, so the proxy accepts what the schema does not allow."""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[tuple[RunningProxy, str]]:
    directory = tmp_path_factory.mktemp("openapi")
    url = f"sqlite:///{directory}/turnwise.db"
    with writing(migrated(url)) as connection:
        _, key = keys.create_key(connection, "default", keys.KeyRole.ADMIN, "me")
    with running_fake_engine() as engine, running_proxy(engine.url, url, directory) as proxy:
        yield proxy, key


def schemathesis(proxy: RunningProxy, key: str, directory: Path, examples: int, *arguments: str) -> None:
    """Run schemathesis; a failure shows what it found."""
    (directory / "schemathesis.toml").write_text(ENGINE_VALIDATES)
    phases = "examples,coverage,fuzzing,stateful" if examples else "examples,coverage"
    argv = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{proxy.url}/openapi.json"),
        *("-H", f"Authorization: Bearer {key}", "--phases", phases, "-n", str(max(1, examples))),
        *("--exclude-checks", "positive_data_acceptance", "--generation-deterministic", "--continue-on-failure"),
        *("--no-color", "--warnings", "off", *arguments),
    ]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    print(done.stdout[-2000:])


@pytest.mark.parametrize("examples", EXAMPLES)
def test_answers_fit_their_schemas(keyed, tmp_path, examples):
    # A deleted tenant, or a revoked key that the list of keys has shown, would refuse all further requests.
    # The stream of events has no end.
    exclude = [word for path in ("/v1/tenant", REVOKE, "/v1/events") for word in ("--exclude-path", path)]
    schemathesis(*keyed, tmp_path, examples, *exclude, *(() if examples else ("--exclude-tag", "calls")))


@pytest.mark.slow
@pytest.mark.parametrize("examples", [2, 100])
def test_the_answers_of_calls_and_of_revoking_fit_their_schemas(keyed, tmp_path, examples):
    """No request of this run lists keys, so it cannot revoke an existing one."""
    schemathesis(*keyed, tmp_path, examples, "--include-tag", "calls", "--include-path", REVOKE)
