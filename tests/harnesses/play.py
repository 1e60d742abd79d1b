"""Plays one agent several times through a real proxy, and checks what the database has: the cells of the table."""

import asyncio
import dataclasses
import re
import uuid
from collections.abc import Sequence

from harnesses.checks import (
    asked_sampling,
    has_parallel_tools,
    is_one_exact_chain,
    is_sampling_long,
    is_served_stored,
    other_roles,
    own_turns,
    session_source,
    shape,
    was_cut_off,
)
from harnesses.entry import ANSWER, OUTPUT, SUB_ANSWER, SUB_TASK
from harnesses.run import Attempt, Place, Stage, reason, wait_until
from turnwise_fake_engine import Fault, FaultKind, Reply, Rule

from turnwise.types import Json

SAMPLES = "samples with"
COLUMNS = {
    "runs": "it calls its tool and ends with the model's answer",
    "streams": "it asks for streamed replies",
    "exact": "its own conversation is one chain, each of its turns is exact, and every call is stored token for token",
    "parallel tools": "one reply calls two tools, and the next turn extends it with both outputs",
    "beside": "role and reason of its other calls, such as titles and sub-agents; – if there are none",
    "retry": "the engine fails once: the agent continues, and the store has the same turns as otherwise, each once",
    "client gone": "it is killed during a reply: the engine stops, and the store has the turn once, as aborted",
    "kill -9": "the proxy is killed while the tool runs, and a new one replaces it: the store has the same turns",
    "inferred": "without a session in the base URL, its conversation is one exact chain in one session",
    SAMPLES: "which sampling its calls ask for; – for the engine's defaults, empty where it was not recorded",
    "session by": "how the proxy identifies that session: by an id that the agent sends, or by its conversation",
}
"""The columns of the table."""
NONE = "–"
SLOW = Reply(text="One word after the other. " * 200, pace_seconds=0.02)
"""A reply that takes long enough for the client to go away before its end."""
SHORT_WAIT, MAX_WAITS = "sleep 1", 30
"""What an agent does while a sub-agent works in the background, and how often at most."""


@dataclasses.dataclass(slots=True)
class Verdict:
    cells: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    num_ordinary: int = 0
    """Calls that ask for no summary."""
    num_taken: int = 0
    """Of these, the ones that the proxy takes for a request for a summary."""

    def judge(self, column: str, attempt: Attempt, *, is_good: bool) -> bool:
        self.cells[column] = "yes" if is_good else "no"
        if not is_good:
            self.notes.append(f"{column}: {describe(attempt)}")
        return is_good


def examine_sampling(stage: Stage) -> Verdict:
    """Play one run, and look at nothing but the parameters of its calls."""
    played = stage.attempt(
        f"{_slug(stage.harness.name)}-{uuid.uuid4().hex[:8]}", lambda _: simple_rules(stage, _, "one")
    )
    return Verdict({SAMPLES: asked_sampling(played.turns) or NONE} if played.turns else {})


def examine_briefly(stage: Stage) -> Verdict:
    verdict = Verdict()
    _play_parallel(stage, verdict)
    return verdict


def examine(stage: Stage) -> Verdict:
    verdict = Verdict()
    name = f"{_slug(stage.harness.name)}-{uuid.uuid4().hex[:8]}"
    plain = stage.attempt(f"{name}-plain", lambda place: simple_rules(stage, place, "one"))
    if not verdict.judge("runs", plain, is_good=_used_tool(plain, "one")):
        return verdict
    seen = list(plain.turns)
    verdict.cells["streams"] = "yes" if any(call.body.get("stream") for call in plain.calls) else "no"
    verdict.judge("exact", plain, is_good=_is_exact(plain))
    verdict.cells[SAMPLES] = asked_sampling(plain.turns) or NONE
    seen += _play_parallel(stage, verdict)
    if stage.harness.delegate is not None:
        seen += _play_sub_agent(stage, verdict, f"{name}-sub")
    _play_breaks(stage, verdict, name, plain)
    _play_client_gone(stage, verdict, f"{name}-gone")
    if verdict.cells.get("beside") != "no":
        verdict.cells["beside"] = ", ".join(other_roles(seen)) or NONE
    return verdict


def _play_parallel(stage: Stage, verdict: Verdict) -> list[Json]:
    """Run it without a session in its address, with two tool calls in one reply."""
    attempt = stage.attempt(None, lambda place: simple_rules(stage, place, "one", "two"))
    own = own_turns(attempt.turns)
    is_one_session = len({turn["session_id"] for turn in own}) == 1
    is_exact = _used_tool(attempt, "one") and _is_exact(attempt)
    verdict.judge("inferred", attempt, is_good=is_exact and is_one_session)
    verdict.cells["session by"] = ", ".join(sorted({session_source(turn["session_id"]) for turn in own}))
    outputs = [f"{OUTPUT}-{label}" for label in ("one", "two")]
    is_parallel = _used_tool(attempt, "one", "two") and has_parallel_tools(own, outputs)
    verdict.judge("parallel tools", attempt, is_good=is_parallel)
    return attempt.turns


