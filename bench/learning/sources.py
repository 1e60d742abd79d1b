"""The tiny task with rewards from each source of `turnwise reward`: `python bench/learning/sources.py [--source NAME]`.

Sessions are shown to the sources as conversations. The sources are those of `turnwise reward`; only the requests to the
proxy are left out. The judge is scripted: a server that reads its prompt and gives whole scores. The agreement with the
true rewards is measured on the sessions of the untrained model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from grade import share_right_of
from json_server import serving
from recipes import NUM_CLASSES
from tiny import ENOUGH, EVALUATE_EVERY, GROUP_SIZE, MAX_UPDATES, NUM_TURNS, TinyRun, rewards_of

from turnwise.rewards.agreement import agreement, session_rewards, units_of
from turnwise.rewards.settings import RewardSettings
from turnwise.rewards.sources import make_source
from turnwise.rewards.transcript import document
from turnwise.types import Credit, Json, Reward

GRADER = Path(__file__).with_name("grade.py")
SOURCES: dict[str, dict[str, Any]] = {
    "command": {"source": "command", "command": f"{sys.executable} -I -S {GRADER}"},
    "python": {"source": "python", "function": "grade:share_right"},
    "judge": {"source": "judge", "votes": 1},
    "judge_relative": {"source": "judge", "relative": True, "votes": 2},
}
TARGET_AGREEMENT = 0.55
"""Chance is 0.5."""


class RatedRun(TinyRun):
    """A run whose rewards come from a source."""

    def __init__(self, rule: RewardSettings, seed: int, directory: Path) -> None:
        super().__init__({}, seed, directory)
        self._rule = rule
        self._source = make_source(rule)
        self._loop = asyncio.new_event_loop()
        self.credit = Credit.PROPAGATE
        self.agreement: float | None = None
        """Of the source with the true rewards of the first sessions."""

    def reward_lines(self, names: Sequence[str], prompts: Sequence[list[int]], replies: np.ndarray) -> list[Reward]:
        """Return what the source decides on."""
        documents = [
            conversation_of(name, index, prompts[index][0], replies[index]) for index, name in enumerate(names)
        ]
        units = units_of(documents, relative=self._rule.relative)
        decided = self._loop.run_until_complete(self._decide(units))
        if self.agreement is None:
            known = dict(zip(names, rewards_of(prompts, replies), strict=True))
            given = [session_rewards(unit, rewards) for unit, rewards in zip(units, decided, strict=True)]
            if not self._rule.relative:
                given = [{name: value for unit in given for name, value in unit.items()}]
            self.agreement = agreement(known, given).value
        return [
            Reward(
                session_id=reward.session_id or unit[0]["session"]["session_id"],
                turn_id=reward.turn_id,
                value=reward.value,
                source=self._rule.source,
            )
            for unit, rewards in zip(units, decided, strict=True)
            for reward in rewards
        ]

    async def _decide(self, units: Sequence[Sequence[Json]]) -> list[Any]:
        places = asyncio.Semaphore(self._rule.parallel)

        async def decide(unit: Sequence[Json]) -> Any:
            async with places:
                return await self._source.decide(unit)

        return await asyncio.gather(*map(decide, units))

    def close(self) -> None:
        """Close the source and the ledger."""
        self._loop.run_until_complete(self._source.close())
        self._loop.close()
        super().close()


def conversation_of(name: str, index: int, prompt_class: int, replies: np.ndarray) -> Json:
    """Return a session as the document that sources read."""
    remainder = prompt_class % NUM_CLASSES
    said = [f"Give three numbers with remainder {remainder} modulo {NUM_CLASSES}.", ""]
    is_good = (replies[0] % NUM_CLASSES == remainder).sum() > len(replies[0]) / 2
    said[1] = "Thanks, three more." if is_good else "No, that is wrong. Three more."
    turns = [
        {
            "turn_id": f"{name}-t{number}",
            "parent_turn_id": f"{name}-t{number - 1}" if number else None,
            "chain_id": f"{name}-t0",
            "messages": [{"role": "user", "content": said[number]}],
            "response": {"role": "assistant", "content": " ".join(map(str, replies[number]))},
            "tools": None,
        }
        for number in range(NUM_TURNS)
    ]
    return document({"session_id": name, "group_id": f"group-{index // GROUP_SIZE}", "group_size": GROUP_SIZE}, turns)


def judge(request: Json) -> Json:
    """Name the model, or score each conversation of the prompt from 0 to 10."""
    if not request:
        return {"data": [{"id": "judge"}]}
    prompt = request["messages"][0]["content"]
    lines = []
    for number, text in re.findall(r'<conversation number="(\d+)">\n(.*?)\n</conversation>', prompt, re.DOTALL):
        said = [line.split(": ", 1) for line in text.splitlines()]
        messages = [{"role": role, "content": content} for role, content in said]
        lines.append(json.dumps({"number": int(number), "score": round(10 * share_right_of(messages))}))
    return {"choices": [{"message": {"role": "assistant", "content": "\n".join(lines)}}]}


def learn_rated(
    settings: dict[str, Any], seed: int, directory: Path, max_updates: int = MAX_UPDATES
) -> tuple[list[float], float | None]:
    """Train until an evaluation is good enough; return the evaluations, and the source's agreement."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if settings["source"] == "judge":
            settings = settings | {"judge_url": stack.enter_context(serving(judge))}
        run = RatedRun(RewardSettings(state=directory / "rewards.jsonl", **settings), seed, directory)
        stack.callback(run.close)
        run.play_groups()
        curve: list[float] = []
        for number in range(1, max_updates + 1):
            run.play_groups()
            run.update()
            if number % EVALUATE_EVERY == 0:
                curve.append(run.evaluate())
                if curve[-1] >= ENOUGH:
                    break
        return curve, run.agreement


def main() -> int:
    """Run each source on each seed, and print a table; the exit status is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", choices=list(SOURCES), help="again for more; by default all")
    parser.add_argument("--seed", action="append", type=int, help="again for more; by default 0, 1 and 2")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(f"| source | seed | agreement | held-out every {EVALUATE_EVERY} updates | CPU s |\n|---|---|---|---|---|")
    is_missed = False
    for name, seed in itertools.product(options.source or SOURCES, options.seed or (0, 1, 2)):
        started = time.process_time()
        with tempfile.TemporaryDirectory(prefix="turnwise-sources-") as directory:
            curve, agrees = learn_rated(SOURCES[name], seed, Path(directory))
        is_missed |= curve[-1] < ENOUGH or agrees is None or agrees < TARGET_AGREEMENT
        shown = " ".join(f"{value:.2f}" for value in curve)
        agreed = "none" if agrees is None else f"{agrees:.2f}"
        print(f"| {name} | {seed} | {agreed} | {shown} | {time.process_time() - started:.0f} |", flush=True)
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
