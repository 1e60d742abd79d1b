"""The check set: how well a reward source agrees with outcomes that are known, before its rewards are posted.

Two sessions of different known outcomes are a pair. The source agrees if it gives the better one the higher reward; an
equal reward counts half. The agreement is the mean over all pairs; for outcomes 0 and 1 it is the area under the ROC
curve, and 0.5 is chance. A source that compares groups is checked on the pairs within a group.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from turnwise.errors import MALFORMED, GraderFailed, SettingsError
from turnwise.rewards.grader import Grade, finite
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of a source with a check set."""

    num_sessions: int
    num_pairs: int
    value: float | None

    def line(self) -> str:
        if self.value is None:
            return f"no two of {self.num_sessions} checked sessions have different known outcomes and a reward each"
        return f"agrees with {self.value:.0%} of {self.num_pairs} pairs of {self.num_sessions} checked sessions"


def read_outcomes(path: Path) -> dict[str, float]:
    """Return the known outcome of each session: lines of JSON with `session_id` and `reward`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--check {str(path)!r} cannot be read: {error}; give a JSON Lines file") from error
    found: dict[str, float] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                outcome = json.loads(line)
                found[str(outcome["session_id"])] = finite(float(outcome["reward"]))
            except (GraderFailed, *MALFORMED) as error:
                raise SettingsError(
                    f'{path}:{number} is no known outcome; write {{"session_id": "…", "reward": 1}}'
                ) from error
    return found


def units_of(documents: Sequence[Json], *, relative: bool) -> list[list[Json]]:
    """Return what is decided on together: single sessions, or for a relative source the sessions of each group."""
    if not relative:
        return [[document] for document in documents]
    groups: dict[str, list[Json]] = defaultdict(list)
    for document in documents:
        groups[document["session"]["group_id"] or document["session"]["session_id"]].append(document)
    return list(groups.values())


def session_rewards(unit: Sequence[Json], rewards: Iterable[Grade]) -> dict[str, float]:
    """Return the total reward of each session of a unit; sessions without a reward are left out."""
    totals: dict[str, float] = defaultdict(float)
    for reward in rewards:
        totals[reward.session_id or unit[0]["session"]["session_id"]] += reward.value
    return dict(totals)


def agreement(outcomes: Mapping[str, float], units: Iterable[Mapping[str, float]]) -> Agreement:
    """Return the agreement over all pairs of each unit.

    `outcomes` are the known outcomes by session, `units` the rewards that the source gave; sessions of different units
    are not compared.
    """
    num_sessions, scores = 0, list[float]()
    for rewards in units:
        num_sessions += len(rewards)
        for first, second in itertools.combinations(rewards, 2):
            known, given = outcomes[first] - outcomes[second], rewards[first] - rewards[second]
            if known:
                scores.append(0.5 if not given else float((known > 0) == (given > 0)))
    return Agreement(num_sessions, len(scores), sum(scores) / len(scores) if scores else None)


def require(found: Agreement, minimum: float) -> None:
    """Check that a source may be trusted.

    Raises:
        GraderFailed: its agreement is below the minimum, or unknown.
    """
    if found.value is None or found.value < minimum:
        raise GraderFailed(
            f"the source {found.line()}; at least {minimum:.0%} are required (--min-agreement), so no reward was "
            "posted: change the rubric or the judge, or lower the bound"
        )
