"""What `turnwise doctor` says of a database: how calls are sampled, what is waited for, and what is not trained."""

import dataclasses
import datetime

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, make_turn

from turnwise.features import feedback
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.processes.installation import Severity, examine_running
from turnwise.store import rewards, schema
from turnwise.store.rows import to_micros
from turnwise.store.trainer_reports import report_status
from turnwise.types import Reward, utc_now

GREEDY = {"sampling": {"temperature": 0}}


def found(url: str, tenant: str | None = None) -> dict[str, tuple[Severity, str]]:
    return {each.check: (each.verdict, each.text) for each in examine_running([], url, tenant)}


@pytest.mark.parametrize("tenant", [None, "default"])
def test_greedy_turns_are_found_behind_those_of_a_busier_agent(database, database_url, tenant):
    """Forty greedy sessions, and then more than the newest that are read."""
    for number in range(40):
        add_session(database, f"greedy-{number}", of_turns=GREEDY)
    for number in range(60):
        add_session(database, f"s{number}")
    verdict, text = found(database_url, tenant)["sampling"]
    assert verdict is Severity.WARN
    assert "turns are not trained: temperature 0." in text
    assert "`sampling_pins`" in text
    assert "`explore`" in text


def test_sampling_of_more_than_an_hour_ago_is_not_shown_unless_it_is_the_newest(database, database_url):
    for number in range(60):
        add_session(database, f"s{number}", of_turns=GREEDY if number < 10 else {})
    with database.write() as connection:
        long_ago = to_micros(utc_now() - datetime.timedelta(hours=2))
        connection.execute(sa.update(schema.sessions).values(created_at=long_ago))
    assert found(database_url)["sampling"] == (
        Severity.OK,
        "all of 50 turns can be trained, of the newest sessions and of some of the last hour",
    )


def test_live_sessions_that_only_have_to_be_over_are_counted_down(database, database_url):
    """Unnamed sessions with a reward: the ones that were called four and nine minutes ago are over in six and one."""
    assert "live traffic" not in found(database_url)
    for name, minutes in (("a", 4), ("b", 9)):
        add_session(database, name, of_turns={"inferred_by": "key"})
        with database.write() as connection:
            rewards.add_rewards(connection, [Reward(session_id=name, value=1.0)])
            at = to_micros(utc_now() - datetime.timedelta(minutes=minutes))
            is_it = schema.sessions.c.session_id == name
            connection.execute(sa.update(schema.sessions).where(is_it).values(last_active_at=at))
    add_session(database, "named")
    verdict, text = found(database_url)["live traffic"]
    assert verdict is Severity.OK
    assert text == (
        "2 rewarded sessions that no call names are open: each is over, and counts as a single session, after 10 "
        "minutes without a call, the first in 1 min, the last in 6 min"
    )


def test_when_a_trainer_starts_is_counted_down(database, database_url):
    with database.write() as connection:
        report_status(connection, "t", "waiting: 70 of 256 single sessions are ready", seconds_left=600)
    _, text = found(database_url)["trainer t"]
    seconds = int(text.rpartition(", starts in ")[2].removesuffix(" s"))
    assert 0 < seconds <= 600


def test_edits_that_wait_for_another_algorithm_are_counted(database, database_url):
    original = add_finished(database, "s")
    given = Feedback(
        session_id="s", turn_id="s-t1", kind=FeedbackKind.DEMONSTRATION, content={"value": "Hi."}, group_id="feedback-1"
    )
    with database.write() as connection:
        turn = dataclasses.replace(make_turn("t1", session_id="s"), turn_id="s-t1")
        member = feedback.sampled([turn], given, original, 0, 1)
        feedback.add(connection, given, group=[feedback.written(member, "Hi.", turn.token_ids)])
    assert (
        "1 edited or chosen replies are not trained: only `sft`, `dpo` and `chord`" in found(database_url)["edits"][1]
    )
    assert "edits" not in found(database_url, "another tenant")
