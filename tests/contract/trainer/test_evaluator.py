"""Evaluations that do not end as they should: by a stop, by the time limit, or by an outage of the database."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, sampled_by
from support.proxies import wait_until_gone
from support.waiting import WAIT_SECONDS, wait_until

from trainer.claims.ledger import Ledger
from trainer.features import Settings
from trainer.features.evaluation import Evaluator
from turnwise.errors import StoreUnavailable
from turnwise.store import serving, versions
from turnwise.store.database import Database
from turnwise.types import Json, PolicyVersion, Split

PLAYS_FOR_EVER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""
"""A command whose work is done by another process, as with `turnwise run`."""
CAUSES_AN_OUTAGE_OF_VERSION_5 = """
import os, pathlib, sys
if os.environ["TURNWISE_POLICY_VERSION"] == "5":
    pathlib.Path(sys.argv[1]).touch()
"""


class InterruptedDatabase(Database):
    outage: Path

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        if self.outage.exists():
            raise StoreUnavailable("the database is down")
        with super().read() as connection:
            yield connection


def publish(database: Database, *numbers: int) -> None:
    """Publish versions that no engine serves, so that an evaluation does not wait for them."""
    with database.write() as connection:
        for version in numbers:
            versions.publish_version(connection, PolicyVersion(version=version, path=f"v{version}"))
            serving.fail_version(connection, version, "there is no engine")


@pytest.mark.parametrize("ended_by", ["stop", "time limit"])
def test_a_partial_evaluation_is_not_stored_as_the_result_of_its_version_and_leaves_no_process_behind(
    ledger, tmp_path, caplog, ended_by
):
    """A mean over few sessions is often the highest one, and `keep_best` would keep its version."""
    publish(ledger, 5)
    pid_file = tmp_path / "pid"
    settings = Settings(evaluation_command=(sys.executable, "-c", PLAYS_FOR_EVER, str(pid_file)))
    held = Ledger(ledger, settings)
    evaluation = Evaluator(held, settings)
    found: list[Json] = []
    playing = threading.Thread(target=lambda: found.append(evaluation.evaluate(5)))
    playing.start()
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the command has started its child")
        add_finished(ledger, "s5", split=Split.EVAL, of_turns=sampled_by(5))
        if ended_by == "time limit":
            evaluation._settings = settings.model_copy(update={"evaluation_seconds": 0.0})
            playing.join(WAIT_SECONDS)
    finally:
        held.stop()
    playing.join(WAIT_SECONDS)
    wait_until_gone(int(pid_file.read_text()))
    assert ("the trainer stops" if ended_by == "stop" else "evaluation_seconds") in caplog.text
    if ended_by == "stop":
        assert found == [{}]
    else:
        assert [(one["num_sessions"], one["is_partial"]) for one in found] == [(1, True)]
    with ledger.read() as connection:
        assert versions.get_version(connection, 5).metrics == {}


def test_sessions_of_an_evaluation_that_an_outage_ended_do_not_count_for_the_next_version(ledger, tmp_path):
    publish(ledger, 5, 6)
    database = InterruptedDatabase(f"sqlite:///{tmp_path}/ledger.db")
    database.outage = tmp_path / "outage"
    command = (sys.executable, "-c", CAUSES_AN_OUTAGE_OF_VERSION_5, str(database.outage))
    settings = Settings(evaluation_command=command)
    evaluation = Evaluator(Ledger(database, settings), settings)
    assert evaluation.evaluate(5) == {}
    add_finished(ledger, "s5", split=Split.EVAL, of_turns=sampled_by(5))
    database.outage.unlink()
    assert evaluation.evaluate(6) == {}
    database.close()
