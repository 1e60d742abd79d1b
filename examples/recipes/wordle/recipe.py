"""Guess a word of five letters from the marks of earlier guesses; the reward is 1 for the word."""

import json
import re
from collections import Counter
from random import Random

from openai import AsyncOpenAI

WORDS = {
    "train": (
        "about above actor admit adult after again agent agree ahead alarm album alert alike alive allow alone "
        "along alter among anger angle angry apart apple apply arena argue arise array aside asset avoid award "
        "aware awful badly baker bases basic basis beach began begin begun being below bench birth black blame "
        "blind block blood board boost booth bound brain brand bread break breed brief bring broad brown build "
        "built buyer cable carry catch cause chain chair"
    ),
    "eval": (
        "chart chase cheap check chest chief child china chose civil claim class clean clear click clock close "
        "coach coast could count court cover craft crash cream crime cross crowd crown curve cycle daily dance "
        "dated dealt death debut"
    ),
}
"""A held-out word is the word of no training task."""
COLOURS = {"train": "red blue green gold pink grey white", "eval": "black brown orange silver purple"}
RULE = (
    "Guess the word of five letters in six guesses. Each guess is marked: G for a letter in its place, Y for a letter "
    "elsewhere in the word, X for a letter that is not in it. Write each guess as <guess>WORD</guess>."
)
CHOICE = [
    {"role": "system", "content": 'Reply with guess("word") only. Never guess a word again.'},
    {"role": "user", "content": '"one" "two" "six" "ten"'},
    {"role": "assistant", "content": 'guess("two")'},
    {"role": "user", "content": '"two" is wrong'},
    {"role": "assistant", "content": 'guess("ten")'},
    {"role": "user", "content": '"ten" is right'},
    {"role": "assistant", "content": "thanks"},
    {"role": "user", "content": '"sun" "dog" "hat" "pen"'},
    {"role": "assistant", "content": 'guess("sun")'},
    {"role": "user", "content": '"sun" is right'},
    {"role": "assistant", "content": "thanks"},
]
GUESS = {False: re.compile(r"<guess>\s*\[?(\w+)\]?\s*</guess>"), True: re.compile(r'guess\("(\w+)"\)')}
PARTIAL = 0.2


def make_task(random: Random, split: str, choice: bool = False) -> dict:
    if not choice:
        answer = random.choice(WORDS[split].split())
        return {"choice": False, "question": "Your first guess?", "max_guesses": 6, "word": answer, "answer": answer}
    words = random.sample(COLOURS[split].split(), 4)
    answer, shown = random.choice(words), " ".join(f'"{word}"' for word in words)
    return {"choice": True, "question": shown, "max_guesses": 3, "word": answer, "answer": answer}


def marks(guess: str, word: str) -> str:
    """Return the marks of a guess: a letter is marked Y as often as the word has it out of its place."""
    left = Counter(letter for letter, other in zip(word, guess, strict=True) if letter != other)
    found = []
    for letter, other in zip(guess, word, strict=True):
        is_elsewhere = letter != other and left[letter] > 0
        left[letter] -= is_elsewhere
        found.append("G" if letter == other else "Y" if is_elsewhere else "X")
    return "".join(found)


def reward(task: dict, guesses: str) -> float:
    """Return 1 for the word, else a fifth of the share of letters that the last guess has in their place."""
    made, word = json.loads(guesses or "[]"), task["answer"]
    if word in made:
        return 1.0
    if task["choice"] or not made:
        return 0.0
    return PARTIAL * marks(made[-1], word).count("G") / len(word)


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    choice, word, guesses = task["choice"], task["word"], []
    messages = [*(CHOICE if choice else [{"role": "system", "content": RULE}])]
    messages.append({"role": "user", "content": task["question"]})
    limit, temperature = (8, 0.8) if choice else (1024, 1.0)
    while len(guesses) < task["max_guesses"] and word not in guesses:
        completion = await client.chat.completions.create(
            model=model, messages=messages, max_completion_tokens=limit, temperature=temperature
        )
        text = completion.choices[0].message.content or ""
        found = GUESS[choice].findall(text.lower())
        if not found or (not choice and len(found[-1]) != len(word)):
            break
        guesses.append(found[-1])
        marked = f'"{found[-1]}" is wrong' if choice else marks(found[-1], word)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": marked}]
    return json.dumps(guesses)
