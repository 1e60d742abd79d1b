"""The demo's world: follow each boss from a person, and say in which city the last one lives.

Every task is a fresh random graph of people, so nothing can be memorised: an agent has to look somebody up, read
the record, and decide from it whom to look up next or that it is time to answer. The reward is 0 or 1 and comes
only at the end, hence several turns share the credit of one number.

The same module writes the conversations of the warm-up, whose player knows the format but not the task: it copies
a random value of the latest record. What is left to learn by reward is which value to follow and when to answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Split = Literal["train", "eval", "warm_up"]
"""`warm_up` tasks are played by the warm-up's player alone, never by the policy."""

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
"""The shortest and the longest trail, in lookups."""

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
"""How often the warm-up's player answers when it sees a city, instead of looking the city up."""

WARM_UP_NAME_ANSWER_RATE = 0.1
"""How often it answers when it sees names, instead of looking one of them up. Were it as high as for cities, answering
at once would be the first thing that the rewards teach, and the longer trails would never be explored."""

GIVING_UP = "I do not know."
"""What the warm-up's player replies once the tool has told it of an error."""

_QUESTION_START = "Follow each boss from "
_ANSWER = re.compile(r'The answer is "([^"]*)"\.')
_OFF_TRAIL_CITY_RATE = 0.5


@dataclass(frozen=True)
class TrailTask:
    """One question about one random graph of people."""

    task_id: str
    """`trail-{split}-{seed}-{index}`."""

    question: str

    records: Mapping[str, Record]
    """What the tool knows of each person: `{"boss": …, "friend": …}`, or `{"city": …}` where a trail ends."""

    answer: str
    """The city at the end of the trail of bosses."""

    num_hops: int
    """Lookups that the shortest solution needs, 1 to `MAX_HOPS`."""

    @property
    def max_lookups(self) -> int:
        """Lookups that an agent may make: one more than it needs."""
        return self.num_hops + 1

    def for_agent(self) -> dict[str, Any]:
        """Return what an agent may see, ready for JSON: everything but the answer."""
        return {
            "task_id": self.task_id,
            "question": self.question,
            "records": {name: dict(record) for name, record in self.records.items()},
            "max_lookups": self.max_lookups,
        }


def make_task(split: Split, index: int, seed: int) -> TrailTask:
    """Return the `index`-th task of a split: always the same one for the same arguments.

    The three arguments together name the random stream, hence no train task shares its stream with an eval task.
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
    """Answer one call of the tool, as the JSON that the model reads."""
    record = records.get(name) if isinstance(name, str) else None
    return json.dumps({"error": "nobody"} if record is None else dict(record))


def reward(task: TrailTask, final_text: str) -> float:
    """Return 1.0 if the text is the answer in the form that the system prompt asks for, else 0.0."""
    found = _ANSWER.fullmatch(final_text.strip())
    return 1.0 if found is not None and found[1] == task.answer else 0.0


def opening(task: TrailTask) -> list[Message]:
    """Return the two messages that every conversation about the task begins with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task.question}]


def warm_up_conversation(task: TrailTask, rng: random.Random) -> list[Message]:
    """Return one conversation of a player that has the format and no idea of the task.

    It starts at the person in the question, then answers with, or looks up, a random value of the latest record, and
    gives up when it looked up something that is no person. It does not know how many lookups it has: a conversation
    that is longer than any agent's is cut.
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
    """Return the person in whom the trail of a task starts."""
    return task.question.removeprefix(_QUESTION_START).partition(".")[0]


def warm_up_answer_rate(record: Record) -> float:
    """Return how often the warm-up's player answers when it sees this record."""
    return WARM_UP_CITY_ANSWER_RATE if "city" in record else WARM_UP_NAME_ANSWER_RATE


def _off_trail_record(rng: random.Random, name: str, others: list[str], wrong_cities: list[str]) -> Record:
    """Return a record that leads anywhere but to the trail or to its city."""
    if rng.random() < _OFF_TRAIL_CITY_RATE:
        return {"city": rng.choice(wrong_cities)}
    boss, friend = rng.sample([other for other in others if other != name], 2)
    return {"boss": boss, "friend": friend}


def _lookup_messages(call_id: str, name: str, result: str) -> list[Message]:
    """Return an assistant's call of the tool and the tool's reply."""
    call = {"name": "lookup", "arguments": json.dumps({"name": name})}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
