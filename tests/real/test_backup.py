"""A backup of PostgreSQL as docs/operations.md describes it, made while agents run, and restored."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import httpx2
import pytest
from chaos.agents import playing
from support.commands import run_turnwise
from support.private_postgres import PrivatePostgres, binary
from support.proxies import running_proxy
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.types import Outcome

DOCUMENT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
HELLO = {"role": "user", "content": "Hello."}


def run_documented(program: str, server: PrivatePostgres, directory: Path, names: dict[str, str]) -> None:
    """Run the documented command of a program, with this server's databases in place of the documented ones."""
    found = re.search(rf"^{program} .*?(?=$|  +#)", DOCUMENT, re.MULTILINE)
    assert found is not None, f"docs/operations.md has no command of {program}"
    path = binary(program)
    if path is None:
        pytest.skip(f"install PostgreSQL's clients ({program}) to run this")
    words = [names.get(word, word) for word in shlex.split(found[0])[1:]]
    environment = {**os.environ, "PGHOST": str(server.directory), "PGUSER": "turnwise"}
    done = subprocess.run([path, *words], cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.postgres
def test_a_documented_backup_that_is_made_under_load_restores_every_turn_from_before(postgres_server, tmp_path):
    name = postgres_server.create_database()
    copy = f"{name}_restored"
    with (
        running_fake_engine(Script(pace_seconds=0.002)) as engine,
        running_proxy(engine.url, postgres_server.url(name), tmp_path) as proxy,
        playing(proxy.url, 4) as agents,
    ):
        first = httpx2.post(proxy.session_v1("kept") + "/chat/completions", json={"model": "fake", "messages": [HELLO]})
        agents.go()
        agents.wait_for(8)
        before = {view.turn.turn_id for view in proxy.turns()}
        run_documented("pg_dump", postgres_server, tmp_path, {"turnwise": name})
        agents.wait_for(8)
        agents.finish()
        after = {view.turn.turn_id for view in proxy.turns()}
    run_documented("createdb", postgres_server, tmp_path, {"restored": copy})
    run_documented("pg_restore", postgres_server, tmp_path, {"restored": copy})
    try:
        verified = run_turnwise("verify", "--database", postgres_server.url(copy))
        assert verified.returncode == 0, verified.stdout + verified.stderr
        with (
            running_fake_engine() as engine,
            running_proxy(engine.url, postgres_server.url(copy), tmp_path) as restored,
        ):
            turns = {view.turn.turn_id for view in restored.turns()}
            assert before <= turns < after
            messages = [HELLO, first.json()["choices"][0]["message"], HELLO]
            url = restored.session_v1("kept") + "/chat/completions"
            httpx2.post(url, json={"model": "fake", "messages": messages}).raise_for_status()
            earlier, later = (view.turn for view in restored.turns("kept"))
    finally:
        for each in (copy, name):
            postgres_server.drop_database(each)
    assert (later.parent_turn_id, later.outcome) == (earlier.turn_id, Outcome.EXACT)
