"""Whether estimates of versions hold, on the demo's task: `python bench/learning/estimates.py --json FILE`.

Each seed trains `NUM_VERSIONS` honest updates, plays `NUM_LOGGED` sessions with some of the versions, and `NUM_TRUTH`
with each version that is estimated from them. Then: how many intervals hold, and how wide they are; what choosing the
best of several versions by the estimate costs; whether a temperature that nobody recorded is noticed; what is said of
the trained versions, honest and poisoned, before a call; and what an estimate costs. `--seeds 0` reads the file alone.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from learner import Run, warmed_model
from recipes import RECIPES, ROOT, Recipe
from safetensors.torch import load_file

from proxy.features.arms.settings import ArmSettings
from proxy.features.arms.verdict import judge
from trainer.batch.batch import build
from trainer.batch.chain import Chain
from trainer.features import estimates as of_trainer
from trainer.features.estimates import Estimates, moments
from turnwise.default_models import trail
from turnwise.features import estimates
from turnwise.features.arms import Arm
from turnwise.features.statistics.off_policy import Change, Surprise, change, surprise_of
from turnwise.store import serving, versions
from turnwise.store.experiences import Shape, stream
from turnwise.store.schema import sessions
from turnwise.types import Json, PolicyStatus, PolicyVersion, Split

LOGGED = (3, 8)
"""Updates after which sessions are logged."""
NEXT = range(1, 6)
"""Updates later, among which the best version is chosen."""
GAPS = (*NEXT, 10)
"""Updates between the version that sampled and the one that is estimated."""
NUM_VERSIONS = max(LOGGED) + max(GAPS)
NUM_LOGGED = 1000
NUM_TRUTH = 256
NUM_HOT = 300
HOT = 1.3
"""Temperature that is not recorded."""
SIZES = (100, 300, 1000)
NUM_ESTIMATED = 300
"""Sessions that the trainer estimates its versions from."""
NUM_DRAWS = 50
NUM_COST = 5
MARGIN = 0.02
Z90 = statistics.NormalDist().inv_cdf(0.95)
POISONS = ("label flips", "length hack", "constant rewards", "learning rate × 30", "a foreign adapter")
Sample = tuple[list[float], list[float], list[tuple[float, ...]]]
"""log π − log μ, rewards, and surprises, of sessions."""


class Measured(Run):
    """A run whose versions stay, and which plays with each of them."""

    def __init__(self, seed: int, directory: Path) -> None:
        own = {"keep_every": 1, "estimate_sessions": NUM_ESTIMATED}
        settings = RECIPES["grpo"].settings | own
        model = warmed_model(ROOT / "runs/learning", seed)
        super().__init__(Recipe(settings=settings), seed, model, directory)
        self._sampling: Json = {}
        self.reward: Callable[[Any, float], float] = lambda _, value: value
        """Changes the rewards of training sessions."""

    def _rewards(self, chain: Any, task: Any, answer: str) -> Any:
        lines = super()._rewards(chain, task, answer)
        if chain.session.split is Split.EVAL:
            return lines
        return [dataclasses.replace(line, value=self.reward(chain, line.value)) for line in lines]

    def play(
        self, version: int, count: int, sampling: Json | None = None, *, directory: Path | None = None
    ) -> list[str]:
        """Play held-out tasks with a version, or with other weights; return the ids of the sessions."""
        with self.db.read() as conn:
            self.proxy.load(version, directory or Path(versions.get_version(conn, version).path))
        first = self._num_tasks[Split.EVAL]
        self._sampling = sampling or {}
        self._play_tasks(Split.EVAL, count, 1)
        self._sampling = {}
        self.proxy.follow()
        return [f"{task}-0" for task in self._task_ids(first, count)]

    def _task_ids(self, first: int, count: int) -> list[str]:
        return [trail.make_task("eval", first + index, self._seed).task_id for index in range(count)]

    def _session(self, *arguments: Any) -> Any:
        return dataclasses.replace(super()._session(*arguments), sampling=self._sampling)

    def chains(self, ids: Sequence[str], *, is_recorded: bool = True) -> dict[str, list[Chain]]:
        """Return the chains of sessions; as if sampled at temperature 1 where that is not recorded."""
        wanted = [sessions.c.session_id.in_(ids)]
        with self.db.read() as conn:
            found = self.workflow.claims.chains(stream(conn, wanted, Shape(merge="chain", with_files=True)))
        by_session: dict[str, list[Chain]] = {}
        for chain in found:
            plain = chain if is_recorded else dataclasses.replace(chain, temperatures=np.ones_like(chain.temperatures))
            by_session.setdefault(chain.session_id, []).append(plain)
        return by_session

    def logprobs(self, version: int, chains: Mapping[str, Sequence[Chain]]) -> dict[str, np.ndarray]:
        """Return of each session its tokens' log π with its mean and variance, and log μ as it is stored. [4, M]."""
        self.load_weights(version)
        flat = [chain for of_session in chains.values() for chain in of_session]
        batch = build(flat, [np.zeros(len(chain.turn_ids)) for chain in flat], policy_version=version)
        agent = self.workflow.agent
        computed = agent.without_gradient(lambda row: moments(agent.policy, row), batch, range(len(flat)), 3)
        columns = np.concatenate([computed, batch.table.behaviour[None]]).astype(np.float64)
        found: dict[str, list[np.ndarray]] = {}
        for chain, places in zip(flat, batch.tokens_of, strict=True):
            found.setdefault(chain.session_id, []).append(columns[:, places])
        return {session_id: np.concatenate(parts, axis=1) for session_id, parts in found.items()}

    def load_weights(self, version: int) -> None:
        with self.db.read() as conn:
            path = Path(versions.get_version(conn, version).path)
        weights = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        self.workflow.agent.policy.model.load_state_dict(weights)

    def newest(self) -> PolicyVersion:
        with self.db.read() as conn:
            (newest,), _ = versions.list_versions(conn, limit=1)
        return newest

    def learn_once(self, reward: Callable[[Any, float], float] | None = None) -> Json:
        """Play and train a batch; return what was said of its version."""
        if reward is not None:
            self.reward = reward
        try:
            self.play_groups()
        finally:
            self.reward = lambda _, value: value
        before = self.newest().version
        started = time.perf_counter()
        metrics = self.update()
        newest = self.newest()
        is_new = newest.version > before
        estimated = metrics.get("estimate") or {}
        return {
            "version": newest.version if is_new else None,
            "is_stopped": is_new and newest.status is PolicyStatus.FAILED,
            "error": newest.error,
            "estimate": {name: value for name, value in estimated.items() if name != "slices"},
            "train_seconds": metrics.get("seconds"),
            "update_seconds": time.perf_counter() - started,
        }


