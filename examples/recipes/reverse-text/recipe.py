"""Reverse a text; the reward is the share of the reply that matches the reversed text, in order."""

import re
from difflib import SequenceMatcher
from random import Random

from openai import AsyncOpenAI

WORDS = {
    "train": (
        "arm bag ball bank bear bed bell bird boat book box bread bus cake car cat chair coat corn cow cup day desk "
        "dog door duck egg eye face farm fire fish flag foot fork fox frog game gate glass goat gold hair hand hat "
        "hill home horse ice jam key king knee lamp leaf leg lion milk moon mouse nail neck nest nose oak oil park "
        "path pen pig pipe plant rain ring road rock roof room rope rose salt sand sea seed sheep ship shoe shop skin "
        "sky snow song star"
    ),
    "eval": (
        "ant apple bath bee bone bowl brush clock cloud crown drum dust fan fruit gift grass hook island jar kite "
        "ladder map nut ocean owl paint pear pond queen river soap spoon stone sun table tail tea tent train tree "
        "wall wind"
    ),
}
"""Held-out texts consist of words that are in no training task."""
TAGS = re.compile(r"<reversed_text>\s*(.*?)\s*</reversed_text>", re.DOTALL)
BY_CHARACTER = "Reverse the text character by character. Write the result between <reversed_text> and </reversed_text>."
BY_WORD = [
    {"role": "system", "content": "Reply with the words in reverse order."},
    {"role": "user", "content": '"red" "blue" "green"'},
    {"role": "assistant", "content": '"green" "blue" "red"'},
    {"role": "user", "content": '"one" "two" "six"'},
    {"role": "assistant", "content": '"six" "two" "one"'},
]


def make_task(random: Random, split: str, unit: str = "character", num_words: int = 12) -> dict:
    words = random.sample(WORDS[split].split(), num_words)
    if unit == "word":
        text, answer = (" ".join(f'"{word}"' for word in some) for some in (words, words[::-1]))
        return {"unit": unit, "messages": [*BY_WORD, {"role": "user", "content": text}], "answer": answer}
    text = " ".join(words)
    messages = [{"role": "system", "content": BY_CHARACTER}, {"role": "user", "content": text}]
    return {"unit": unit, "messages": messages, "answer": text[::-1]}


def reward(task: dict, reply: str) -> float:
    if task["unit"] == "word":
        given, answer = reply.split(), task["answer"].split()
        return SequenceMatcher(None, given, answer, autojunk=False).ratio()
    found = TAGS.search(reply)
    return SequenceMatcher(None, found[1], task["answer"], autojunk=False).ratio() if found else 0.0


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    limit, temperature = (16, 0.8) if task["unit"] == "word" else (128, 1.0)
    completion = await client.chat.completions.create(
        model=model, messages=task["messages"], max_completion_tokens=limit, temperature=temperature
    )
    return completion.choices[0].message.content or ""
