"""Long sessions under pacing and under dropping: `python bench/learning/pacing.py [--seed N]`.

The tiny task, in which the sessions of one class of prompts take ten times as long as those of the others: their second
turn is sampled ten ticks after the first one. Time is counted in ticks: in one tick a quick session is played, or the
trainer makes one update. The trainer waits or drops by the real rules, over the real ledger. Both ways get the same
number of ticks.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny import ENOUGH, GROUP_SIZE, GROUPS, NUM_EVAL_SESSIONS, TinyRun, between, rewards_of

from trainer.claims.ledger import RunProgress
from trainer.features.pace import why_too_far_ahead
from turnwise.features.pace import oldest_version_in_flight
from turnwise.store import claims, sessions, turns
from turnwise.store.rewards import add_rewards
from turnwise.types import Reward, Session

SLOW_CLASS = 4
"""Class of the prompts whose sessions take long."""
SLOW_TICKS = 10
MAX_TICKS = 200
EVALUATE_EVERY = 10
POOR = 0.5
"""Held-out share of right tokens below which a kind of session is not learnt; chance is 0.25."""
MAX_READY = 2 * GROUPS
"""No new sessions start while so many groups wait for the trainer, as under `turnwise run`."""

WAYS: dict[str, dict[str, Any]] = {
    "pacing": {"max_versions_in_flight": 4},
    "dropping": {"max_versions_in_flight": None, "max_staleness": 2},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Open:
    """A group of slow sessions after their first turn."""

    due: int
    """Tick in which they end."""
    name: str
    prompt: list[int]
    replies: np.ndarray
    """First replies. [sessions, reply tokens]"""


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """A run."""

    quick: float
    """Held-out share of right tokens over prompts of quick classes."""
    slow: float
    num_ticks: int
    num_versions: int
    num_dropped: int
    idle: float
    """Share of the ticks in which the trainer made no update."""


class MixedRun(TinyRun):
    """A run whose sessions of one class take long."""

    def __init__(self, settings: dict[str, Any], seed: int, directory: Path) -> None:
        super().__init__(settings, seed, directory)
        self._open: list[Open] = []
        self._now = 0
        self.num_idle = self.num_dropped = 0

    def tick(self) -> None:
        """End what is due, start new sessions, and make an update if the trainer need not wait."""
        self._now += 1
        self._end_slow()
        if self._num_ready() < MAX_READY:
            self._start()
        if self._num_ready() >= GROUPS and not self._is_held():
            self.num_dropped += self.update()["num_stale_groups"]
        else:
            self.num_idle += 1

    def result(self) -> Result:
        """Return what was learnt so far."""
        prompts = self.prompts("eval", 2 * NUM_EVAL_SESSIONS)
        rewards = np.array(rewards_of(prompts, self.play(prompts)[0]))
        is_slow = np.array([prompt[0] == SLOW_CLASS for prompt in prompts])
        return Result(
            quick=float(rewards[~is_slow].mean()),
            slow=float(rewards[is_slow].mean()),
            num_ticks=self._now,
            num_versions=self.state.progress.policy_version,
            num_dropped=self.num_dropped,
            idle=self.num_idle / self._now,
        )

    def _start(self) -> None:
        for number, prompt in enumerate(self.prompts("train", GROUPS)):
            name, prompts = f"{self._now}-{number}", [prompt] * GROUP_SIZE
            if prompt[0] != SLOW_CLASS:
                replies, logprobs = self.play(prompts)
                self._store(name, prompt, replies, logprobs, rewards_of(prompts, replies))
                continue
            first, logprobs = self.sample(np.array(prompts))
            self._store(name, prompt, first[:, None], logprobs[:, None], None)
            self._open.append(Open(self._now + SLOW_TICKS, name, prompt, first))

    def _store(
        self, name: str, prompt: list[int], replies: np.ndarray, logprobs: np.ndarray, rewards: list[float] | None
    ) -> None:
        """Store a group of sessions; without rewards they stay open."""
        with self.db.write() as conn:
            for run in range(GROUP_SIZE):
                session_id = f"{name}-{run}"
                of_group = {"group_id": name, "group_size": GROUP_SIZE, "run": run}
                sessions.create_session(conn, Session(session_id=session_id, task_id=name, **of_group))
                turns.append_turns(conn, self.turns_of(session_id, prompt, replies[run], logprobs[run]))
                if rewards is not None:
                    add_rewards(conn, [Reward(session_id=session_id, value=rewards[run])])
                    sessions.end_session(conn, "default", session_id)

    def _end_slow(self) -> None:
        """Sample the second turn of the slow sessions that are due, by the newest version, and end them."""
        due = [group for group in self._open if group.due <= self._now]
        self._open = [group for group in self._open if group.due > self._now]
        for group in due:
            prompts = [group.prompt] * GROUP_SIZE
            tokens = np.hstack([prompts, group.replies, np.full((GROUP_SIZE, 1), between(0))])
            second, logprobs = self.sample(tokens)
            rewards = rewards_of(prompts, np.stack([group.replies, second], 1))
            with self.db.write() as conn:
                for run in range(GROUP_SIZE):
                    session_id = f"{group.name}-{run}"
                    turn = self.turn(session_id, 1, group.prompt, second[run], logprobs[run])
                    turns.append_turns(conn, [turn])
                    add_rewards(conn, [Reward(session_id=session_id, value=rewards[run])])
                    sessions.end_session(conn, "default", session_id)

    def _num_ready(self) -> int:
        with self.db.read() as conn:
            return claims.num_claimable(conn)[0]

    def _is_held(self) -> bool:
        """Return whether the trainer would wait: the rule that its source applies before each claim."""
        since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        with self.db.read() as conn:
            oldest = oldest_version_in_flight(conn, since)
        at = RunProgress(num_batches=1, recent_versions=self.state.progress.recent_versions)
        return why_too_far_ahead(oldest, at, self.workflow.config) is not None


def learn_mixed(settings: dict[str, Any], seed: int, directory: Path, max_ticks: int) -> Result:
    """Run until both kinds of session are learnt, or until the last tick."""
    torch.set_num_threads(1)
    run = MixedRun(settings, seed, directory)
    try:
        for number in range(1, max_ticks + 1):
            run.tick()
            if number % EVALUATE_EVERY == 0 or number == max_ticks:
                result = run.result()
                if min(result.quick, result.slow) >= ENOUGH:
                    break
        return result
    finally:
        run.close()


def main() -> int:
    """Run both ways on each seed, and print a table; the exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", action="append", type=int, help="again for more; by default 0, 1 and 2")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="by default both, for the same time")
    parser.add_argument("--max-ticks", type=int, default=MAX_TICKS)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # each dropped group is a line
    print("| way | seed | quick held-out | slow held-out | ticks | versions | groups dropped | trainer idle |")
    print("|---|---|---|---|---|---|---|---|")
    num_missed = 0
    ticks: dict[int, int] = {}
    for way, seed in itertools.product(options.way or WAYS, options.seed or (0, 1, 2)):
        with tempfile.TemporaryDirectory(prefix="turnwise-pacing-") as directory:
            result = learn_mixed(WAYS[way], seed, Path(directory), ticks.get(seed, options.max_ticks))
        ticks.setdefault(seed, result.num_ticks)
        num_missed += (result.slow < ENOUGH) if way == "pacing" else (result.slow > POOR)
        print(
            f"| {way} | {seed} | {result.quick:.2f} | {result.slow:.2f} | {result.num_ticks} | {result.num_versions} | "
            f"{result.num_dropped} | {result.idle:.0%} |",
            flush=True,
        )
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
