"""Learning from single live sessions, with and without shadow samples: `python bench/learning/shadows.py [--seed N]`.

The tiny task, in which users open one session a task. A program rates each reply by its share of right tokens. `alone`
trains these sessions with their step rewards and a baseline over the batch. `shadows` trains the groups that the proxy
makes of live turns: a copy of the turn and further replies to the same prompt, stored by the same functions. Both get
the same user sessions an update, and run until the held-out reward is reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny import ENOUGH, NUM_TURNS, TinyRun, between, rewards_of

from turnwise.store import ledger, queries
from turnwise.store.forks import fork_session
from turnwise.types import SHADOW, Credit, Reward, Session

SESSIONS_PER_UPDATE = 16
SHADOW_REPLIES = 3
MAX_SESSIONS = 3200
EVALUATE_EVERY = 4
TARGET_RATIO = 0.99
"""Shadow samples must need at most this share of the user sessions that are needed without them."""

WAYS: dict[str, dict[str, Any]] = {
    "alone": {"algorithm": {"name": "reinforce_plus_plus"}, "groups_per_batch": SESSIONS_PER_UPDATE},
    "shadows": {"algorithm": {"name": "grpo"}, "groups_per_batch": SESSIONS_PER_UPDATE * (1 + NUM_TURNS)},
}


class LiveRun(TinyRun):
    """A run of single sessions; with `num_replies` above 0, each of their turns becomes a group of shadow samples."""

    def __init__(self, settings: dict[str, Any], seed: int, directory: Path, num_replies: int) -> None:
        super().__init__(settings, seed, directory)
        self._num_replies = num_replies
        self.num_shadow_replies = 0

    def play_sessions(self) -> None:
        """Play the next user sessions, and sample shadow replies to their prompts by the same version."""
        prompts = self.prompts("train", SESSIONS_PER_UPDATE)
        replies, logprobs = self.play(prompts)
        for index, prompt in enumerate(prompts):
            name = f"live-{self.num_sessions}"
            self.num_sessions += 1
            with self.db.write() as conn:
                ledger.create_session(conn, Session(session_id=name, task_id=name, credit=Credit.STEP_WISE))
                ledger.append_turns(conn, self.turns_of(name, prompt, replies[index], logprobs[index]))
                rewards = [
                    Reward(session_id=name, turn_id=f"{name}-t{number}", value=value)
                    for number, value in enumerate(rewards_of([prompt] * NUM_TURNS, replies[index][:, None]))
                ]
                ledger.add_rewards(conn, rewards)
                ledger.end_session(conn, "default", name)
        if self._num_replies:
            self._shadow(prompts, replies)

    def _shadow(self, prompts: list[list[int]], replies: np.ndarray) -> None:
        """Make a group of each turn of the newest sessions."""
        first = self.num_sessions - len(prompts)
        for number in range(NUM_TURNS):
            contexts = [context(prompt, replies[index], number) for index, prompt in enumerate(prompts)]
            sampled, logprobs = self.sample(np.repeat(contexts, self._num_replies, axis=0))
            for index, prompt in enumerate(prompts):
                own = slice(index * self._num_replies, (index + 1) * self._num_replies)
                turn_id = f"live-{first + index}-t{number}"
                self._store_group(turn_id, number, prompt, replies[index][number], sampled[own], logprobs[own])

    def _store_group(
        self, turn_id: str, number: int, prompt: list[int], reply: np.ndarray, sampled: np.ndarray, logprobs: np.ndarray
    ) -> None:
        """Store a group as the proxy does: a copy of the real turn, and a fork before it for each further reply."""
        group = f"{SHADOW}-{turn_id}"
        values = rewards_of([prompt] * (1 + len(sampled)), np.stack([reply, *sampled])[:, None])
        with self.db.write() as conn:
            for run, value in enumerate(values):
                of_group = {"group_id": group, "group_size": len(values), "run": run, "opened_by": SHADOW}
                member = Session(session_id=f"{group}-{run}", task_id=group, **of_group)
                while not fork_session(conn, member, turn_id, before=run > 0, is_sampled_here=run == 0)[1]:
                    pass
                if run:
                    copies, _ = queries.turns(conn, "default", member.session_id, limit=None, whole_prompt=False)
                    parent = copies[-1].turn if copies else None
                    turn = self.turn(member.session_id, number, prompt, sampled[run - 1], logprobs[run - 1])
                    if parent is not None:
                        turn = dataclasses.replace(
                            turn,
                            parent_turn_id=parent.turn_id,
                            chain_id=parent.chain_id,
                            turn_id=f"{member.session_id}-t",
                        )
                    ledger.append_turns(conn, [turn])
                    self.num_shadow_replies += 1
                ledger.add_rewards(conn, [Reward(session_id=member.session_id, value=value)])
                ledger.end_session(conn, "default", member.session_id)


def context(prompt: list[int], replies: np.ndarray, number: int) -> list[int]:
    """Return the prompt ids of a session's turn."""
    tokens = list(prompt)
    for before in range(number):
        tokens += [*replies[before].tolist(), between(before)]
    return tokens


def learn_live(way: str, seed: int, directory: Path, max_sessions: int) -> tuple[float, LiveRun]:
    """Run until the held-out reward is reached; return it, and the run."""
    torch.set_num_threads(1)
    run = LiveRun(WAYS[way], seed, directory, SHADOW_REPLIES if way == "shadows" else 0)
    try:
        run.play_sessions()
        while run.num_sessions < max_sessions:
            for _ in range(EVALUATE_EVERY):
                run.play_sessions()  # with the version before the one in training, as with a real trainer
                run.update()
            held_out = run.evaluate()
            if held_out >= ENOUGH:
                break
        return held_out, run
    finally:
        run.close()


def main() -> int:
    """Run both ways on each seed, and print a table; the exit status is 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", action="append", type=int, help="again for more; by default 0, 1 and 2")
    parser.add_argument("--max-sessions", type=int, default=MAX_SESSIONS)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print("| way | seed | held-out | user sessions | shadow replies | updates |")
    print("|---|---|---|---|---|---|")
    needed: dict[tuple[str, int], int] = {}
    is_missed = False
    for way, seed in itertools.product(WAYS, options.seed or (0, 1, 2)):
        with tempfile.TemporaryDirectory(prefix="turnwise-shadows-") as directory:
            held_out, run = learn_live(way, seed, Path(directory), options.max_sessions)
        needed[way, seed] = run.num_sessions
        if way == "shadows":
            is_missed |= held_out < ENOUGH or run.num_sessions > TARGET_RATIO * needed["alone", seed]
        print(
            f"| {way} | {seed} | {held_out:.2f} | {run.num_sessions} | {run.num_shadow_replies} | "
            f"{run.state.progress.policy_version} |",
            flush=True,
        )
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
