"""Sessions of the demo's task that are imported before training: files of conversations, read by `turnwise import`.

The warm-up's player, which chooses at random, plays tasks that no agent plays, each until a conversation ends with the
right answer, and for preferences also with a wrong one. A conversation with the right answer makes no detour, because
no other way leads to it.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from turnwise.default_models import trail
from turnwise.exchange.imports.formats import FORMATS
from turnwise.exchange.imports.tokenise import Tokeniser
from turnwise.exchange.imports.writer import ImportReport, ImportRule, import_files
from turnwise.store.database import Database
from turnwise.types import Json

FIRST_TASK = 1_000_000
"""Index of the first task of imported sessions: beyond those that agents play."""


def import_sessions(
    db: Database, model: Path, directory: Path, num_groups: int, seed: int, *, is_paired: bool
) -> ImportReport:
    """Store groups of imported sessions: a right one, and with `is_paired` also a wrong one of the same task.

    Args:
        db: The ledger.
        model: Directory of the model whose tokenizer and chat template are used.
        directory: Where the file of conversations is written.
        num_groups: Number of tasks.
        seed: Seed of the tasks and of the player.
        is_paired: Whether each group is a preference.
    """
    rng = random.Random(f"imported/{seed}")
    tasks = [trail.make_task("train", FIRST_TASK + index, seed) for index in range(num_groups)]
    path = directory / "imported.jsonl"
    path.write_text("".join(json.dumps(row(task, rng, is_paired=is_paired)) + "\n" for task in tasks), encoding="utf-8")
    rule = ImportRule(format_name="hf")
    return import_files(db, path, FORMATS["hf"], Tokeniser(str(model)), rule, lambda _: None)


def row(task: trail.TrailTask, rng: random.Random, *, is_paired: bool) -> Json:
    """Return a row of a Hugging Face chat set: a conversation, or a preferred and another one."""
    if not is_paired:
        return {"messages": play(task, rng, reward=1.0), "tools": trail.TOOLS}
    prompt = trail.opening(task)
    outputs = {
        name: play(task, rng, reward=value)[len(prompt) :] for name, value in (("chosen", 1.0), ("rejected", 0.0))
    }
    return {"prompt": prompt, "tools": trail.TOOLS} | outputs


def play(task: trail.TrailTask, rng: random.Random, *, reward: float) -> list[Json]:
    """Return the first conversation of the warm-up's player that has the reward."""
    conversations = (trail.warm_up_conversation(task, rng) for _ in itertools.count())
    return next(each for each in conversations if trail.reward(task, each[-1]["content"] or "") == reward)
