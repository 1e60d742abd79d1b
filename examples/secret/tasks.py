"""A secret of six names in the first message, three other lists of six in the second, and a question after them.

Between the second message and the question the agent's context is summed up, so the answer is right only if the summary
has the secret. No message says which list the question is about. The warm-up's player sums up one of the four lists at
random, and answers with what the summary says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from examples.secret.agent import COMPACTION_PROMPT, SYSTEM_PROMPT
from turnwise.default_models.trail import NAMES, Message, TrailTask, WarmUp

NUM_NAMES = 6
OTHERS = ("Guests", "Winners", "Absent")
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
    return SecretTask(f"secret-{split}-{seed}-{index}", [*_said(lists), QUESTION], lists[0])


def reward(task: SecretTask, final_text: str) -> float:
    """Return 1.0 if the text is the secret, all six names in order."""
    return float(final_text.split() == task.secret.split())


def _lists(rng: random.Random) -> list[str]:
    names = rng.sample(NAMES, NUM_NAMES * (1 + len(OTHERS)))
    return [" ".join(names[at : at + NUM_NAMES]) for at in range(0, len(names), NUM_NAMES)]


def _said(lists: list[str]) -> list[str]:
    secret, *others = lists
    told = [f"{name}: {given}" for name, given in zip(OTHERS, others, strict=True)]
    return [f"Secret: {secret}", "\n".join(told)]


def _conversation(_: TrailTask, rng: random.Random) -> list[Message]:
    """Return a conversation up to its summary, or one that goes on from a summary."""
    lists = _lists(rng)
    system = {"role": "system", "content": SYSTEM_PROMPT}
    if rng.random() < 0.5:
        summary = rng.choice(lists)
        asked, answers = [f"Summary: {summary}", QUESTION], [None, summary]
    else:
        asked, answers = [*_said(lists), COMPACTION_PROMPT], [ANSWER, ANSWER, rng.choice(lists)]
    turns = zip(asked, answers, strict=True)
    said = [[{"role": "user", "content": text}, {"role": "assistant", "content": reply}] for text, reply in turns]
    return [system, *(message for turn in said for message in turn if message["content"] is not None)]


WARM_UP = WarmUp("secret", _conversation, None)
