"""The blocks of README and docs that need nothing but a proxy are run, word for word, against a fake engine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.documented_commands import ROOT, Block, blocks
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import running_fake_engine

from turnwise.features.policies import publish_next
from turnwise.store import keys
from turnwise.store.database import Database
from turnwise.types import PolicyKind

RUNNABLE = {"sessions", "policies", "updates", "keys", "verify", "doctor", "export", "replay"}
"""Subcommands that need no more than a store, an engine and a proxy."""
CHAT = '{"model": "fake", "messages": [{"role": "user", "content": "Which city?"}]}'


def _is_runnable(block: Block) -> bool:
    commands = block.commands()
    return bool(commands) and all(
        words[0] == "curl" or (words[0] == "turnwise" and words[1] in RUNNABLE) for words in commands
    )


BLOCKS = [block for block in blocks("sh") if _is_runnable(block)]


@dataclass
class Site:
    directory: Path
    environment: dict[str, str]
    places: dict[str, str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A proxy without keys, four versions on disk, and a separate store with the same versions for the commands."""
    directory = tmp_path_factory.mktemp("docs")
    program = directory / "bin" / "turnwise"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m turnwise "$@"\n')
    program.chmod(0o755)
    (directory / ".turnwise-key").write_text("any")  # a proxy without keys takes each
    url = f"sqlite:///{directory}/commands.db"
    database = Database(url)
    database.upgrade()
    with database.write() as conn:
        for version in range(4):
            (directory / f"v{version}").mkdir()
            publish_next(conn, str(directory / f"v{version}"), PolicyKind.FULL, metrics={})
        key_id, _ = keys.create_key(conn, "default", keys.KeyRole.AGENT, "to be revoked")
    database.close()
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, f"sqlite:///{directory}/proxy.db", directory) as proxy,
    ):
        yield Site(
            directory,
            {
                **os.environ,
                "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
                "TURNWISE_PROXY_DATABASE": url,
                "TURNWISE_PROXY_ENGINE": json.dumps([engine.url]),
                "PROXY": proxy.url,
                "LANGFUSE_KEYS": "public:secret",
            },
            {
                "http://127.0.0.1:8100": proxy.url,
                "http://127.0.0.1:8000": engine.url,
                "KEY_ID": key_id,
                "{…}": CHAT,
                "curl ": "curl --fail-with-body --silent --show-error ",
            },
        )


@pytest.mark.parametrize("block", [each for each in blocks("python") if each.page.name == "client.md"], ids=str)
def test_the_client_examples_run(block, site):
    program = block.text.replace("http://127.0.0.1:8100", site.places["http://127.0.0.1:8100"])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        text=True,
        capture_output=True,
        timeout=WAIT_SECONDS,
        check=False,
        cwd=site.directory,
        env=site.environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout, "each example prints what it read"


def test_there_are_blocks_to_run():
    """A change of the pages' format must not leave this test without blocks."""
    assert {str(block.page.relative_to(ROOT)) for block in BLOCKS} >= {
        "README.md",
        "docs/exactness.md",
        "docs/exchange.md",
        "docs/operations.md",
        "docs/rewards.md",
    }


def _is_in_every_run(block: Block) -> bool:
    return block.page.name == "README.md" or block == next(each for each in BLOCKS if each.page == block.page)


@pytest.mark.parametrize(
    "block",
    [pytest.param(each, marks=() if _is_in_every_run(each) else pytest.mark.slow) for each in BLOCKS],
    ids=str,
)
def test_the_block_runs(block, site):
    text = block.text
    for placeholder, actual in site.places.items():
        text = text.replace(placeholder, actual)
    done = subprocess.run(
        ["bash", "-euo", "pipefail"],
        input=text,
        text=True,
        capture_output=True,
        timeout=WAIT_SECONDS,
        check=False,
        cwd=site.directory,
        env=site.environment,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
