"""A task for a pretrained model: find out where a person's boss is, with two lookups and an answer.

The agent's commands are text: `lookup("name")` and `answer("city")`. Held-out tasks use names and cities that no
training task has, so only the procedure can be learnt. The reward, 0 or 1, comes at the end.

Names are quoted wherever they stand, because a tokenizer writes a word after a space with other tokens than after a
quotation mark: a small model would have to learn by heart how each name is spelt.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: Mapping[str, tuple[str, ...]] = {
    "train": _words(
        "Ada Adam Agnes Alan Albert Alex Alice Alma Andrew Angela Anton Arthur Axel Barbara Bella Ben Bernard "
        "Betty Bob Boris Brian Bruno Carl Carla Carol Cecil Celia Chloe Claire Clara Colin Daisy Dan Daphne "
        "David Dennis Diana Dora Doris Dylan Edgar Edith Edward Ella Elsa Emil Emily Emma Ernest Esther Eva "
        "Felix Finn Fiona Flora Frank Freda Gary George Gerald Gina Gloria Gordon Grace Greta Hannah Harold "
        "Harry Hazel Heidi Helen Henry Herbert Hilda Hugo Ian Ida Ines Irene Isaac Ivan Jack Jacob Jane Janet "
        "Jasper Jenny Jerome Joan Joel Jonas Joseph Judith Julian Karen Keith Kevin Kim Kurt Lara Laura Leo "
        "Leon Lewis Lillian Linda Lisa Lorenz Louis Luke Lydia Mabel Magnus Marcel Maria Martha Martin Max "
        "Mia Miles Mona Monica Nadia Nathan Neil Nicole Nora Norman Olga Oliver Otto Pamela Paul Paula Philip "
        "Quinn Ralph Rebecca Richard Rita Robert Roger Rosa Roy Sally Sam Sandra Sean Selma Simon Stella "
        "Steven Susan Sven Sylvia Tess Theo Thomas Tina Uma Ursula Vera Vincent Walter Will Xenia Yara Zoe"
    ),
    "eval": _words(
        "Amy Anita Bill Bruce Cora Eric Fred Glenn Iris James John Julia Karl Kate Lena Lucy Mark Mary Nina "
        "Oscar Peter Rachel Ruth Sara Tim Toby Victor Vivian Wendy Zack"
    ),
}
"""First names by split; no name is in both, nor in the agent's example."""
CITIES: Mapping[str, tuple[str, ...]] = {
    "train": _words(
        "Accra Algiers Amman Ankara Antwerp Athens Atlanta Austin Baghdad Bangkok Barcelona Basel Beirut "
        "Belfast Belgrade Bergen Berlin Bogota Bologna Bombay Bonn Boston Bremen Brisbane Bristol Brussels "
        "Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff Chicago Cologne Copenhagen Cork Dakar "
        "Delhi Denver Detroit Dortmund Dresden Dubai Dublin Durban Edinburgh Florence Geneva Genoa Ghent "
        "Glasgow Granada Graz Hamburg Hanoi Hanover Helsinki Houston Istanbul Jakarta Kabul Kiev Kingston "
        "Kyoto Lagos Leeds Leipzig Lima Linz Lisbon Liverpool London Lyon Madrid Malaga Manchester Manila "
        "Marseille Melbourne Memphis Montreal Moscow Nagoya Nairobi Nantes Naples Oslo Ottawa Oxford Palermo "
        "Paris Perth Philadelphia Phoenix Porto Quebec Quito Riga Rotterdam Salzburg Santiago Seattle Seoul "
        "Seville Shanghai Singapore Sofia Stockholm Strasbourg Stuttgart Sydney Tallinn Tehran Tokyo Toronto "
        "Toulouse Trieste Tripoli Tunis Turin Utrecht Valencia Vancouver Venice Vienna Vilnius Wellington "
        "York"
    ),
    "eval": _words(
        "Bilbao Dallas Havana Krakow Leiden Lublin Miami Milan Munich Nice Odessa Orlando Prague Rome Tampa "
        "Tbilisi Verona Warsaw Zagreb Zurich"
    ),
}
"""Cities by split; no city is in both."""
_ANSWER = re.compile(r'answer\("(\w+)"\)')


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
        return {"task_id": self.task_id, "question": self.question, "records": dict(self.records)}


def make_task(split: Literal["train", "eval"], index: int, seed: int) -> BossTask:
    """Return the `index`-th task of a split; the same arguments give the same task."""
    rng = random.Random(f"bosses/{split}/{seed}/{index}")  # noqa: S311 - a game, no secret
    person, boss = rng.sample(NAMES[split], 2)
    answer = rng.choice(CITIES[split])
    records = {person: f'boss="{boss}"', boss: f'city="{answer}"'}
    return BossTask(f"bosses-{split}-{seed}-{index}", f'Where is the boss of "{person}"?', records, answer)


def reward(task: BossTask, final_text: str) -> float:
    """Return 1.0 if the text is the command that answers with the right city, else 0.0."""
    found = _ANSWER.fullmatch(final_text.strip())
    return 1.0 if found is not None and found[1] == task.answer else 0.0
