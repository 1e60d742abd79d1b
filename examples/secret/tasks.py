"""A secret of six names in the first message, three other lists of six in the second, and a question after them.

Between the second message and the question the agent's context is summed up, so the answer is right only if the summary
has the secret. No message says which list the question is about. The warm-up's player sums up one of the four lists at
random, and answers with the names of the summary.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from examples.secret.agent import COMPACTION_PROMPT, SYSTEM_PROMPT
from turnwise.default_models.trail import NAMES, Message, TrailTask, WarmUp

NUM_NAMES = 6
LISTS = ("Secret", "Guests", "Winners", "Absent")
AFTER_SUMMARY_RATE = 0.3
"""Share of the warm-up's conversations that go on from a summary; they are shorter and learnt sooner."""
NUM_WARM_UP_STEPS = 600, 900
MOST_LOSS = 0.25
"""A model of a greater loss after fewer steps does not copy names yet, and earns nothing: it gets the next number."""
QUESTION = "Which names?"
ANSWER = "OK."


@dataclass(frozen=True)
class SecretTask:
    """A secret among other names."""

    task_id: str
    messages: list[str]
    secret: str

    def for_agent(self) -> dict[str, Any]:
        return {"task_id": self.task_id, "messages": self.messages}


def make_task(split: Literal["train", "eval"], index: int, seed: int) -> SecretTask:
    """Return the `index`-th task of a split; the same arguments give the same task."""
    lists = _lists(random.Random(f"secret/{split}/{seed}/{index}"))  # noqa: S311 - a game, no secret
    return SecretTask(f"secret-{split}-{seed}-{index}", [*_said(lists), QUESTION], lists[LISTS[0]])


def reward(task: SecretTask, final_text: str) -> float:
    """Return 1.0 if the text is the secret, all six names in order."""
    return float(final_text.split() == task.secret.split())


def _lists(rng: random.Random) -> dict[str, str]:
    names = rng.sample(NAMES, NUM_NAMES * len(LISTS))
    return {name: " ".join(names[at * NUM_NAMES : (at + 1) * NUM_NAMES]) for at, name in enumerate(LISTS)}


def _said(lists: dict[str, str]) -> list[str]:
    first, *others = (f"{name}: {given}" for name, given in lists.items())
    return [first, "\n".join(others)]


def _conversation(_: TrailTask, rng: random.Random) -> list[Message]:
    """Return a conversation up to its summary, or one that goes on from a summary."""
    lists = _lists(rng)
    name = rng.choice(LISTS)
    asked, answers = [*_said(lists), COMPACTION_PROMPT], [ANSWER, ANSWER, f"{name}: {lists[name]}"]
    if rng.random() < AFTER_SUMMARY_RATE:
        asked, answers = [f"Summary: {name}: {lists[name]}", QUESTION], [None, lists[name]]
    said: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}]
    for text, reply in zip(asked, answers, strict=True):
        said += [{"role": "user", "content": text}] + [{"role": "assistant", "content": reply}] * (reply is not None)
    return said


WARM_UP = WarmUp("secret", _conversation, None)
