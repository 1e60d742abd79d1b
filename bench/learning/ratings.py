"""What trains best on forty ratings, on the task of `make demo`: `python bench/learning/ratings.py MODEL`.

SmolLM2 plays rounds of sessions, of which ten are rated, and is trained after each round. Beside what the trainer does
with the setting `ratings` there are arms that start from the base model each time and are held, one part left out each,
and two that use a head's predictions of the sessions that nobody has rated. Then there are raters who are wrong, who
like a word or long sessions at first, a judge who likes that word, and a task whose success does not show. MODEL is
the directory of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import itertools
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from upper_llama import Llama, Played, Player

from turnwise.features.ratings.estimates import overrated
from turnwise.features.ratings.head import Features, Space, fit
from turnwise.features.ratings.rated import RatedSession, RatingSource
from turnwise.features.statistics.intervals import power_tuned

Reals = npt.NDArray[np.float64]
RATED = 10
"""Ratings of a round, after which the policy is trained."""
AT_ONCE = 50
ROW_SESSIONS = 17
NUM_KNOWN = 24
"""Unrated sessions of the base model among which those are drawn that hold a policy."""
MIN_PREDICTED = 10
FOOLED = 20
"""The first ratings are of raters who like something else."""
MAGIC_WORD = "answer"
BOUND = 0.1
"""Of the sentinel `predicted`."""
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train."""

    learns_from: Literal["rated", "all", "head", "corrected"] = "rated"
    """The rated sessions, all with their true rewards, all by the head's mean, or by the head as control variate."""
    is_clipped: bool = False
    """PPO's clip in place of TOPR."""
    replays: bool = True
    """Train all rated sessions each time, not the newest ones alone."""
    restarts: bool = True
    """Train from the base model each time."""
    most_certain: float | None = 0.9
    """Tokens that were sampled with a larger probability carry no loss; None: all do."""
    kl: float = 0.3
    learning_rate: float = 4e-4
    num_steps: int = 8
    """Optimizer steps after each round."""
    step_sessions: int = 12
    step_held: int = 4
    unrated: int = 4
    """Unrated sessions that are played in a round beside the rated ones."""
    wrong: float = 0.0
    """Share of the ratings that are wrong."""
    is_shuffled: bool = False
    liked: Literal["right", "word", "length"] = "right"
    """What the first twenty ratings are for: also a word, or only what is longer than most."""
    is_judged: bool = False
    """A judge tells the head of the word, whatever people say."""
    unseen: float = 0.0
    """Share of the right answers that are worth nothing, which no session shows: a record was spelt like another."""


GRPO = Arm(is_clipped=True, replays=False, restarts=False, most_certain=None, kl=0.0, step_sessions=10, unrated=2)
OF_ALL = dataclasses.replace(GRPO, num_steps=4, step_sessions=30)
ARMS = {
    "newest": GRPO,
    "replay": dataclasses.replace(GRPO, replays=True),
    "one pass": dataclasses.replace(GRPO, num_steps=2, step_sessions=5),
    "all rated": dataclasses.replace(OF_ALL, learns_from="all"),
    "head's mean": dataclasses.replace(OF_ALL, learns_from="head"),
    "corrected": dataclasses.replace(OF_ALL, learns_from="corrected"),
    "held": Arm(),
    "held, no KL": Arm(kl=0.0),
    "held, all tokens": Arm(most_certain=None),
    "held, no restart": Arm(restarts=False),
    "held, clipped": Arm(is_clipped=True),
}
ODD: Mapping[str, Mapping[str, Any]] = {
    "a tenth wrong": {"wrong": 0.1},
    "a fifth wrong": {"wrong": 0.2},
    "shuffled": {"is_shuffled": True},
    "word": {"liked": "word"},
    "length": {"liked": "length"},
    "judge": {"is_judged": True},
    "unseen": {"unseen": 0.5},
}
"""Raters and tasks that lead astray."""
ARMS |= {
    f"{name}, {kind}": dataclasses.replace(ARMS[name], **changes)
    for name in ("newest", "corrected")
    for kind, changes in ODD.items()
}
"""`newest` and `corrected` are those of the setting `ratings`; `held` is TOPR from the base model on all rated ones."""


