"""A task for a pretrained model: find out where a person's boss is, with two lookups and an answer.

The agent's commands are text: `LOOKUP(name)` and `ANSWER(city)`. Held-out tasks use names and cities that no training
task has, so only the procedure can be learnt. The reward, 0 or 1, comes at the end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NAMES: Mapping[str, tuple[str, ...]] = {
    "train": (
        *("Ada", "Ben", "Carl", "Dan", "Emma", "Finn", "Greta", "Hugo", "Ines", "Jack", "Kim", "Leo", "Mia", "Nora"),
        *("Olga", "Paul", "Quinn", "Rosa", "Sam", "Tess", "Uma", "Vera", "Will", "Xenia", "Yara", "Zoe", "Alma", "Bob"),
        *("Clara", "David", "Elsa", "Frank", "Gina", "Henry"),
    ),
    "eval": (
        *("Iris", "John", "Karl", "Lucy", "Mark", "Nina", "Oscar", "Peter", "Ruth", "Sara", "Tim", "Victor", "Wendy"),
        *("Amy", "Eric", "Julia"),
    ),
}
"""First names by split; no name is in both."""
CITIES: Mapping[str, tuple[str, ...]] = {
    "train": (
        *("Paris", "London", "Madrid", "Berlin", "Vienna", "Oslo", "Dublin", "Lisbon", "Athens", "Cairo", "Tokyo"),
        *("Delhi", "Lima", "Boston", "Chicago", "Denver", "Sydney", "Toronto", "Seoul", "Moscow"),
    ),
    "eval": ("Rome", "Prague", "Warsaw", "Geneva", "Milan", "Dallas", "Miami", "Havana", "Zurich", "Munich"),
}
"""Cities by split; no city is in both."""
_ANSWER = re.compile(r"ANSWER\((\w+)\)")


@dataclass(frozen=True)
class BossTask:
    """A question about two people."""

    task_id: str
    """`bosses-{split}-{seed}-{index}`."""
    question: str
    records: Mapping[str, str]
    """What a lookup of each person answers."""
    answer: str
    """The city of the boss."""

    def for_agent(self) -> dict[str, Any]:
        """Return the task as JSON for an agent, without the answer."""
        return {"task_id": self.task_id, "question": self.question, "records": dict(self.records)}


def make_task(split: Literal["train", "eval"], index: int, seed: int) -> BossTask:
    """Return the `index`-th task of a split; the same arguments give the same task."""
    rng = random.Random(f"bosses/{split}/{seed}/{index}")  # noqa: S311 - a game, no secret
    person, boss = rng.sample(NAMES[split], 2)
    answer = rng.choice(CITIES[split])
    records = {person: f"boss: {boss}", boss: f"city: {answer}"}
    return BossTask(f"bosses-{split}-{seed}-{index}", f"Where is the boss of {person}?", records, answer)


def reward(task: BossTask, final_text: str) -> float:
    """Return 1.0 if the text is the command that answers with the right city, else 0.0."""
    found = _ANSWER.fullmatch(final_text.strip())
    return 1.0 if found is not None and found[1] == task.answer else 0.0