def measure(seed: int) -> Json:
    """Train and play one seed; return the samples and what was said."""
    torch.set_num_threads(1)
    of_trainer.TIME_SHARE = 1.0  # each version is estimated here
    with tempfile.TemporaryDirectory(prefix="turnwise-estimates-") as directory:
        run = Measured(seed, Path(directory))
        try:
            return _measured(run, seed)
        finally:
            run.close()


def _measured(run: Measured, seed: int) -> Json:
    numbers, honest, poisoned = {0: 0}, [], []
    logged: dict[int, list[str]] = {}
    hot: dict[int, list[str]] = {}
    truth: dict[int, list[str]] = {}
    wanted = {update + gap for update in LOGGED for gap in (0, *GAPS)}
    run.play_groups()
    for update in range(1, NUM_VERSIONS + 1):
        found = run.learn_once()
        numbers[update] = found["version"]
        honest.append(found | {"update": update})
        if update in wanted:
            truth[update] = run.play(numbers[update], NUM_TRUTH)
        if update in LOGGED:
            hot[update] = run.play(numbers[update], NUM_HOT, {"temperature": HOT})
            logged[update] = run.play(numbers[update], NUM_LOGGED)
        print(f"seed {seed}: update {update}, {estimates.in_words(found['estimate'])}", flush=True)
    costs = _costs(run)
    poisoned = _poisons(run)
    return {
        "seed": seed,
        "honest": honest,
        "poisoned": poisoned,
        "costs": costs,
        "truth": {update: _rewards(run.chains(ids)) for update, ids in truth.items()},
        "samples": _samples(run, numbers, logged, is_recorded=True),
        "hot": _samples(run, numbers, hot, is_recorded=False),
    }


