"""Four contradictory preferences for the same replies: what is right for one of them is wrong for the others.

The question, the tool and the agent are those of `trail`. One lookup shows the boss and the friend of the person in
the question, and a second one the city of either. Each preference wants another one of these four as the answer, and
nothing in the prompt says which.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from examples.demos.plain_agent import Split
from turnwise.default_models import trail

PREFERENCES = ("boss", "friend", "city of the boss", "city of the friend")


@dataclass(frozen=True)
class PreferenceTask:
    """A question with four answers."""

    trail: trail.TrailTask
    answers: dict[str, str]
    """By preference."""
    preference: str
    """The one that grades it."""

    def for_agent(self) -> dict[str, Any]:
        return self.trail.for_agent()


def make_task(split: Split, index: int, seed: int, *, preference: str = PREFERENCES[0]) -> PreferenceTask:
    """Return the `index`-th task of a split; the question does not depend on the preference that grades it."""
    rng = random.Random(f"preferences/{split}/{seed}/{index}")  # noqa: S311 - a game, no secret
    people, cities = rng.sample(trail.NAMES, len(trail.NAMES)), rng.sample(trail.CITIES, len(trail.CITIES))
    first, boss, friend, *others = people
    records: dict[str, trail.Record] = {first: {"boss": boss, "friend": friend}}
    records |= {boss: {"city": cities[0]}, friend: {"city": cities[1]}}
    records |= {name: {"boss": other, "friend": first} for name, other in pairwise([*others, boss])}
    task = trail.make_task(split, index, seed)
    question = task.question.replace(trail.first_person(task), first)
    answers = dict(zip(PREFERENCES, (boss, friend, cities[0], cities[1]), strict=True))
    task_id = f"preferences-{split}-{seed}-{index}"
    of_trail = trail.TrailTask(task_id, question, dict(sorted(records.items())), cities[0], 2)
    return PreferenceTask(of_trail, answers, preference)


def reward(task: PreferenceTask, final_text: str, preference: str | None = None) -> float:
    """Return 1.0 if the text is the answer that a preference wants, in the format of the system prompt, else 0.0.

    Without a preference, the task's own one decides.
    """
    return trail.reward(trail.TrailTask("", "", {}, task.answers[preference or task.preference], 2), final_text)
