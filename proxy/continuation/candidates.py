"""Choose the session of a call that names none, where several sessions contain the same conversation.

Parallel rollouts of one task send equal prompts and may get equal replies. The ids of tool calls are unique to a run
and come back with the next request. Without them, runs with equal conversations are interchangeable, so each one
continues a turn that nothing extends yet. If every candidate has been extended, the choice is not decidable. A reply
that was cut off is continued only where no complete reply is equal to it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from proxy.continuation.forest import KnownTurn, is_free
from proxy.continuation.live import LiveSession


class Candidate(NamedTuple):
    """A session that contains the conversation, and the turn that the call would extend in it."""

    live: LiveSession
    turn: KnownTurn


def choose_candidate(
    candidates: Sequence[Candidate], call_ids: frozenset[str], reserved: Container[str], *, is_complete: bool
) -> Candidate | None:
    """Return the candidate that the call continues; None where that is not decidable.

    Args:
        candidates: the oldest first.
        call_ids: ids of the tool calls that the conversation repeats.
        reserved: ids of turns that running calls extend.
        is_complete: whether these are all candidates of the store, not only those in memory.
    """
    candidates = [candidate for candidate in candidates if not candidate.turn.is_aborted] or candidates
    known_ids = [candidate.live.forest.call_ids(candidate.turn) for candidate in candidates]
    same_run = [candidate for candidate, ids in zip(candidates, known_ids, strict=True) if ids & call_ids]
    if same_run:
        free = [candidate for candidate in same_run if is_free(candidate.turn, reserved)]
        return (free or same_run)[-1]
    is_other_run = bool(call_ids) and any(known_ids)
    if is_other_run and not is_complete:
        return None
    free = [candidate for candidate in candidates if is_free(candidate.turn, reserved)]
    if free:
        return free[-1]
    num_sessions = len({candidate.live.session.session_id for candidate in candidates})
    is_branch = is_complete and num_sessions == 1 and not is_other_run
    return candidates[-1] if is_branch else None