def _rewards(chains: Mapping[str, Sequence[Chain]]) -> list[float]:
    return [of_session[0].reward for of_session in chains.values()]


def _samples(
    run: Measured, numbers: Mapping[int, int], logged: Mapping[int, Sequence[str]], *, is_recorded: bool
) -> dict[str, Sample]:
    """Return by `LOGGED+GAP` the weights and rewards of the sessions of a version under a later one."""
    found: dict[str, Sample] = {}
    for update, ids in logged.items():
        chains = run.chains(ids, is_recorded=is_recorded)
        was = None if is_recorded else run.logprobs(numbers[update], chains)
        for gap in GAPS:
            new = run.logprobs(numbers[update + gap], chains)
            old = (
                {name: columns[3] for name, columns in new.items()}
                if was is None
                else {n: c[0] for n, c in was.items()}
            )
            weights = [float((new[name][0] - old[name]).sum()) for name in chains]
            surprises = [dataclasses.astuple(surprise_of(of[0], old[name], of[1], of[2])) for name, of in new.items()]
            found[f"{update}+{gap}"] = weights, _rewards(chains), surprises
    return found


def _costs(run: Measured) -> Json:
    """Return the seconds of estimates from 100 sessions, and of the updates before them."""
    claims = copy.copy(run.workflow.claims)
    claims.settings = claims.settings.model_copy(update={"estimate_sessions": 100})
    part = Estimates(claims, run.workflow.agent, {})
    taken = []
    for _ in range(NUM_COST):
        started = time.perf_counter()
        part.why_unpublished(run.state.progress.policy_version)
        taken.append(time.perf_counter() - started)
    return {"estimate_seconds": taken}


def _poisons(run: Measured) -> list[Json]:
    """Poison one update after the other from the last honest version, and say what was said of each."""
    run.update()  # what an honest version's agents played before is trained first
    good = run.state.progress.policy_version
    found = []
    rewards: dict[str, Callable[[Any, float], float] | None] = {
        "label flips": lambda _, value: 1.0 - value,
        "length hack": lambda chain, _: float(len(chain.turns)),
        "constant rewards": lambda *_: 1.0,
        "learning rate × 30": None,
    }
    for name, reward in rewards.items():
        run.play(good, NUM_ESTIMATED)
        rates = run.state.schedule.base_rates
        if reward is None:
            run.state.schedule.base_rates = [30 * rate for rate in rates]
        said = run.learn_once(reward)
        run.state.schedule.base_rates = rates
        found.append({"poison": name} | said)
        if said["version"] is not None:
            found[-1]["played"] = _rewards(run.chains(run.play(said["version"], NUM_TRUTH)))
        if said["version"] is not None and not said["is_stopped"]:
            with run.db.write() as conn:
                serving.fail_version(conn, said["version"], "the bench goes back")
        run.proxy.follow()
    run.play(good, NUM_ESTIMATED)
    found.append({"poison": "a foreign adapter"} | _foreign(run, good))
    with tempfile.TemporaryDirectory(prefix="turnwise-foreign-") as directory:
        run.workflow.agent.policy.model.save_pretrained(directory)
        found[-1]["played"] = _rewards(run.chains(run.play(good, NUM_TRUTH, directory=Path(directory))))
    before = _rewards(run.chains(run.play(good, NUM_TRUTH)))
    return [each | {"before": before} for each in found]


