"""How often the gate of pinned examples finds a planted regression, and stops for none: `python bench/examples.py`.

40 examples, five answers of each version. First with simulated answers, beside the sign test of all pairs of answers;
then with the demo's model, of which a version cannot name two people any more whom five examples ask for. Its answers
are drawn once, many to an example, and each run takes five of them. A gate of both is timed with one thread. The exit
status is 1 if a regression is found in fewer than 95 of 100 runs, or more than 5 % of equal versions are stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from trainer.features.examples.checks import Checks, ExampleRules
from trainer.features.examples.gate import Compared, Playing, judge
from trainer.features.examples.playing import Player, of_model
from trainer.features.supports.turns import Vocabulary
from trainer.world import World
from turnwise.default_models import trail
from turnwise.default_models.small_model import ensure_small_model
from turnwise.features.examples import Example
from turnwise.features.statistics.confidence import ALPHA, spent
from turnwise.features.statistics.intervals import sign_test
from turnwise.features.statistics.pairs import Right
from turnwise.types import Json

NUM_EXAMPLES, NUM_PLANTED, NUM_ANSWERS = 40, 5, 5
NUM_RUNS, NUM_EQUAL = 100, 1000
NUM_OPENINGS = 25
NUM_DRAWN = 40
MOST_TOKENS = 16
HARD = "right 7 times of 10"
"""Where five answers do not suffice for 95 of 100."""


class Answered(NamedTuple):
    """How right answers of a version are drawn: of one with the planted regression, or of an equal one."""

    right: Callable[[bool], Sequence[int]]
    num: int = NUM_ANSWERS

    def compared(self, *, is_planted: bool) -> list[Compared]:
        now, before = self.right(is_planted), self.right(False)
        return [
            Compared(str(place), Right(int(new), self.num), Right(int(old), self.num))
            for place, (new, old) in enumerate(zip(now, before, strict=True))
        ]


def by_sign_test(found: Sequence[Compared], draw: np.random.Generator) -> bool:
    """Return whether the sign test of all pairs of answers, in random order, stops the version."""
    gains = losses = 0
    for each in found:
        assert each.before is not None
        now, before = (draw.permutation(np.arange(one.num) < one.right) for one in (each.now, each.before))
        gains, losses = gains + int((now & ~before).sum()), losses + int((before & ~now).sum())
    return sign_test(gains, losses) <= spent(ALPHA, 1)


def shares(answered: Answered) -> Json:
    """Return how often the gate, and the sign test, stop a version with the planted regression and an equal one."""
    draw, found = np.random.default_rng(5), Json()
    for is_planted, number in ((True, NUM_RUNS), (False, NUM_EQUAL)):
        counts = Counter[str]()
        for _ in range(number):
            each = answered.compared(is_planted=is_planted)
            counts["test"] += judge(each, 0, look=1, must_mend=False).reason is not None
            counts["must_mend"] += judge(each, 0, look=1, must_mend=True).reason is not None
            counts["sign_test"] += by_sign_test(each, draw)
        found["planted" if is_planted else "equal"] = {rule: count / number for rule, count in counts.items()}
    return found


def simulated() -> dict[str, Json]:
    """Return the shares by how examples are answered. The planted ones were answered as the others, and never are."""
    draw = np.random.default_rng(5)
    kinds: Mapping[str, tuple[npt.NDArray[np.float64], int]] = {
        "always right": (np.ones(NUM_EXAMPLES), NUM_ANSWERS),
        "right 9 times of 10": (np.full(NUM_EXAMPLES, 0.9), NUM_ANSWERS),
        "each otherwise, half the times to always": (draw.uniform(0.5, 1, NUM_EXAMPLES), NUM_ANSWERS),
        HARD: (np.full(NUM_EXAMPLES, 0.7), NUM_ANSWERS),
        f"{HARD}, 8 answers": (np.full(NUM_EXAMPLES, 0.7), 8),
    }

    def answered(chances: npt.NDArray[np.float64], num: int) -> Answered:
        of_planted = np.where(np.arange(NUM_EXAMPLES) < NUM_PLANTED, 0, chances)
        return Answered(lambda is_planted: draw.binomial(num, of_planted if is_planted else chances), num)

    return {name: shares(answered(*kind)) for name, kind in kinds.items()}


def pinned(model: Path) -> list[Example]:
    """Return openings, in which the model looks a person up, and second turns, in which it may also answer at once."""
    vocabulary, tasks = Vocabulary(str(model)), (trail.make_task("train", number, 3) for number in itertools.count())
    found: list[Example] = []
    for task in tasks:
        first, messages = trail.first_person(task), trail.opening(task)
        is_opening = len(found) < NUM_OPENINGS
        if not is_opening:
            if "boss" not in task.records[first]:
                continue
            messages = trail.warm_up_conversation(task, _First())[:4]
        wanted = {"name": "lookup", **({"arguments": {"name": first}} if is_opening else {})}
        text = vocabulary.tokenizer.apply_chat_template(messages, tools=trail.TOOLS, add_generation_prompt=True)
        prompt = np.array(vocabulary.tokenizer.encode(text, add_special_tokens=False), np.int32)
        found.append(
            Example(
                example_id=f"{len(found)}",
                tenant="default",
                policy_id=0,
                prompt=prompt,
                reply=prompt[:0],
                sampling={"temperature": 1.0},
                messages=messages,
                tools=trail.TOOLS,
                criterion={"kind": "tool_call", **wanted},
                response={},
            )
        )
        if len(found) == NUM_EXAMPLES:
            return found
    raise AssertionError("there are tasks without end")


class _First:
    """Chooses the first value, and goes on."""

    def choice(self, values: Sequence[str]) -> str:
        return values[0]

    def random(self) -> float:
        return 1.0


def forgetful(model: Path, directory: Path, examples: Sequence[Example]) -> list[int]:
    """Write the model so that it cannot name people whom five openings ask for; return the places of these."""
    asked = Counter(each.criterion["arguments"]["name"] for each in examples[:NUM_OPENINGS])
    names = next(
        names
        for size in range(1, 6)
        for names in itertools.combinations(sorted(asked), size)
        if sum(asked[name] for name in names) == NUM_PLANTED
    )
    shutil.copytree(model, directory)
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), Vocabulary(str(model)).tokenizer
    with torch.no_grad():
        for name in names:
            for token in tokenizer.encode(name, add_special_tokens=False):
                loaded.lm_head.weight[token] = -loaded.lm_head.weight[token]
    loaded.save_pretrained(directory)
    return [place for place, each in enumerate(examples[:NUM_OPENINGS]) if each.criterion["arguments"]["name"] in names]


def answers(model: Path, examples: Sequence[Example], num: int, seed: str, log: Path) -> tuple[list[int], float]:
    """Return how many of a version's answers to each example are right, and the seconds that it took."""
    vocabulary = Vocabulary(str(model))
    playing = Playing(vocabulary, Checks(ExampleRules(), log), num, MOST_TOKENS, World())
    player, started = Player(of_model(AutoModelForCausalLM.from_pretrained(model).eval()), vocabulary), time.monotonic()
    right = [playing.right(player, each, seed) for each in examples]
    strange = [each for each in right if isinstance(each, str)]
    assert not strange, strange
    return [each.right for each in right if isinstance(each, Right)], time.monotonic() - started


