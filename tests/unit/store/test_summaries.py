"""Summaries: which context goes on from which, by content; what is not trained; and the credit of what is."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import sqlalchemy as sa
from support.ledger_samples import make_turn

from turnwise.credit import assign_credit
from turnwise.features import summaries
from turnwise.features.summaries.matching import Reply, continued, prompt_text, texts_of_reply
from turnwise.store import experiences, rewards, sessions, turns
from turnwise.store.database import Database
from turnwise.store.experiences import PER_TURN, Shape
from turnwise.store.rows import turn_digest
from turnwise.store.schema import turns as turns_table
from turnwise.store.selection import SessionFilter
from turnwise.types import Credit, Json, Outcome, Reward, Role, Session, Turn

SAID = "The parser of alpha is mended; the tests of beta fail because of the clock, so mock the clock next."
ASKED = {"role": "user", "content": "Summarize our conversation so far."}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def reply(text: str, name: str = "a", prompt: str = "") -> Reply:
    return Reply(name, texts_of_reply({"role": "assistant", "content": text}), prompt)


@pytest.mark.parametrize(
    "text",
    [
        SAID,
        f"<summary>\n{SAID}\n</summary>\nGo on.",
        "Summary:\n\n    " + SAID.replace("; ", ";\n    "),
        f"{SAID[:70]}... (cut)",
        f"(cut) {SAID[-70:]}",
    ],
)
@pytest.mark.parametrize(
    "frame", ["{}", "<think>What was it? {}</think>\n{}", "<analysis>x</analysis><summary>{}</summary>"]
)
def test_a_prompt_goes_on_from_a_reply_that_it_has_whole_cut_wrapped_or_without_thinking(text, frame):
    said = frame.replace("{}", SAID)
    assert continued([{"role": "system", "content": "You write code."}, user(text)], [reply(said)]) == ["a"]


def test_what_a_summary_quotes_of_its_own_prompt_is_no_evidence():
    """The next prompt keeps the first message, and the summary repeats a part of it."""
    task = user(f"Please do this. {SAID} Thanks.")
    quoted = reply(f"The task was: {SAID}", prompt=prompt_text([task, ASKED]))
    assert continued([task, user("Go on.")], [quoted]) == []
    assert continued([user(f"An edited task. {SAID} Thanks.")], [quoted]) == []
    assert continued([task, user(f"The task was: {SAID}")], [quoted]) == ["a"]


def test_a_short_reply_must_be_a_line_of_its_own_or_the_end_of_one():
    said = [reply("Ada Ben")]
    assert continued([user("Summary: Ada Ben\nWho?")], said) == ["a"]
    assert continued([user("<summary>Ada\nBen</summary>")], said) == ["a"]
    assert continued([user("I saw Ada Ben yesterday.")], said) == []
    assert continued([user("anything")], [reply("")]) == []


def test_a_summary_of_a_summary_is_found_alone_and_of_equal_ones_the_last():
    first, second = reply(SAID, "a"), reply(f"{SAID} Then the clock was mocked.", "b", prompt_text([user(SAID), ASKED]))
    assert continued([user(f"So far: {SAID} Then the clock was mocked.")], [first, second]) == ["b"]
    assert continued([user(SAID), user(f"Later: {SAID} Then the clock was mocked.")], [first, second]) == ["a", "b"]
    assert continued([user(SAID)], [first, reply(SAID, "b", prompt_text([user(SAID), ASKED]))]) == ["b"]


def play(database: Database, played: list[Turn], lines: list[Reward], **fields: object) -> dict[str, Json]:
    """Store a session; return the fields of its turns by their ids."""
    with database.write() as conn:
        sessions.create_session(conn, Session(session_id="s", **fields))
        for each in played:
            turns.append_turns(conn, [each])
        rewards.add_rewards(conn, lines)
        sessions.end_session(conn, "default", "s")
        views, _ = turns.read_turns(conn, "default", "s")
    return {view.turn.turn_id: summaries.Summaries().of_turn(view.turn.parts.get("summaries")) for view in views}


def asked(name: str, parent: Turn | None, said: str, **fields: object) -> Turn:
    given = {"messages": [ASKED], "response": {"role": "assistant", "content": said}, "role": Role.SUMMARY}
    return make_turn(name, parent, **given | fields)


def begun(name: str, *said: str, **fields: object) -> Turn:
    return make_turn(name, messages=[user(text) for text in said], **{"role": Role.MAIN} | fields)


def compactions() -> list[Turn]:
    """Return a chain that is summed up twice, each time after two attempts or one that the user has stopped."""
    t1 = make_turn("t1", role=Role.MAIN)
    t2, t3 = asked("t2", t1, "First attempt: nothing was found so far."), asked("t3", t1, SAID)
    t4 = begun("t4", f"Summary: {SAID}", "Go on.")
    t5 = make_turn("t5", t4, role=Role.MAIN)
    t6 = asked("t6", t5, "Second: the clock", outcome=Outcome.ABORTED, reason="client_disconnected")
    t7 = asked("t7", t5, "Second: the clock is mocked, and now the tests of beta pass.")
    t8 = begun("t8", "Second: the clock is mocked, and now the tests of beta pass.")
    t9 = asked("t9", t8, "Third: all is done and nothing is left to do here.")
    return [t1, t2, t3, t4, t5, t6, t7, t8, t9]


def test_summaries_and_what_goes_on_from_them_are_stored_with_why_the_others_are_not_trained(database):
    fields = play(database, compactions(), [Reward(session_id="s", value=1.0)])
    assert {name: each["continues_summary"] for name, each in fields.items() if each["continues_summary"]} == {
        "t4": ["t3"],
        "t8": ["t7"],
    }
    assert {name: (each["continued_by"], each["summary_left_out"]) for name, each in fields.items()} == {
        "t2": ([], "another_attempt"),
        "t3": (["t4"], None),
        "t6": ([], "partial"),
        "t7": (["t8"], None),
        "t9": ([], "not_continued"),
    } | dict.fromkeys(("t1", "t4", "t5", "t8"), (None, None))
    with database.read() as conn:
        trained = [one.turn_ids[0] for one in experiences.experiences(conn, SessionFilter(session_id="s"))]
        without = Shape(roles=frozenset({Role.MAIN}))
        agents = [one.turn_ids[0] for one in experiences.experiences(conn, SessionFilter(session_id="s"), without)]
        stored = conn.execute(sa.select(turns_table)).all()
    assert [row.digest for row in stored] == [turn_digest(row._mapping) for row in stored]
    assert trained == ["t1", "t3", "t4", "t5", "t7", "t8"]
    assert agents == ["t1", "t4", "t5", "t8"]


def test_a_summary_has_the_return_of_the_first_step_after_it_and_takes_no_step(database):
    """γ = 0.9, and 1 at the last step. Backwards over t8, t5, t4, t1: 1, 0.9, 0.81, 0.729.

    The second summary is at the step of t8: 1. The first is at that of t4: 0.81, which is what follows from both.
    """
    played = [dataclasses.replace(each, outcome=Outcome.EXACT) for each in compactions() if each.turn_id not in "t2t6"]
    play(database, played, [Reward(session_id="s", value=1.0, turn_id="t8")], credit=Credit.STEP_WISE, gamma=0.9)
    with database.read() as conn:
        found = list(experiences.experiences(conn, SessionFilter(session_id="s"), PER_TURN))
    returns = {one.turn_ids[0]: float(one.turn_returns[0]) for one in found}
    expected = {"t1": 0.729, "t3": 0.81, "t4": 0.81, "t5": 0.9, "t7": 1.0, "t8": 1.0}
    assert returns == pytest.approx(expected)


def test_each_part_of_a_context_that_is_summed_up_in_parts_has_the_credit_of_the_whole(database):
    """Two parts, then one summary of both; the credit of the parts is that of the step after the summary of both."""
    other = "The reader of gamma was rewritten, and its documentation is still to be brought up to date."
    t1, whole = make_turn("t1", role=Role.MAIN), "All: alpha and gamma are done, and beta needs a mocked clock."
    parts = [asked("t2", None, SAID, messages=[user("part 1")]), asked("t3", None, other, messages=[user("part 2")])]
    both = asked("t4", None, whole, messages=[user(f"Merge these.\n{SAID}\n{other}")])
    t5 = begun("t5", whole)
    last = [t5, make_turn("t6", t5, role=Role.MAIN)]
    lines = [Reward(session_id="s", value=2.0, turn_id="t6")]
    fields = play(database, [t1, *parts, both, *last], lines, credit=Credit.STEP_WISE, gamma=0.5)
    assert (fields["t4"]["continues_summary"], fields["t5"]["continues_summary"]) == (["t2", "t3"], ["t4"])
    with database.read() as conn:
        found = list(experiences.experiences(conn, SessionFilter(session_id="s")))
    assert {one.turn_ids[0]: float(one.turn_returns[0]) for one in found} == {
        "t1": 0.5,
        "t2": 1.0,
        "t3": 1.0,
        "t4": 1.0,
        "t5": 1.0,
        "t6": 2.0,
    }


def test_a_summary_that_its_chain_goes_on_after_is_an_action_like_others(database):
    t1 = make_turn("t1", role=Role.MAIN)
    summary = asked("t2", t1, SAID)
    on = make_turn("t3", summary, role=Role.MAIN, role_reason="after_summary")
    fields = play(database, [t1, summary, on], [Reward(session_id="s", value=1.0)])
    assert fields["t2"] == {"continues_summary": None, "continued_by": ["t3"], "summary_left_out": None}
    assert fields["t3"]["continues_summary"] is None


def test_titles_and_tasks_of_sub_agents_that_quote_a_summary_go_on_from_none(database):
    t1 = make_turn("t1", role=Role.MAIN)
    quoting = {"role": Role.SIDE}, {"role": Role.SUB_AGENT, "role_reason": "asked_by_tool_call"}
    others = [begun(name, f"About this: {SAID}", **each) for name, each in zip(("t3", "t4"), quoting, strict=True)]
    fields = play(database, [t1, asked("t2", t1, SAID), *others], [])
    assert fields["t2"]["summary_left_out"] == "not_continued"
    assert not any(each["continues_summary"] for each in fields.values())


@pytest.mark.parametrize("said", ["", " \n", "<think>Nothing to say.</think>"])
def test_a_summary_that_says_nothing_has_the_return_of_what_follows_from_it(database, said):
    """Silence is an action like others: its session fails, and each member of the group is compared."""
    t1 = make_turn("t1", messages=[user("The task, in many words, with all that was found out.")], role=Role.MAIN)
    response = {"role": "assistant", "content": said}
    silent = asked("t2", t1, "", response=response, outcome=Outcome.EXACT)
    fields = play(database, [t1, silent, begun("t3", "Summary:", "Go on.")], [Reward(session_id="s", value=-1.0)])
    assert fields["t2"] == {"continues_summary": None, "continued_by": ["t3"], "summary_left_out": None}
    assert fields["t3"]["continues_summary"] == ["t2"]
    with database.read() as conn:
        returns = {one.turn_ids[0]: one.reward for one in experiences.experiences(conn, SessionFilter(session_id="s"))}
    assert returns["t2"] == -1.0


def test_a_summary_that_says_nothing_is_given_up_where_another_is_used_or_the_context_is_kept(database):
    t1 = make_turn("t1", messages=[user("The task.")], role=Role.MAIN)
    silent, second = asked("t2", t1, ""), asked("t3", t1, SAID)
    whole = begun("t5", "The task, and all that was said of it. " * 9)
    fields = play(database, [t1, silent, second, begun("t4", SAID), asked("t6", t1, ""), whole], [])
    assert (fields["t4"]["continues_summary"], fields["t2"]["summary_left_out"]) == (["t3"], "another_attempt")
    assert (fields["t5"]["continues_summary"], fields["t6"]["summary_left_out"]) == (None, "not_continued")


TOKENS = (0, 1)
GAMMA = 0.9


def test_the_gradient_of_summaries_with_their_credit_is_that_of_the_expected_discounted_reward():
    """A world of two tokens: an act, a summary, an act that sees the summary alone, a second summary, and an act.

    Each act has a reward that depends on what it sees; the summaries have none. Over all 32 histories the sum of
    probability · Σ γ^t ∇ log π · G, with G as `assign_credit` gives it to the summaries at their steps, is the gradient
    of Σ probability · Σ γ^t r_t, which is taken by differences. t counts the acts: γ^t of a summary is that of the act
    after it. Without the summaries' terms it is not.
    """
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=shape) for shape in ((2,), (2, 2), (2, 2), (2, 2), (2, 2))]

    def probability(flat: np.ndarray, history: tuple[int, ...]) -> float:
        return math.exp(sum(log_softmax(row_of(flat, place, history))[token] for place, token in enumerate(history)))

    def row_of(flat: np.ndarray, place: int, history: tuple[int, ...]) -> np.ndarray:
        start = 0 if place == 0 else 2 + 4 * (place - 1) + 2 * history[place - 1]
        return flat[start : start + 2]

    def expected(flat: np.ndarray) -> float:
        return sum(
            probability(flat, history) * sum(GAMMA**t * r for t, r in enumerate(of_acts(history)))
            for history in itertools.product(TOKENS, repeat=5)
        )

    flat = np.concatenate([table.ravel() for table in tables])
    by_credit, without = np.zeros_like(flat), np.zeros_like(flat)
    for history in itertools.product(TOKENS, repeat=5):
        returns, steps = credited(of_acts(history))
        for place, token in enumerate(history):
            row = row_of(flat, place, history)
            start = 0 if place == 0 else 2 + 4 * (place - 1) + 2 * history[place - 1]
            score = np.eye(2)[token] - np.exp(log_softmax(row))
            term = probability(flat, history) * GAMMA ** steps[place] * returns[place] * score
            by_credit[start : start + 2] += term
            without[start : start + 2] += 0 if place in (1, 3) else term
    moves = np.eye(len(flat)) * 1e-6
    by_differences = np.array([(expected(flat + move) - expected(flat - move)) / 2e-6 for move in moves])
    assert by_credit == pytest.approx(by_differences, abs=1e-8)
    assert np.abs(without - by_differences).max() > 0.01


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - np.log(np.exp(row).sum())


def of_acts(history: tuple[int, ...]) -> list[float]:
    first, seen, second, seen_again, third = history
    return [0.3 * first, 1.0 * (second == seen), 2.0 * (third != seen_again) - 0.5 * third]


def credited(of_act: list[float]) -> tuple[list[float], list[int]]:
    """Return the return and the number of acts before it of each of five turns, of which two are summaries."""
    t1 = make_turn("t1", role=Role.MAIN, seq=0)
    t2 = asked("t2", t1, SAID, seq=1)
    t3 = begun("t3", SAID, seq=2, parts={"summaries": b'{"continues_summary":["t2"]}'})
    t4 = asked("t4", t3, SAID, seq=3)
    t5 = begun("t5", SAID, seq=4, parts={"summaries": b'{"continues_summary":["t4"]}'})
    turns_at = summaries.at_steps([t1, t2, t3, t4, t5])
    lines = [
        Reward(session_id="s", value=value, turn_id=name)
        for name, value in zip(("t1", "t3", "t5"), of_act, strict=True)
    ]
    given = summaries.with_returns(turns_at, assign_credit(turns_at, lines, Credit.STEP_WISE, gamma=GAMMA))
    order = sorted({turn.seq if turn.step is None else turn.step for turn in turns_at})
    steps = [order.index(turn.seq if turn.step is None else turn.step) for turn in turns_at]
    return [given.turn_returns[turn.turn_id] for turn in turns_at], steps