def _foreign(run: Measured, good: int) -> Json:
    """Add a random matrix of rank 4 to each layer, a tenth of the layer in size, and estimate that."""
    run.load_weights(good)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in run.workflow.agent.policy.model.named_parameters():
            if weight.ndim == 2 and "proj" in name:
                left, right = (torch.randn(size, 4, generator=generator) for size in weight.shape)
                added = left @ right.T
                weight += 0.1 * weight.norm() * added / added.norm()
    part = next(each for each in run.workflow.beside if isinstance(each, Estimates))
    metrics, why = part.why_unpublished(good)
    estimated = {name: value for name, value in metrics.get("estimate", {}).items() if name != "slices"}
    return {"version": None, "is_stopped": why is not None, "error": why, "estimate": estimated}


def estimated(sample: Sample, chosen: Sequence[int] | None = None) -> Change:
    """Return what is estimated from sessions, or from some of them."""
    logs, rewards, surprises = (np.asarray(values)[... if chosen is None else chosen] for values in sample)
    return change(logs, rewards, estimates.CONFIDENCE, (0.0, 1.0), surprises=[Surprise(*each) for each in surprises])


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """The change between two versions as it was played, and its standard error."""

    change: float
    error: float


def played(found: Json, update: int, gap: int) -> Truth:
    return _difference(*(found["truth"][str(each)] for each in (update + gap, update)))


def _difference(played_now: Sequence[float], played_before: Sequence[float]) -> Truth:
    new, old = np.asarray(played_now), np.asarray(played_before)
    error = (new.var(ddof=1) / len(new) + old.var(ddof=1) / len(old)) ** 0.5
    return Truth(float(new.mean() - old.mean()), float(error))


def coverage(found: Sequence[Json]) -> list[str]:
    """Return a table: how often an interval and the played change agree, both with their errors, and the widths."""
    lines = [
        "| updates | sessions | logged share | holds | ± | refused | false alarms |",
        "|---|---|---|---|---|---|---|",
    ]
    for gap in GAPS:
        for size in SIZES:
            holds, halves, shares, refused, alarms = [], [], [], 0, 0
            for of_seed in found:
                for update in LOGGED:
                    sample, truth = of_seed["samples"][f"{update}+{gap}"], played(of_seed, update, gap)
                    for start in range(0, NUM_LOGGED - size + 1, size):
                        said = estimated(sample, range(start, start + size))
                        shares.append(said.num_effective / size)
                        alarms += said.is_off
                        if said.interval is None:
                            refused += 1
                            continue
                        half = (said.interval.high - said.interval.low) / 2
                        halves.append(half)
                        off = abs((said.interval.high + said.interval.low) / 2 - truth.change)
                        holds.append(off <= (half**2 + (Z90 * truth.error) ** 2) ** 0.5)
            num = len(shares)
            shown = f"{sum(holds)} of {len(holds)} | {statistics.fmean(halves):.3f}" if holds else "– | –"
            lines.append(
                f"| {gap} | {size} | {statistics.fmean(shares):.2f} | {shown} "
                f"| {refused} of {num} | {alarms} of {num} |"
            )
    return lines


def best_of_five(found: Sequence[Json]) -> str:
    """Return how much is lost by choosing among five versions by the estimate."""
    generator, regrets, refused = np.random.default_rng(0), [], 0
    cases = [(of_seed, update) for of_seed in found for update in LOGGED]
    for draw in range(NUM_DRAWS):
        of_seed, update = cases[draw % len(cases)]
        chosen = generator.choice(NUM_LOGGED, NUM_ESTIMATED, replace=False)
        truths = {gap: played(of_seed, update, gap).change for gap in NEXT}
        said = {gap: estimated(of_seed["samples"][f"{update}+{gap}"], chosen).interval for gap in truths}
        means = {gap: interval.mean for gap, interval in said.items() if interval is not None}
        if not means:
            refused += 1
            continue
        regrets.append(max(truths.values()) - truths[max(means, key=lambda gap: means[gap])])
    small = sum(regret <= MARGIN for regret in regrets)
    mean = statistics.fmean(regrets) if regrets else 0.0
    return f"best of five: regret ≤ {MARGIN} in {small} of {len(regrets)} draws (mean {mean:.3f}), refused in {refused}"