def real(directory: Path) -> tuple[Json, Json]:
    model = ensure_small_model(directory / "model", lambda name, text: print(f"{name}: {text}", file=sys.stderr))
    examples, log = pinned(model), directory / "log"
    planted = forgetful(model, directory / "forgetful", examples)
    _, seconds = answers(model, examples, NUM_ANSWERS, "time", log)
    before, _ = answers(model, examples, NUM_DRAWN, "before", log)
    after, _ = answers(directory / "forgetful", examples, NUM_DRAWN, "after", log)
    draw = np.random.default_rng(5)

    def right(is_planted: bool) -> Any:
        """Return five answers of the version to each example, of those that were drawn; others stay as they were."""
        chosen = [after[place] if is_planted and place in planted else before[place] for place in range(NUM_EXAMPLES)]
        return [draw.hypergeometric(each, NUM_DRAWN - each, NUM_ANSWERS) for each in chosen]

    named = {"seconds": seconds, "prompt_tokens": sum(len(each.prompt) for each in examples)}
    drawn = {"before": sum(before) / NUM_DRAWN / NUM_EXAMPLES, "after": sum(after) / NUM_DRAWN / NUM_EXAMPLES}
    of_planted = {"planted_after": sum(after[place] for place in planted) / NUM_DRAWN / NUM_PLANTED}
    return shares(Answered(right)), named | drawn | of_planted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="Write the numbers here too.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = simulated()
    with tempfile.TemporaryDirectory() as place:
        rows["the demo's model"], measured = real(Path(place))
    print(
        f"{NUM_EXAMPLES} examples, {NUM_ANSWERS} answers of each version; found: of {NUM_RUNS} versions that lost "
        f"{NUM_PLANTED}; stopped: of {NUM_EQUAL} equal ones\n"
    )
    print("| answers of the served version | found | stopped | stopped, must mend | sign test: found | stopped |")
    print("|---|---|---|---|---|---|")
    for name, each in rows.items():
        lost, equal = each["planted"], each["equal"]
        print(
            f"| {name} | {lost['test']:.0%} | {equal['test']:.1%} | {equal['must_mend']:.1%} "
            f"| {lost['sign_test']:.0%} | {equal['sign_test']:.1%} |"
        )
    print("\nthe demo's model, one thread: " + json.dumps({name: round(value, 3) for name, value in measured.items()}))
    if given.json is not None:
        given.json.write_text(json.dumps({"shares": rows, "measured": measured}, indent=1))
    is_good = all(
        (each["planted"]["must_mend"] >= 0.95 or name == HARD) and max(each["equal"].values()) <= 0.05
        for name, each in rows.items()
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
