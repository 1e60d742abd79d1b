"""Replies that grow too long, with and without overlong shaping: `python bench/learning/overlong.py [--seed N]`.

A variant of the tiny task in which the policy decides when a reply ends: with a token below 8, or at the limit of 16
tokens. The reward is 1 for three right tokens or more, so a longer reply never harms. `plain` trains this reward,
`shaped` subtracts the overlong penalty, and `masked` leaves out the replies that were cut off at the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from recipes import NUM_CLASSES
from tiny import ENOUGH, GROUP_SIZE, GROUPS, NUM_EVAL_SESSIONS, TinyRun

from turnwise.store import sessions, turns
from turnwise.store.rewards import add_rewards
from turnwise.types import Reward, Session

FIRST_WORD = 8
"""Tokens below this end a reply."""
LIMIT = 16
"""Tokens of the longest reply."""
WANTED = 3
"""Right tokens of a reply with the reward 1; fewer of them give a share of it."""
NUM_UPDATES = 56
EVALUATE_EVERY = 8
SHORT, LONG = 7.0, 10.0
"""Tokens of a held-out reply at the end: at most with shaping, and at least without it."""

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shaped": {"overlong_tokens": 12},
    "masked": {"overlong_mask": True},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A reply."""

    tokens: list[int]
    logprobs: list[float]

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended at the limit."""
        return self.tokens[-1] >= FIRST_WORD

    def reward(self, prompt_class: int) -> float:
        """Return its right tokens as a share of the wanted ones, at most 1."""
        right = [token >= FIRST_WORD and (token - prompt_class) % NUM_CLASSES == 0 for token in self.tokens]
        return min(sum(right) / WANTED, 1.0)


class GrowingRun(TinyRun):
    """A run whose replies are as long as the policy wants."""

    def play_groups(self) -> None:
        """Play the next training tasks, each with a whole group, and store sessions, turns and rewards."""
        prompts = [prompt for prompt in self.prompts("train", GROUPS) for _ in range(GROUP_SIZE)]
        replies = self.replies(prompts)
        with self.db.write() as conn:
            for prompt, reply in zip(prompts, replies, strict=True):
                number, run = divmod(self.num_sessions, GROUP_SIZE)
                name, of_group = f"{number}-{run}", {"group_id": f"g{number}", "group_size": GROUP_SIZE, "run": run}
                sessions.create_session(conn, Session(session_id=name, task_id=f"g{number}", **of_group))
                turn = self.turn(name, 0, prompt, np.array(reply.tokens), np.array(reply.logprobs))
                finish_reason = "length" if reply.is_cut_off else "stop"
                turns.append_turns(conn, [dataclasses.replace(turn, finish_reason=finish_reason)])
                add_rewards(conn, [Reward(session_id=name, value=reply.reward(prompt[0]))])
                sessions.end_session(conn, "default", name)
                self.num_sessions += 1

    def result(self) -> tuple[float, float]:
        """Return the mean number of tokens and the mean reward of held-out replies; nothing is stored."""
        prompts = self.prompts("eval", NUM_EVAL_SESSIONS)
        replies = self.replies(prompts)
        rewards = [reply.reward(prompt[0]) for prompt, reply in zip(prompts, replies, strict=True)]
        return float(np.mean([len(reply.tokens) for reply in replies])), float(np.mean(rewards))

    def replies(self, prompts: Sequence[list[int]]) -> list[Sampled]:
        """Return a reply to each prompt, sampled by the newest version."""
        tokens, logprobs = self.sample(np.array(prompts), LIMIT)
        found = []
        for row, row_logprobs in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            ends = [place + 1 for place, token in enumerate(row) if token < FIRST_WORD]
            length = ends[0] if ends else LIMIT
            found.append(Sampled(row[:length], row_logprobs[:length]))
        return found


def learn_length(way: str, seed: int, directory: Path) -> list[tuple[float, float]]:
    """Train one way; return the mean length and the mean reward of held-out replies, before and during training."""
    torch.set_num_threads(1)
    run = GrowingRun(WAYS[way], seed, directory)
    try:
        curve = [run.result()]
        run.play_groups()
        for number in range(1, NUM_UPDATES + 1):
            run.play_groups()  # with the version before the one in training, as with a real trainer
            run.update()
            if number % EVALUATE_EVERY == 0:
                curve.append(run.result())
        return curve
    finally:
        run.close()


def main() -> int:
    """Run each way on each seed, and print a table; the exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=list(WAYS), help="again for more; by default all")
    parser.add_argument("--seed", action="append", type=int, help="again for more; by default 0, 1 and 2")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(f"| way | seed | tokens of a reply every {EVALUATE_EVERY} updates | reward | CPU s |\n|---|---|---|---|---|")
    is_missed = False
    for way, seed in itertools.product(options.way or WAYS, options.seed or (0, 1, 2)):
        started = time.process_time()
        with tempfile.TemporaryDirectory(prefix="turnwise-overlong-") as directory:
            curve = learn_length(way, seed, Path(directory))
        length, reward = curve[-1]
        if way != "masked":  # masking alone is not expected to keep the reward
            is_missed |= reward < ENOUGH or (length > SHORT if way == "shaped" else length < LONG)
        lengths = " ".join(f"{length:.1f}" for length, _ in curve)
        rewards = " ".join(f"{reward:.2f}" for _, reward in curve)
        print(f"| {way} | {seed} | {lengths} | {rewards} | {time.process_time() - started:.0f} |", flush=True)
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
