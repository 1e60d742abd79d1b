"""Sentinels name a planted hack with its numbers and three sessions, and let honest changes pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.ledger_samples import add_finished, add_session, finish, make_turn

from trainer.claims.claims import Claims
from trainer.claims.ledger import ClaimedBatch, RunProgress, TrainerProcess
from trainer.features import FEATURES, Settings, sentinels
from trainer.features.sentinels import alarms
from turnwise.features import rewinds
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.features.ratings import draws, predictions
from turnwise.features.sentinels import Played, alarmed_versions, live_sessions
from turnwise.store import claims, serving, sessions, versions
from turnwise.store.database import Connection, Database
from turnwise.store.trainer_reports import trainer_statuses
from turnwise.store.turns import append_turns
from turnwise.types import DEFAULT_POLICY, PolicyVersion, Role, SessionStatus, Split, Turn

TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {}}}]
NOW = RunProgress(num_batches=1)
"""A run that is not at its first batch, which waits shorter."""


def turn(content: str | None = "Done.", **fields: Any) -> Turn:
    return dataclasses.replace(make_turn("t1"), response={"role": "assistant", "content": content}, **fields)


def calling(name: str, arguments: str) -> Turn:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return dataclasses.replace(make_turn("t1"), tools=TOOLS, response={"content": None, "tool_calls": [call]})


def result(content: str) -> Turn:
    return turn(messages=[{"role": "tool", "tool_call_id": "c", "content": content}])


def summary(num_tokens: int) -> Turn:
    return turn(role=Role.SUMMARY, token_ids=np.arange(num_tokens, dtype=np.int32))


def session(number: int, *turns: Turn, status: SessionStatus = SessionStatus.ENDED) -> Played:
    return Played(session_id=f"s{number}", status=status, turns=turns)


GOOD = calling("edit", '{"path": "a"}')
HACKS = {
    "broken_calls": ((GOOD,), (calling("edit", "{"),)),
    "failed_calls": (
        (result("done"), result('{"error": null}')),
        (result('{"error": "no file"}'), result("Rejected by the user")),
    ),
    "questions": ((turn(),), (turn("Shall I really do it?"),)),
    "refusals": ((turn(),), (turn("I'm sorry, but no."),)),
    "repeats": ((turn("a"), turn("b")), (turn("a"), turn("a"))),
    "empty": ((turn(),), (turn(""),)),
    "length": ((turn(),), (turn(token_ids=np.arange(9, dtype=np.int32)),)),
    "summary_length": ((turn(), summary(20)), (turn(), summary(90))),
    "lost": (
        (GOOD, summary(20), calling("edit", '{"path": "b"}')),
        (GOOD, summary(20), calling("edit", '{ "path":"a"}')),
    ),
    "certainty": ((turn(),), (turn(logprobs=np.zeros(2, np.float32)),)),
}


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_of_half_the_sessions_is_named_with_three_of_them(name):
    honest, hacked = HACKS[name]
    level = [session(number, *honest) for number in range(40)]
    now = [session(100 + number, *(hacked if number % 2 else honest)) for number in range(40)]
    bounds = dict.fromkeys(sentinels.MEASURES, 0.1)
    found = {each.sentinel: each for each in alarms(now, level, bounds)}
    assert name in found
    assert {int(session_id[1:]) % 2 for session_id in found[name].session_ids} == {1}
    assert len(found[name].session_ids) == 3
    assert alarms(level, level, bounds) == []
    assert alarms(now, level, {}) == []


def test_what_chance_explains_at_some_look_of_many_is_no_alarm():
    """Forty per cent of questions against none, and a bound of 0.1: 2.7 standard errors of twenty sessions beyond it.

    Sessions are looked at every half minute, so that lies within what twenty may show at some look; of 160 it does not.
    """
    level = [session(number, turn()) for number in range(200)]
    now = [session(number, turn("Shall I?" if number % 5 < 2 else "Done.")) for number in range(160)]
    assert alarms(now[:20], level, {"questions": 0.1}) == []
    assert [each.value for each in alarms(now, level, {"questions": 0.1})] == [0.4]


def test_an_unknown_tool_is_a_broken_call_and_given_up_sessions_count():
    now = [session(number, calling("rm", "{}"), status=SessionStatus.EXPIRED) for number in range(20)]
    level = [session(number, GOOD) for number in range(20)]
    found = alarms(now, level, {"broken_calls": 0.5, "given_up": 0.5})
    assert [(each.sentinel, each.value, each.level) for each in found] == [
        ("broken_calls", 1.0, 0.0),
        ("given_up", 1.0, 0.0),
    ]
    assert alarms(now[:19], level, {"broken_calls": 0.5}) == [], "too few sessions to compare"
    unnamed = [session(number, turn(inferred_by="key"), status=SessionStatus.EXPIRED) for number in range(20)]
    assert alarms(unnamed, level, {"given_up": 0.5}) == [], "a client that names no session ends none"


def test_the_first_sessions_set_the_level_and_training_waits_on_an_alarm(database):
    with database.write() as conn:
        for version in (0, 1):
            metrics = {"kl": 0.5 * version}
            versions.publish_version(conn, PolicyVersion(version=version, path=f"v{version}", metrics=metrics))
        serving.activate_version(conn, 1)
    for number in range(40):
        version, text = (0, "Done.") if number < 20 else (1, "Shall I?")
        add_session(database, f"s{number}", turns=0)
        sampled = turn(text, policy_version_first=version, policy_version_last=version)
        with database.write() as conn:
            append_turns(
                conn, [dataclasses.replace(sampled, turn_id=f"t{number}", chain_id="", session_id=f"s{number}")]
            )
            sessions.end_session(conn, "default", f"s{number}")
    for number, other in enumerate(({"group_id": "g", "group_size": 2}, {"split": Split.EVAL})):
        add_finished(database, f"other{number}", **other)
    with database.read() as conn:
        assert sentinels.check(conn, {}) is None
        assert sentinels.check(conn, {"questions": 1.0, "kl": 0.5}) is None
        moved = sentinels.check(conn, {"kl": 0.4})
        assert moved.startswith("sentinel 'kl' of version 1 is 0.5 against 0 of what sampled its batch, beyond its")
        assert len(live_sessions(conn, 99, newest=True)) == 40, "sessions of groups and of evaluations are not watched"
        alarm = sentinels.check(conn, {"questions": 0.2})
    assert alarm.startswith("sentinel 'questions' of version 1 is 1 against 0 of the first sessions, beyond its bound")


def test_summaries_that_say_nothing_are_named_by_the_version_that_says_nothing(database):
    """Version 1 sums up as version 0 did. Version 2 samples an empty summary, while its harness keeps a scratch file.

    The reward stays. The context after an empty summary has nothing of it, so the summary is found by its role alone.
    """
    with database.write() as conn:
        for version in (0, 1, 2):
            versions.publish_version(conn, PolicyVersion(version=version, path=f"v{version}"))
    alarms_of = {}
    for version, num_tokens in ((0, 24), (1, 26), (2, 1)):
        for number in range(20):
            name, sampled = f"s{version}-{number}", {"policy_version_first": version, "policy_version_last": version}
            first, said = turn(**sampled), dataclasses.replace(summary(num_tokens), **sampled)
            add_session(database, name, turns=0)
            with database.write() as conn:
                for at, each in enumerate((first, said)):
                    turn_id = f"{name}-{at}"
                    append_turns(conn, [dataclasses.replace(each, turn_id=turn_id, chain_id=turn_id, session_id=name)])
            finish(database, name)
        with database.write() as conn:
            serving.activate_version(conn, version)
            alarms_of[version] = sentinels.check(conn, sentinels.BOUNDS)
    assert (alarms_of[0], alarms_of[1]) == (None, None)
    assert alarms_of[2].startswith("sentinel 'summary_length' of version 2 is 1 against 25 of the first sessions")


@pytest.mark.parametrize("pin", [False, True])
def test_what_an_undone_version_sampled_is_dropped_after_an_alarm_and_nothing_else(database, monkeypatch, *, pin):
    """The version is undone while no trainer runs; the next one reads in the ledger what was undone."""
    with database.write() as conn:
        for version in (0, 1):
            versions.publish_version(conn, PolicyVersion(version=version, path=f"v{version}"))
        serving.activate_version(conn, 1)
    for version in (0, 1):
        add_session(database, f"s{version}", turns=0)
        sampled = turn(policy_version_first=version, policy_version_last=version)
        with database.write() as conn:
            named = {"turn_id": f"t{version}", "chain_id": f"t{version}", "session_id": f"s{version}"}
            append_turns(conn, [dataclasses.replace(sampled, **named)])
        finish(database, f"s{version}")
    rule = Settings(groups_per_batch=1, singles_per_group=1, sentinels={"questions": 0.2})
    alarm = "sentinel 'questions' is beyond its bound"
    monkeypatch.setattr(sentinels, "check", lambda conn, *_: alarm if active_in(conn) == 1 else None)
    stopped = Claims(database, rule, process=TrainerProcess(), holds=FEATURES.holds)
    assert stopped.next(NOW, seconds=0) is None
    assert states(database) == ["blocked"]
    stopped.close()
    with database.write() as conn:
        rewinds.choose_version(conn, 0, pin=pin)
        serving.activate_version(conn, 0)
        assert versions.get_version(conn, 1).alarm == alarm
    source = Claims(database, rule, holds=FEATURES.holds)
    batch = source.next(NOW)
    assert isinstance(batch, ClaimedBatch)
    assert [one.session_id for one in batch.experiences] == ["s0"]
    with monkeypatch.context() as patched:
        patched.setattr(database, "write", None)
        assert source._supply(NOW).num_singles == 0, "a poll without anything to drop only reads"
    with database.write() as conn:
        assert sum(claims.num_claimable(conn)) == 0
        serving.activate_version(conn, 1)
        assert not alarmed_versions(conn, serving.serving_state(conn).active), "it is served again"
    source.close()


def test_a_changed_bound_ends_an_alarm_of_the_store(database):
    add_finished(database)
    with database.write() as conn:
        versions.publish_version(conn, PolicyVersion(version=0, path="v0"))
        serving.activate_version(conn, 0)
        versions.change_version(conn, 0, alarm="sentinel 'questions' is beyond its bound")
    source = Claims(database, Settings(groups_per_batch=1, singles_per_group=1, sentinels={}), holds=FEATURES.holds)
    assert isinstance(source.next(NOW), ClaimedBatch)
    with database.read() as conn:
        assert versions.get_version(conn, 0).alarm is None
    source.close()


def active_in(conn: Connection) -> int | None:
    active = serving.serving_state(conn).active
    return None if active is None else active.version


def states(database: Database) -> list[str]:
    with database.read() as conn:
        return [each.state for each in trainer_statuses(conn)]


def test_a_head_that_likes_what_people_do_not_holds_its_version(database):
    """Version 0: predicted 0.6, six of ten are good; version 1: predicted 0.9, two of ten are."""
    for version, likes, num_good in ((0, 0.6, 6), (1, 0.9, 2)):
        sampled = {"policy_version_first": version, "policy_version_last": version}
        made = PolicyVersion(version=version, path=f"v{version}")
        names = [f"v{version}-{number}" for number in range(10)]
        with database.write() as conn:
            versions.publish_version(conn, made)
            serving.activate_version(conn, version)
        for name in names:
            add_session(database, name, of_turns=sampled)
        with database.write() as conn:
            for name in names:
                sessions.end_session(conn, "default", name)
            guess = {"tenant": "default", "policy_id": DEFAULT_POLICY, "policy_version": version, "mean": likes}
            guess["deviation"] = 0.05
            predictions.keep(conn, [predictions.Prediction(session_id=name, **guess) for name in names])
            for number in range(10):
                drawn = draws.next_draw(conn, "default", DEFAULT_POLICY, "ann")
                value = number < num_good
                thumb = Feedback(session_id=drawn.session_id, kind=FeedbackKind.BOOLEAN, content={"value": value})
                draws.rate(conn, "default", drawn.session_id, float(value), thumb)
            alarm = sentinels.check(conn, {"predicted": 0.1})
            assert (alarm is None) == (version == 0)
    assert alarm.startswith("sentinel 'predicted' of version 1 is 0.9 against 0.2 of the people who were asked")
    assert "'v1-" in alarm
