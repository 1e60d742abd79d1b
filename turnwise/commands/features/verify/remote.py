"""What a proxy returns over HTTP, checked by whoever reads it: the structure of sessions, and recomputed logprobs.

The client rebuilds each turn from its JSON and applies the same rules as the check of a database. Digests, updates and
weights' files are left to that check: a digest covers fields that the API does not return.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from turnwise.chains import is_trainable
from turnwise.errors import Conflict
from turnwise.features.verify.records import Verification, check_turns
from turnwise.types import Json, Outcome, Turn

if TYPE_CHECKING:
    from turnwise.client import Client


class ServedLogprobs:
    """Compares logprobs with those that the proxy's engine computes under the served version; needs an admin key.

    The arguments are those of `LogprobChecker`.
    """

    def __init__(self, client: Client, *, tolerance: float, version_distance: int) -> None:
        self._client = client
        self._tolerance = tolerance
        self._version_distance = version_distance

    def check(self, turn: Turn, place: str, report: Verification) -> None:
        try:
            found = self._client.recomputed_logprobs(turn.turn_id)
        except Conflict as error:
            report.not_checked[str(error)] += 1
            return
        served = found["policy_version"]
        distance = max(abs(served - version) for version in (turn.policy_version_first, turn.policy_version_last))
        if distance > self._version_distance:
            reason = f"sampled under version {turn.policy_version_first}, version {served} is served"
            report.not_checked[reason] += 1
            return
        for index, (stored, now) in enumerate(zip(turn.logprobs, found["after"], strict=False)):
            value = float("-inf") if now is None else now
            report.compare_logprobs(
                float(stored), value, self._tolerance, f"{place} logprobs[{index}]", "the engine gives"
            )
        report.checked["turns with logprobs recomputed"] += 1


def verify_served(
    client: Client,
    sessions: Sequence[Json],
    *,
    checker: ServedLogprobs | None,
    share: float,
    seed: int,
    progress: Callable[[int, int], None],
) -> Verification:
    """Check sessions that a proxy returns; the arguments are those of `turnwise.features.verify.records.verify`."""
    report, draw = Verification(), random.Random(seed)  # noqa: S311  a sample of turns, no secret
    report.checked["sessions"] = 0
    instants = ((each["version"], each["activated_at"]) for each in client.policies())
    served_at = {version: datetime.fromisoformat(instant) for version, instant in instants if instant is not None}
    for number, session in enumerate(sessions, 1):
        session_id = session["session_id"]
        turns = [_turn(each) for each in client.turns(session_id)]
        if client.session(session_id)["num_turns"] != session["num_turns"]:
            report.not_checked["sessions that got turns meanwhile"] += 1
        elif check_turns(session_id, session["num_turns"], turns, report, served_at) and checker is not None:
            for turn in filter(is_trainable, turns):
                if draw.random() < share:
                    checker.check(turn, f"session {session_id!r} turn {turn.turn_id!r}", report)
        progress(number, len(sessions))
    return report


def _turn(found: Json) -> Turn:
    copied = ("turn_id", "session_id", "parent_turn_id", "chain_id", "seq", "prompt_length")
    return Turn(
        **{name: found[name] for name in (*copied, "policy_version_first", "policy_version_last")},
        prompt_delta=np.array(found["prompt_token_ids"], np.int32),
        token_ids=np.array(found["token_ids"], np.int32),
        logprobs=np.array(found["logprobs"], np.float32),
        outcome=Outcome(found["outcome"]),
        created_at=datetime.fromisoformat(found["created_at"]),
        duration_seconds=found["duration_seconds"],
    )
