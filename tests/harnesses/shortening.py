"""Plays one agent until it shortens its conversation, and checks what the database has: the second table."""

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise

from harnesses.checks import asks_for_summary, is_served_stored, other_roles, own_turns
from harnesses.entry import ANSWER, OUTPUT, Harness
from harnesses.play import NONE, Verdict, sub_agent_rules
from harnesses.run import Attempt, Place, Stage
from turnwise_fake_engine import Reply, Rule

from turnwise.types import Json

COLUMNS = {
    "shortens": "how it shortens its conversation in this run",
    "runs": "it calls its tool again and again, shortens its conversation, and ends with the model's answer",
    "sessions": "the number of sessions without a session in the base URL",
    "summary": "role and reason of the calls that ask for a summary; – if it asks for none",
    "continued": "of how many of its summaries in one session a later context says that it goes on from them "
    "(`continues_summary`), so that they are trained; after its last call no context can",
    "beside": "role and reason of its other calls, such as sub-agents",
    "chains": "the chains of its own conversation, and how many of their turns are exact; the first turn after a cut "
    "contains replies whose tokens are not used again",
    "stored": "every call is stored token for token",
}
"""The columns of the table."""
SUMMARY = "THE-SUMMARY"
"""What the reply of the engine to a call that asks for a summary begins with."""
TITLE = "A check"
MOST_SUMMARIES = 30
NUM_CALLS = 8
"""How often the engine calls the tool."""
NUM_FILLING = 5.25
"""The outputs of the tool that fill a measured context: once in a run, and not at the end of an output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShorteningHarness(Harness):
    shortens: str
    """How, for the page."""
    output_lines: int = 200
    """Lines that its tool prints, so that a short context is soon full."""
    is_asked_again: bool = False
    """Whether its program asks several questions; otherwise the engine calls the tool again and again."""
    context_for: Callable[[float], float] | None = None
    """The context length with which it shortens a prompt of this many tokens; None: the engine's."""


def examine_shortening(stage: Stage) -> Verdict:
    """Play an agent with and without a session in its address, and fill the cells of its row."""
    harness = stage.harness
    verdict = Verdict({"shortens": harness.shortens})
    session_id = f"shortening-{uuid.uuid4().hex[:8]}"
    if harness.context_for is not None:
        once = stage.attempt(f"{session_id}-once", lambda place: shortening_rules(harness, place, num_calls=1))
        if not verdict.judge("runs", once, is_good=once.finished):
            return verdict
        context_tokens = round(harness.context_for(_filling_tokens(harness, once)))
        stage = dataclasses.replace(stage, harness=dataclasses.replace(harness, context_tokens=context_tokens))
    attempt = stage.attempt(session_id, lambda place: shortening_rules(harness, place))
    summaries = [turn for turn in attempt.turns if _is_summary(turn)]
    is_good = attempt.finished and attempt.has_sent(f"{OUTPUT}-1") and _has_shortened(harness, attempt)
    if not verdict.judge("runs", attempt, is_good=is_good and bool(summaries) == bool(harness.summary_texts)):
        return verdict
    unnamed = stage.attempt(None, lambda place: shortening_rules(harness, place))
    verdict.cells["sessions"] = str(len({turn["session_id"] for turn in unnamed.turns}))
    summaries += [turn for turn in unnamed.turns if _is_summary(turn)]
    verdict.cells["continued"] = _continued(attempt)
    verdict.cells["summary"] = ", ".join(sorted({_role(turn) for turn in summaries})) or NONE
    own = [turn for turn in own_turns(attempt.turns) if not _is_summary(turn)]
    num_exact = sum(turn["outcome"] == "exact" for turn in own)
    verdict.cells["chains"] = f"{len({turn['chain_id'] for turn in own})}, {num_exact} of {len(own)} turns exact"
    attempts = [attempt, unnamed]
    if harness.delegate is not None:
        beside = [*_title_and_summary(harness), *sub_agent_rules(stage)]
        attempts.append(stage.attempt(f"{session_id}-sub", lambda _: beside))
    others = [turn for each in attempts for turn in each.turns if not _is_summary(turn) and each is not unnamed]
    verdict.cells["beside"] = ", ".join(other_roles(others)) or NONE
    verdict.judge("stored", attempt, is_good=all(is_served_stored(each.calls, each.turns) for each in attempts))
    return verdict


def _filling_tokens(harness: ShorteningHarness, once: Attempt) -> float:
    """Return the tokens of a prompt that fills the context, from a run with one output and no limit.

    They differ between engines: the tokens of the fake engine are bytes.
    """
    first, second = _own_lengths(harness, once)
    return first + NUM_FILLING * (second - first)


def _has_shortened(harness: ShorteningHarness, attempt: Attempt) -> bool:
    return any(later < earlier for earlier, later in pairwise(_own_lengths(harness, attempt)))


def _own_lengths(harness: ShorteningHarness, attempt: Attempt) -> list[int]:
    return [
        len(call.prompt_token_ids)
        for call in attempt.calls
        if bool(call.body.get("tools")) == harness.offers_tools and not asks_for_summary(harness, call.body["messages"])
    ]


def shortening_rules(harness: ShorteningHarness, place: Place, num_calls: int = NUM_CALLS) -> Sequence[Rule]:
    """Return the rules that call the tool many times and answer calls that ask for a summary."""
    last = harness.last(ANSWER)
    answered = [Rule(contains=OUTPUT, reply=last)] if harness.is_asked_again else []
    calls = [harness.tool.call(place.command(str(n), harness.output_lines)) for n in range(1, num_calls + 1)]
    asks = [Rule(reply=harness.ask([call]), needs_tools=harness.offers_tools, count=1) for call in calls]
    return [*_title_and_summary(harness), *answered, *asks, Rule(reply=last)]


def _title_and_summary(harness: ShorteningHarness) -> list[Rule]:
    """Return the rules for the calls beside the agent's own; a title's prompt may quote that of a summary."""
    title = Rule(contains=" title for this conversation", reply=Reply(text=TITLE))
    said = f"{SUMMARY} {{}}: the check was called again and again, and its outputs were not looked at."
    asked = list(harness.summary_texts) * MOST_SUMMARIES
    return [
        title,
        *(Rule(contains=text, reply=Reply(text=said.format(at)), count=1) for at, text in enumerate(asked)),
    ]


def _is_summary(turn: Json) -> bool:
    return SUMMARY in str(turn["response"].get("content"))


def _continued(attempt: Attempt) -> str:
    of_summaries = [turn for turn in attempt.turns if turn["role"] == "summary"]
    trained = [turn for turn in of_summaries if turn["continued_by"] and turn["summary_left_out"] is None]
    last = max((turn["seq"] for turn in own_turns(attempt.turns) if turn not in of_summaries), default=0)
    num_after = sum(turn["seq"] > last for turn in of_summaries)
    told = f"{len(trained)} of {len(of_summaries)}" if of_summaries else NONE
    return f"{told}, {num_after} after its last call" if num_after else told


def _role(turn: Json) -> str:
    return f"{turn['role'].replace('_', '-')} (`{turn['role_reason']}`)"