def noticed(found: Sequence[Json]) -> str:
    """Return how often a temperature that is not recorded is noticed or refused."""
    said = [estimated(sample) for of_seed in found for sample in of_seed["hot"].values()]
    alarms, refused = sum(each.is_off for each in said), sum(each.reason is not None for each in said)
    return f"temperature {HOT} not recorded: noticed in {alarms} of {len(said)}, no number in {refused}"


def before_a_call(found: Sequence[Json]) -> list[str]:
    """Return what was said of the versions as they were trained: the honest ones, and a row a poison."""
    honest = [each for of_seed in found for each in of_seed["honest"]]
    stopped = sum(each["is_stopped"] for each in honest)
    unknown = sum(each["estimate"].get("change") is None for each in honest)
    lines = [f'honest versions: {stopped} of {len(honest)} stopped, {unknown} "cannot know"', ""]
    lines += ["| poison | stopped | cannot know | no version made | served | change as played |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in POISONS:
        of = [each for of_seed in found for each in of_seed["poisoned"] if each["poison"] == name]
        is_made = [each for each in of if each["version"] is not None or name == POISONS[-1]]
        stops = sum(each["is_stopped"] for each in is_made)
        refused = sum(each["estimate"].get("change") is None and not each["is_stopped"] for each in is_made)
        served = len(is_made) - stops - refused
        harms = [_difference(each["played"], each["before"]) for each in is_made]
        shown = ", ".join(f"{harm.change:+.3f} ± {Z90 * harm.error:.3f}" for harm in harms) or "–"
        lines.append(f"| {name} | {stops} | {refused} | {len(of) - len(is_made)} | {served} | {shown} |")
    return lines


def canaries(found: Sequence[Json]) -> str:
    """Return how many sessions a canary of the honest versions takes, with and without their estimates."""
    generator, settings = np.random.default_rng(0), ArmSettings()
    taken = saved = num_skipped = num = 0
    for of_seed in found:
        for each in of_seed["honest"]:
            arms = [of_seed["truth"].get(str(update)) for update in (each["update"], each["update"] - 1)]
            if None in arms:
                continue
            num += 1
            sessions_taken = _trial(*arms, settings, generator)
            low = each["estimate"].get("low")
            is_skipped = low is not None and low >= -settings.canary_reward_drop
            taken, num_skipped = taken + sessions_taken, num_skipped + is_skipped
            saved += sessions_taken if is_skipped else 0
    return f"canaries of {num} honest versions take {taken} sessions; {num_skipped} are skipped, which saves {saved}"


def _trial(new: Sequence[float], old: Sequence[float], settings: ArmSettings, generator: np.random.Generator) -> int:
    """Return after how many sessions a canary is judged, looked at after every fifth."""
    drawn = [generator.choice(values, settings.canary_max_sessions) for values in (new, old)]
    for size in range(settings.canary_min_sessions, settings.canary_max_sessions + 1, 5):
        arms = [Arm(rewards=tuple(values[:size]), num_sessions=size, num_turns=3 * size) for values in drawn]
        if judge(*arms, settings) is not None:
            return size
    return settings.canary_max_sessions


def costs(found: Sequence[Json]) -> str:
    """Return what an estimate costs beside an update."""
    estimate_seconds = statistics.median(each for of_seed in found for each in of_seed["costs"]["estimate_seconds"])
    honest = [each for of_seed in found for each in of_seed["honest"]]
    # The trainer's own estimate, of more sessions, is a part of the update.
    own = [each["update_seconds"] - (each["estimate"].get("seconds") or 0.0) for each in honest]
    share = estimate_seconds / statistics.median(own)
    return (
        f"an estimate from 100 sessions takes {estimate_seconds:.2f} s, {share:.0%} of an update with its publication"
    )


def main() -> int:
    """Measure the seeds that the file lacks, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds to have in the file [default: 3]")
    parser.add_argument("--json", type=Path, required=True, help="what was measured: read first, and written")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    found = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    for seed in range(len(found), options.seeds):
        found.append(json.loads(json.dumps(measure(seed))))
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print("\n".join([*coverage(found), "", *before_a_call(found), ""]))
    print("\n".join([best_of_five(found), noticed(found), canaries(found), costs(found)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