def _play_sub_agent(stage: Stage, verdict: Verdict, session_id: str) -> list[Json]:
    attempt = stage.attempt(session_id, lambda _: sub_agent_rules(stage))
    subs = [turn for turn in attempt.turns if turn["role"] == "sub_agent"]
    is_named = any(SUB_ANSWER in str(turn["response"]) for turn in subs)
    if not (attempt.finished and attempt.has_sent(SUB_ANSWER) and is_named and _is_stored(attempt)):
        verdict.judge("beside", attempt, is_good=False)
    return attempt.turns


def _play_breaks(stage: Stage, verdict: Verdict, name: str, plain: Attempt) -> None:
    """Let the engine fail once and kill the proxy while the tool runs; where that is too much, one after the other."""
    faults = [Fault(kind=FaultKind.STATUS, status=500, count=1)]
    columns = ["retry", "kill -9"]
    attempt = _break(stage, f"{name}-breaks", faults, kills=True)
    if _is_same(attempt, plain):
        for column in columns:
            verdict.judge(column, attempt, is_good=True)
        return
    for column in columns:
        is_retry = column == "retry"
        attempt = _break(stage, f"{name}-{column.split()[0]}", faults if is_retry else [], kills=not is_retry)
        if is_retry and len(attempt.calls) == 1:
            verdict.cells[column] = "gives up"
        else:
            verdict.judge(column, attempt, is_good=_is_same(attempt, plain))


def _break(stage: Stage, session_id: str, faults: Sequence[Fault], *, kills: bool) -> Attempt:
    async def kill(place: Place) -> bool:
        await wait_until(place.reached.exists)
        num_known = len(stage.engine.calls)
        await asyncio.to_thread(stage.proxy.kill_and_restart)
        stage.engine.forget_calls(num_known)
        place.hold.unlink()
        return False

    during = kill if kills else None
    return stage.attempt(
        session_id, lambda place: simple_rules(stage, place, "one"), faults=faults, during=during, holds=kills
    )


def _is_same(attempt: Attempt, plain: Attempt) -> bool:
    return _used_tool(attempt, "one") and _is_stored(attempt) and shape(attempt.turns) == shape(plain.turns)


def _play_client_gone(stage: Stage, verdict: Verdict, session_id: str) -> None:
    async def leave(_: Place) -> bool:
        await wait_until(lambda: any(is_sampling_long(call) for call in stage.engine.calls))
        return True

    rules = [
        Rule(contains=stage.harness.first_text, reply=SLOW, needs_tools=stage.harness.offers_tools),
        Rule(reply=Reply(text=ANSWER)),
    ]
    attempt = stage.attempt(session_id, lambda _: rules, during=leave)
    is_good = was_cut_off(attempt.calls, attempt.turns) and _is_stored(attempt)
    verdict.judge("client gone", attempt, is_good=is_good)


def _used_tool(attempt: Attempt, *labels: str) -> bool:
    return attempt.finished and attempt.has_sent(*(f"{OUTPUT}-{label}" for label in labels))


def _is_exact(attempt: Attempt) -> bool:
    return _is_stored(attempt) and is_one_exact_chain(own_turns(attempt.turns))


def _is_stored(attempt: Attempt) -> bool:
    return is_served_stored(attempt.calls, attempt.turns)


def simple_rules(stage: Stage, place: Place, *labels: str) -> list[Rule]:
    """Return the rules that call the tool once with each label, and end once its output is there."""
    harness = stage.harness
    last = harness.last(ANSWER)
    calls = [harness.tool.call(place.command(label)) for label in labels]
    return [
        Rule(contains=OUTPUT, reply=last),
        Rule(contains=harness.first_text, reply=harness.ask(calls), needs_tools=harness.offers_tools),
        Rule(reply=last),
    ]


def sub_agent_rules(stage: Stage) -> list[Rule]:
    """Return the rules that give a task to a sub-agent, answer it, and end once its answer is there."""
    harness = stage.harness
    assert harness.delegate is not None
    waits = [
        Rule(reply=harness.ask([harness.tool.call(SHORT_WAIT)]), needs_tools=harness.offers_tools, count=MAX_WAITS)
    ]
    return [
        Rule(contains=SUB_ANSWER, reply=harness.last(ANSWER)),
        Rule(
            contains=harness.first_text,
            reply=harness.ask([harness.delegate.call(SUB_TASK)]),
            needs_tools=harness.offers_tools,
            count=1,
        ),
        Rule(contains=harness.first_sub_text, reply=harness.last(SUB_ANSWER)),
        *(waits if harness.delegates_in_background else []),
        Rule(reply=harness.last(ANSWER)),
    ]


def describe(attempt: Attempt) -> str:
    seen = [f"{turn['role']} {turn['outcome']} {turn['reason'] or ''}".strip() for turn in attempt.turns]
    turns = "; ".join(seen) or "no turn"
    if sorted(call.outcome for call in attempt.calls) != ["finished"] * len(attempt.turns):
        turns += f" (calls of the engine: {', '.join(call.outcome for call in attempt.calls) or 'none'})"
    return turns if attempt.ended is None or attempt.finished else f"{reason(attempt)} ({turns})"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
