"""The task of the small model: start at a person, follow each boss, and name the city in which the last one lives.

Each task is a new random graph of people, so answers cannot be memorised: the agent looks up a person, reads the
record, and decides whom to look up next or whether to answer. The reward, 0 or 1, comes only at the end, so several
turns share one reward.

The module also generates the warm-up conversations. Their player knows the format but not the task: it copies a random
value of the latest record. The policy learns from rewards which value to follow and when to answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Split = Literal["train", "eval", "warm_up"]
"""Only the warm-up uses `warm_up` tasks; the policy never sees them."""

Record = Mapping[str, str]
Message = dict[str, Any]

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gwen", "Hugo", "Ines", "Jack", "Kim", "Leo"),
    *("Mia", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tess", "Uma", "Vera", "Will", "Yara", "Zoe"),
)
CITIES = (
    *("Accra", "Bergen", "Cairo", "Delhi", "Essen", "Fargo", "Ghent", "Hanoi", "Izmir", "Jaipur"),
    *("Kyoto", "Lima", "Malmo", "Nice", "Oslo", "Porto", "Quito", "Riga", "Seoul", "Turin"),
)

MIN_HOPS, MAX_HOPS = 1, 3

SYSTEM_PROMPT = 'Look people up, then reply: The answer is "CITY".'

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a person up.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
]

WARM_UP_CITY_ANSWER_RATE = 0.4
"""Probability that the warm-up's player answers when it sees a city, instead of looking the city up."""

WARM_UP_NAME_ANSWER_RATE = 0.1
"""Probability that it answers when it sees names, instead of looking up one of them. With a rate as high as for cities,
the policy would first learn to answer immediately and would not explore the longer trails."""

GIVING_UP = "I do not know."

_QUESTION_START = "Follow each boss from "
_ANSWER = re.compile(r'The answer is "([^"]*)"\.')
_OFF_TRAIL_CITY_RATE = 0.5


@dataclass(frozen=True)
class TrailTask:
    """A question about a random graph of people."""

    task_id: str

    question: str

    records: Mapping[str, Record]
    """The tool's record of each person: `{"boss": …, "friend": …}`, or `{"city": …}` at the end of a trail."""

    answer: str

    num_hops: int

    @property
    def max_lookups(self) -> int:
        return self.num_hops + 1

    def for_agent(self) -> dict[str, Any]:
        """Return the task as JSON for an agent, without the answer."""
        return {
            "task_id": self.task_id,
            "question": self.question,
            "records": {name: dict(record) for name, record in self.records.items()},
            "max_lookups": self.max_lookups,
        }


def make_task(split: Split, index: int, seed: int) -> TrailTask:
    """Return the `index`-th task of a split; the same arguments give the same task.

    The three arguments together seed the random generator, so train tasks and eval tasks have different seeds.
    """
    rng = random.Random(f"trail/{split}/{seed}/{index}")  # noqa: S311 - a game, no secret
    num_hops = rng.randint(MIN_HOPS, MAX_HOPS)
    people = rng.sample(NAMES, len(NAMES))
    trail, others = people[:num_hops], people[num_hops:]
    answer, *wrong_cities = rng.sample(CITIES, len(CITIES))
    records: dict[str, Record] = {name: {"boss": boss, "friend": rng.choice(others)} for name, boss in pairwise(trail)}
    records[trail[-1]] = {"city": answer}
    for name in others:
        records[name] = _off_trail_record(rng, name, others, wrong_cities)
    question = f"{_QUESTION_START}{trail[0]}. Which city?"
    return TrailTask(f"trail-{split}-{seed}-{index}", question, dict(sorted(records.items())), answer, num_hops)


def lookup(records: Mapping[str, Record], name: object) -> str:
    record = records.get(name) if isinstance(name, str) else None
    return json.dumps({"error": "nobody"} if record is None else dict(record))


def reward(task: TrailTask, final_text: str) -> float:
    """Return 1.0 if the text is the answer in the format of the system prompt, else 0.0."""
    found = _ANSWER.fullmatch(final_text.strip())
    return 1.0 if found is not None and found[1] == task.answer else 0.0


def opening(task: TrailTask) -> list[Message]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.question}]


def warm_up_conversation(task: TrailTask, rng: random.Random) -> list[Message]:
    """Return a conversation of a player that knows the format but not the task.

    The player starts at the person in the question. It then answers with, or looks up, a random value of the latest
    record, and gives up after a lookup of a name that is not a person. It does not know the limit of lookups: a
    conversation ends at the length of an agent's longest one.
    """
    messages = opening(task)
    name = first_person(task)
    for number in range(MAX_HOPS + 1):
        messages += _lookup_messages(f"call_{number}", name, lookup(task.records, name))
        if name not in task.records:
            return [*messages, {"role": "assistant", "content": GIVING_UP}]
        record = task.records[name]
        name = rng.choice(list(record.values()))
        if rng.random() < warm_up_answer_rate(record):
            return [*messages, {"role": "assistant", "content": f'The answer is "{name}".'}]
    return messages


def first_person(task: TrailTask) -> str:
    return task.question.removeprefix(_QUESTION_START).partition(".")[0]


def warm_up_answer_rate(record: Record) -> float:
    return WARM_UP_CITY_ANSWER_RATE if "city" in record else WARM_UP_NAME_ANSWER_RATE


def _off_trail_record(rng: random.Random, name: str, others: list[str], wrong_cities: list[str]) -> Record:
    if rng.random() < _OFF_TRAIL_CITY_RATE:
        return {"city": rng.choice(wrong_cities)}
    boss, friend = rng.sample([other for other in others if other != name], 2)
    return {"boss": boss, "friend": friend}


def _lookup_messages(call_id: str, name: str, result: str) -> list[Message]:
    call = {"name": "lookup", "arguments": json.dumps({"name": name})}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


@dataclass(frozen=True)
class WarmUp:
    """Conversations that teach a model the format of a task. Two of one name are the same."""

    name: str
    conversation: Callable[[TrailTask, random.Random], list[Message]]
    tools: list[dict[str, Any]] | None


WARM_UP = WarmUp("trail", warm_up_conversation, TOOLS)