class Run:
    """One arm on one seed."""

    def __init__(self, arm: Arm, player: Player, seed: int, round_sessions: int) -> None:
        self._arm, self._player, self._seed, self._round = arm, player, seed, round_sessions
        self._drawn, self._rng = torch.Generator().manual_seed(seed), random.Random(seed)
        self._numbers = itertools.count(round_sessions)
        self._ratings: list[Reals] = []
        self._known: list[RatedSession] = []
        """All sessions; what the head said of one that is rated, it said before."""
        self.named: list[int] = []
        """The rounds after which the sentinel would have named that the head likes what people do not."""
        self._start()

    def _start(self) -> None:
        self._parameters = self._player.model.new_adapter(self._seed)
        rate = self._arm.learning_rate
        self._optimizer = torch.optim.AdamW(self._parameters, lr=rate, weight_decay=0.0, betas=(0.9, 0.99))
        self._num_steps = 0

    def learn(self, base: Sequence[Played], num_rounds: int, num_held_out: int) -> tuple[list[float], float]:
        """Return the mean reward of each round's sessions, and that of held-out tasks at the end.

        The first sessions are those of the base model, the same ones for all arms; the first ten of a round are rated.
        """
        arm, rounds = self._arm, [self._worth(base)]
        size = RATED + arm.unrated if arm.learns_from == "rated" else self._round
        for number in range(num_rounds):
            if number:
                rounds.append(self._play("train", [next(self._numbers) for _ in range(size)]))
            group, credit = self._credited(rounds)
            if arm.restarts:
                self._start()
            newer = [each for played in rounds[1:] for each in played[RATED:]]
            self._train(group, credit, [*base[RATED:][:NUM_KNOWN], *newer])
        held_out = self._play("eval", range(num_held_out))
        return [_mean(played) for played in rounds], _mean(held_out)

    def _play(self, split: str, indices: Sequence[int]) -> list[Played]:
        played = [
            each
            for start in range(0, len(indices), AT_ONCE)
            for each in self._player.play(split, indices[start : start + AT_ONCE], self._seed, self._drawn)
        ]
        return self._worth(played)

    def _worth(self, played: Sequence[Played]) -> list[Played]:
        is_other = [self._rng.random() < self._arm.unseen for _ in played]
        return [
            dataclasses.replace(each, reward=0.0) if other else each
            for each, other in zip(played, is_other, strict=True)
        ]

    def _credited(self, rounds: Sequence[Sequence[Played]]) -> tuple[list[Played], Reals]:
        """Return what is trained now, and its rewards."""
        arm, newest = self._arm, list(rounds[-1])
        self._ratings.append(self._rated(newest[:RATED]))
        said = self._predicted(rounds)
        if arm.learns_from == "rated":
            rated = [each for played in (rounds if arm.replays else rounds[-1:]) for each in played[:RATED]]
            return rated, np.concatenate(self._ratings)[-len(rated) :]
        if arm.learns_from == "all":
            return newest, _rewards(newest)
        return newest, self._by_head(said, len(newest))

    def _rated(self, played: Sequence[Played]) -> Reals:
        arm = self._arm
        ratings = [1 - each.reward if self._rng.random() < arm.wrong else each.reward for each in played]
        if len(self._ratings) < FOOLED // RATED and arm.liked == "word":
            ratings = [max(given, _has_word(one)) for given, one in zip(ratings, played, strict=True)]
        elif len(self._ratings) < FOOLED // RATED and arm.liked == "length":
            most = np.median([len(one.behaviour) for one in played])
            ratings = [float(len(one.behaviour) > most) for one in played]
        if self._arm.is_shuffled:
            self._rng.shuffle(ratings)
        return np.array(ratings)

    def _predicted(self, rounds: Sequence[Sequence[Played]]) -> Reals:
        """Return what the head says of all sessions; it is kept of the newest ones, and the sentinel looks at it."""
        every = [each for played in rounds for each in played]
        ends = np.cumsum([0, *map(len, rounds)])
        rated = [int(start) + place for start in ends[:-1] for place in range(RATED)]
        truth, number = np.concatenate(self._ratings), len(rounds) - 1
        scores = np.array([[_has_word(each)] if self._arm.is_judged else [] for each in every])
        said, unsure = predictions(every, rated, truth, scores)
        before = predictions(every, rated[:-RATED], truth[:-RATED], scores) if number else None
        size = len(rounds[-1])
        for place, at in enumerate(range(int(ends[-2]), int(ends[-1]))):
            is_asked = place < RATED
            head = before if is_asked else (said, unsure)
            one = RatedSession(
                session_pk=at,
                tenant="default",
                session_id=str(at),
                policy_version=number,
                ended_at=NOW,
                rating=float(self._ratings[-1][place]) if is_asked else None,
                source=RatingSource.ASKED if is_asked else None,
                probability=RATED / size if is_asked else None,
                predicted=None if head is None else float(head[0][at]),
                deviation=None if head is None else float(head[1][at]),
            )
            self._known.append(one)
        if overrated(self._known, number, BOUND) is not None:
            self.named.append(number)
        return said

    def _by_head(self, said: Reals, size: int) -> Reals:
        """Return what each of the newest sessions is worth."""
        truth, guessed = self._ratings[-1], said[-size:]
        if self._arm.learns_from == "head":
            return np.concatenate([truth, guessed[RATED:]])
        pairs = [
            (one.predicted, one.rating) for one in self._known if one.rating is not None and one.predicted is not None
        ]
        share = 0.5
        if len(pairs) >= MIN_PREDICTED:
            earlier, was = np.array(pairs).T
            share = power_tuned(was, earlier)
        corrected = share * guessed
        corrected[:RATED] += (truth - share * guessed[:RATED]) * len(guessed) / RATED
        return corrected

    def _train(self, group: Sequence[Played], rewards: Reals, unrated: Sequence[Played]) -> None:
        if np.ptp(rewards) == 0:
            return
        arm, credit = self._arm, (rewards - rewards.mean()) / rewards.std()
        if arm.kl:
            self._know_reference(unrated)
        order: list[int] = []
        size = min(arm.step_sessions, len(group))
        for _ in range(arm.num_steps):
            if len(order) < size:
                order += self._rng.sample(range(len(group)), len(group))
            chosen, order = order[:size], order[size:]
            self._num_steps += 1
            for each in self._optimizer.param_groups:
                each["lr"] = arm.learning_rate * min(1.0, self._num_steps / 2)
            self._optimizer.zero_grad()
            self._add_gradient([group[index] for index in chosen], torch.from_numpy(credit[chosen]).float())
            if arm.kl:
                self._hold(self._rng.sample(unrated, min(arm.step_held, len(unrated))))
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()

    def _add_gradient(self, group: Sequence[Played], credit: Tensor) -> None:
        least = math.inf if self._arm.most_certain is None else math.log(self._arm.most_certain)
        num_tokens = max(sum(logprob <= least for each in group for logprob in each.behaviour), 1)
        for start in range(0, len(group), ROW_SESSIONS):
            row = group[start : start + ROW_SESSIONS]
            logprobs, session = self._player.logprobs(row)
            behaviour = torch.tensor([logprob for each in row for logprob in each.behaviour])
            advantage = credit[start : start + ROW_SESSIONS][session]
            loss = self._loss(logprobs, behaviour, advantage, session) / num_tokens
            loss[behaviour <= least].sum().backward()

    def _loss(self, logprobs: Tensor, behaviour: Tensor, advantage: Tensor, session: Tensor) -> Tensor:
        log_ratio = logprobs - behaviour
        if self._arm.is_clipped:
            ratio = log_ratio.exp()
            return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        of_session = torch.zeros(int(session.max()) + 1).index_add(0, session, log_ratio.detach())
        tapered = of_session.clamp(max=0).exp()[session]
        return -torch.where(advantage > 0, 1.0, tapered) * advantage * logprobs

    def _hold(self, unrated: Sequence[Played]) -> None:
        logprobs, _ = self._player.logprobs(unrated)
        moved = torch.tensor([logprob for each in unrated for logprob in each.reference or ()]) - logprobs
        (self._arm.kl * (moved.exp() - 1 - moved).mean()).backward()

    @torch.inference_mode()
    def _know_reference(self, unrated: Sequence[Played]) -> None:
        """Compute the sessions under the base model, those that are not known yet."""
        model = self._player.model
        adapter, model.adapter = model.adapter, {}
        unknown = [each for each in unrated if each.reference is None]
        for start in range(0, len(unknown), AT_ONCE):
            row = unknown[start : start + AT_ONCE]
            logprobs, session = self._player.logprobs(row)
            for number, each in enumerate(row):
                each.reference = logprobs[session == number].tolist()
        model.adapter = adapter


