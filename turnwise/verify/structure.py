"""Every chain's tokens against its parent's, and every turn against the rules that its record must follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np

from turnwise.chains import is_trainable
from turnwise.types import Turn
from turnwise.verify.report import Report


def check_turns(
    session_id: str, num_turns: int, turns: Sequence[Turn], report: Report, served_at: Mapping[int, datetime]
) -> bool:
    """Check the turns of a session: order, parents, lengths, logprobs and versions; return whether all is sound.

    Args:
        session_id: The session.
        num_turns: Its number of turns, as recorded with it.
        turns: Its turns, in order of `seq`.
        report: Gets what is found.
        served_at: When engines began to serve each version, the last time.
    """
    before = report.num_mismatches
    known: dict[str, Turn] = {}
    report.checked["sessions"] += 1
    for seq, turn in enumerate(turns):
        report.checked["turns"] += 1
        report.checked["sampled tokens"] += int(turn.token_ids.size)
        place = f"session {session_id!r} turn {turn.turn_id!r}"
        for field, problem in _problems(turn, seq, known, served_at):
            report.add("structure", f"{place} {field}", problem)
        known[turn.turn_id] = turn
    if num_turns != len(turns):
        place = f"session {session_id!r} num_turns"
        report.add("structure", place, f"{num_turns} recorded, {len(turns)} turns stored")
    return report.num_mismatches == before


def _problems(turn: Turn, seq: int, known: dict[str, Turn], served_at: Mapping[int, datetime]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if turn.seq != seq:
        found.append(("seq", f"is {turn.seq}, {seq} turns were stored before it"))
    found += _prompt_problems(turn, known)
    if turn.policy_version_first > turn.policy_version_last and not _was_rolled_back(turn, served_at):
        found.append(("policy_version_first", f"{turn.policy_version_first} > last, {turn.policy_version_last}"))
    if is_trainable(turn):
        found += _sample_problems(turn)
    if min((*turn.prompt_delta[turn.prompt_delta < 0], *turn.token_ids[turn.token_ids < 0]), default=0) < 0:
        found.append(("token_ids", "a token id is negative"))
    return found


def _was_rolled_back(turn: Turn, served_at: Mapping[int, datetime]) -> bool:
    began_at = served_at.get(turn.policy_version_last)
    return began_at is not None and began_at >= turn.created_at - timedelta(seconds=turn.duration_seconds)


def _prompt_problems(turn: Turn, known: dict[str, Turn]) -> list[tuple[str, str]]:
    before = 0
    if turn.parent_turn_id is not None:
        parent = known.get(turn.parent_turn_id)
        if parent is None:
            return [("parent_turn_id", f"{turn.parent_turn_id!r} is no earlier turn of the session")]
        before = parent.prompt_length + int(parent.token_ids.size)
    length = before + int(turn.prompt_delta.size)
    if turn.prompt_length == length:
        return []
    return [("prompt_length", f"is {turn.prompt_length}; its parent's tokens and its own are {length}")]


def _sample_problems(turn: Turn) -> list[tuple[str, str]]:
    if turn.logprobs.size != turn.token_ids.size:
        return [("logprobs", f"{turn.logprobs.size} logprobs of {turn.token_ids.size} sampled tokens")]
    wrong = np.flatnonzero(~np.isfinite(turn.logprobs) | (turn.logprobs > 0))
    return [(f"logprobs[{index}]", f"{turn.logprobs[index]} is no logarithm of a probability") for index in wrong[:1]]
