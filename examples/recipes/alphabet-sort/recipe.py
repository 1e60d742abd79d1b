"""Keep a list of names in alphabetical order while names are added; the reward is a power of the lists' similarity."""

import json
import re
from difflib import SequenceMatcher
from random import Random

from openai import AsyncOpenAI

NAMES = {
    "train": (
        "Ada Adam Agnes Alan Albert Alice Andrew Angela Anton Arthur Barbara Bella Bernard Betty Bob Boris Brian "
        "Bruno Carl Carla Carol Cecil Celia Chloe Claire Colin Daisy Daphne David Dennis Diana Dora Dylan Edgar Edith "
        "Ella Elsa Emil Emma Ernest Esther Felix Finn Fiona Flora Frank Gary George Gerald Gina Gloria Gordon Grace "
        "Greta Hannah Harold Harry Hazel Heidi Helen Henry Hilda Hugo Ian Ida Irene Isaac Ivan Jack Jacob Jane Jasper "
        "Jenny Joan Jonas"
    ),
    "eval": ("Alma Amy Ben Bruce Cora Dan Doris Eric Eva Fred Glenn Gwen Hank Ines Iris James Joel Judith Julia"),
}
LIST = re.compile(r"<sorted>\s*(.*?)\s*</sorted>", re.DOTALL)
RULE = "Sort the names alphabetically, one a line, between <sorted> and </sorted>. Keep the names of earlier lists."
PAIRS = [
    {"role": "system", "content": "Reply with the names in alphabetical order."},
    {"role": "user", "content": '"Tom" "Anna"'},
    {"role": "assistant", "content": '"Anna" "Tom"'},
    {"role": "user", "content": '"Lars" "Zoe"'},
    {"role": "assistant", "content": '"Lars" "Zoe"'},
]
POWER = 8
APART = 4
"""How far apart the initials of two quoted names are in the alphabet: a small model compares close ones too rarely."""


def make_task(random: Random, split: str, num_turns: int = 3, most_names: int = 4, quoted: bool = False) -> dict:
    counts = [2 if quoted else random.randint(1, most_names) for _ in range(num_turns)]
    names = random.sample(NAMES[split].split(), sum(counts))
    while quoted and abs(ord(names[0][0]) - ord(names[1][0])) < APART:
        names = random.sample(NAMES[split].split(), sum(counts))
    turns, answer = [], []
    for first, count in zip((sum(counts[:turn]) for turn in range(num_turns)), counts, strict=True):
        turns.append(written(names[first : first + count], quoted))
        answer.append(written(sorted(names[: first + count]), quoted))
    opening = PAIRS if quoted else [{"role": "system", "content": RULE}]
    return {"opening": opening, "turns": turns, "answer": answer, "quoted": quoted}


def written(names: list[str], quoted: bool) -> str:
    return " ".join(f'"{name}"' for name in names) if quoted else "\n".join(names)


def reward(task: dict, replies: str) -> float:
    """Return the mean similarity of the turns' lists, to the power of 8; 0 or 1 for quoted names in one line."""
    given = json.loads(replies or "[]")
    if len(given) < len(task["answer"]):
        return 0.0
    if task["quoted"]:
        return float([reply.strip() for reply in given] == task["answer"])
    found = [LIST.search(reply) for reply in given]
    lists = [re.split(r"\s*\n\s*", match[1]) if match else [] for match in found]
    scores = [
        SequenceMatcher(None, names, answer.split("\n"), autojunk=False).ratio()
        for names, answer in zip(lists, task["answer"], strict=True)
    ]
    return (sum(scores) / len(scores)) ** POWER


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    messages, replies = list(task["opening"]), []
    limit, temperature = (16, 0.8) if task["quoted"] else (768, 1.0)
    for turn in task["turns"]:
        messages.append({"role": "user", "content": turn})
        completion = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=limit, temperature=temperature
        )
        replies.append(completion.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": replies[-1]})
    return json.dumps(replies)