def predictions(played: Sequence[Played], rated: Sequence[int], truth: Reals, scores: Reals) -> tuple[Reals, Reals]:
    """Return what the product's head, fitted to the last states of the rated sessions, says of all, and how unsure."""
    seen = Features(np.stack([each.last.numpy() for each in played]).astype(np.float64), scores)
    is_rated = np.zeros(len(played), bool)
    is_rated[list(rated)] = True
    return fit(seen.of(is_rated), truth, Space.of(seen)).predict(seen)


def _rewards(played: Sequence[Played]) -> Reals:
    return np.array([each.reward for each in played])


def _has_word(one: Played) -> float:
    return float(MAGIC_WORD in one.said.lower())


def _mean(played: Sequence[Played]) -> float:
    return float(_rewards(played).mean())


def main() -> None:
    """Run the arms, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--ratings", type=int, default=40)
    parser.add_argument("--round", type=int, default=60, help="sessions of a round where all of them are used")
    parser.add_argument("--held-out", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = Llama(given.model)
    for seed in given.seeds:
        player = Player(copy.copy(model), given.model)
        drawn = torch.Generator().manual_seed(1000 + seed)
        starts = range(0, given.round, AT_ONCE)
        base = [
            each
            for start in starts
            for each in player.play("train", range(start, min(start + AT_ONCE, given.round)), seed, drawn)
        ]
        for name in given.arms:
            started = time.process_time()
            run = Run(ARMS[name], player, seed, given.round)
            rounds, held_out = run.learn(base, given.ratings // RATED, given.held_out)
            seconds = time.process_time() - started
            line = {"arm": name, "seed": seed, "rounds": rounds, "held_out": held_out, "named": run.named}
            line |= {"ratings": given.ratings, "cpu_seconds": round(seconds)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
