"""Name what three pictures show, in order: five colours and three shapes, drawn a little differently each time.

A session of training and one that is held out never show the same sequence of three. What a picture is called is said
nowhere in the text: without the pictures, one sequence in 512 is guessed right.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from examples.demos.plain_agent import Split

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 60, 220),
    "yellow": (235, 215, 40),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "triangle", "cross")
WORDS = (*COLOURS, *SHAPES)
NUM_PICTURES = 3
SIZE = 32
HELD_OUT = 128
"""Sequences that are never trained, of 512."""


@dataclass(frozen=True)
class PictureTask:
    words: tuple[str, ...]
    pictures: tuple[bytes, ...]
    """PNG files."""

    def for_agent(self) -> dict[str, Any]:
        return {"pictures": [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in self.pictures]}


def make_task(split: Split, index: int, seed: int, *, shuffled: bool = False) -> PictureTask:
    """Return the `index`-th task of a split; `shuffled` shows pictures that have nothing to do with the words."""
    rng = random.Random(f"colour-words/{split}/{seed}/{index}")  # noqa: S311 - a game, no secret
    words = rng.choice(sequences(split))
    shown = rng.choices(WORDS, k=NUM_PICTURES) if shuffled else words
    return PictureTask(words, tuple(png(draw(word, rng)) for word in shown))


def reward(task: PictureTask, final_text: str) -> float:
    return float(final_text == " ".join(task.words))


@functools.cache
def sequences(split: Split) -> list[tuple[str, ...]]:
    every = list(itertools.product(WORDS, repeat=NUM_PICTURES))
    random.Random(7).shuffle(every)  # noqa: S311 - a game, no secret
    return every[:HELD_OUT] if split == "eval" else every[HELD_OUT:]


def draw(word: str, rng: random.Random) -> Image.Image:
    def near(colour: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(max(value + rng.randint(-18, 18), 0), 255) for value in colour)

    if word in COLOURS:
        return Image.new("RGB", (SIZE, SIZE), near(COLOURS[word]))
    image = Image.new("RGB", (SIZE, SIZE), near((235, 235, 235)))
    drawing, ink = ImageDraw.Draw(image), tuple(rng.randrange(140) for _ in range(3))
    x, y = (rng.randint(-SIZE // 16, SIZE // 16) for _ in range(2))
    edge = SIZE // 6
    left, top, right, bottom = edge + x, edge + y, SIZE - edge + x, SIZE - edge + y
    if word == "circle":
        drawing.ellipse((left, top, right, bottom), fill=ink)
    elif word == "triangle":
        drawing.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=ink)
    else:
        half = SIZE // 10
        column, line = (left + right) // 2, (top + bottom) // 2
        drawing.rectangle((column - half, top, column + half, bottom), fill=ink)
        drawing.rectangle((left, line - half, right, line + half), fill=ink)
    return image


def png(image: Image.Image) -> bytes:
    with io.BytesIO() as file:
        image.save(file, "PNG")
        return file.getvalue()
