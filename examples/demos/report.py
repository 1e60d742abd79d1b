"""The report of a demo: rewards with their margin, the learning curve, and how far unrelated replies changed."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from turnwise.features.statistics import intervals
from turnwise.features.statistics.confidence import Looks
from turnwise.rollouts.results import RunResult
from turnwise.types import PolicyKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forgetting:
    """How far a version is from version 0 on unrelated conversations."""

    num_conversations: int
    num_tokens: int
    """Tokens of the replies, which alone are compared."""
    loss_before: float
    """Mean of −log p under version 0, nats a token."""
    loss_after: float
    kl: float
    """Mean of KL(version 0 ‖ version) over the whole vocabulary, nats a token."""


def measure_forgetting(base: Path, version: Path, kind: PolicyKind, conversations: Path) -> Forgetting:
    """Compare a version with version 0, whose replies these are. Both models run here, without the engine.

    Args:
        base: Directory of version 0.
        version: Directory of the version: an adapter, or a whole model.
        kind: Which of them it is.
        conversations: JSON Lines with `messages`: a question and a reply of version 0.
    """
    import torch
    from torch.nn.functional import kl_div
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # more would wait for one another on a busy machine
    tokenizer = AutoTokenizer.from_pretrained(base)
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(base if kind is PolicyKind.LORA else version, dtype=torch.float32)
    if kind is PolicyKind.LORA:
        from peft import PeftModel

        after = PeftModel.from_pretrained(after, version)
    losses = torch.zeros(3, dtype=torch.float64)
    lines = conversations.read_text(encoding="utf-8").splitlines()
    num_tokens = 0
    for line in lines:
        ids, start = _tokens(tokenizer, json.loads(line)["messages"])
        reply = torch.tensor(ids[start:])
        with torch.no_grad():
            p, q = (model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1) for model in (before, after))
        losses[0] -= p.gather(1, reply[:, None]).sum()
        losses[1] -= q.gather(1, reply[:, None]).sum()
        losses[2] += kl_div(q, p, log_target=True, reduction="sum")
        num_tokens += len(reply)
    loss_before, loss_after, kl = (losses / num_tokens).tolist()
    return Forgetting(
        num_conversations=len(lines), num_tokens=num_tokens, loss_before=loss_before, loss_after=loss_after, kl=kl
    )


def _tokens(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], int]:
    """Return the tokens of a conversation, and where its reply begins."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = prompt + messages[-1]["content"]
    num_prompt = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return tokenizer(whole, add_special_tokens=False)["input_ids"], num_prompt


def mean_reward(results: Sequence[RunResult]) -> float:
    """Return the mean reward; sessions without one count as 0."""
    return sum(result.reward or 0.0 for result in results) / max(1, len(results))


def margin(results: Sequence[RunResult]) -> float:
    """Return half of the 95 % interval of the mean of rewards between 0 and 1."""
    found = intervals.mean([result.reward or 0.0 for result in results], Looks(), bounds=(0.0, 1.0))
    return (found.high - found.low) / 2


def count_failures(samples: Iterable[Sample]) -> dict[str, int]:
    """Return how many requests failed, by reason or by the code of the proxy's own error, from its metrics."""
    turns, refused = Counter[str](), Counter[str]()
    for sample in samples:
        if sample.name == "turnwise_turns_total" and sample.labels["outcome"] in ("error", "aborted"):
            turns[sample.labels["reason"] or sample.labels["outcome"]] += int(sample.value)
        elif sample.name == "turnwise_refused_total":
            refused[sample.labels["code"]] += int(sample.value)
    return dict(+(turns | refused))  # a call that reached no engine is in both


@dataclasses.dataclass(slots=True)
class Point:
    """One policy version on the learning curve."""

    version: int
    num_sessions: int
    """Number of training sessions played when it became active."""
    reward: float
    """Mean reward of the latest batch of training sessions, on new tasks."""
    reload_seconds: float | None
    staleness: float | None
    """Mean staleness over the batch that made this version."""


@dataclasses.dataclass(kw_only=True)
class RunReport(abc.ABC):
    """What every demo reports of a run."""

    seed: int
    seconds: float = 0.0
    """Time from the stack's start to its end, without the build of the model."""
    load_average: float = 0.0
    """Of the machine at the end, over five minutes: other programs take part of the time."""
    warm_up_seconds: float = 0.0

    def write(self, directory: Path) -> None:
        """Write `report.json` and a picture."""
        (directory / "report.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        self.draw(directory)

    @abc.abstractmethod
    def draw(self, directory: Path) -> None:
        """Write the picture."""

    @abc.abstractmethod
    def lines(self, out: Path) -> list[str]:
        """Return the result in words, and where the files are."""


@contextlib.contextmanager
def picture(path: Path, xlabel: str, title: str, **legend: Any) -> Iterator[Any]:
    """Yield the axes of a picture of mean rewards, and write it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    yield axes
    axes.set(xlabel=xlabel, ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title(title, fontsize="medium", wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", **legend)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@dataclasses.dataclass(kw_only=True)
class Report(RunReport):
    """The run of one policy."""

    title: str
    """Of the picture."""
    reward_before: float = 0.0
    reward_after: float = 0.0
    margin_before: float = 0.0
    """Half of the reward's 95 % interval."""
    margin_after: float = 0.0
    greedy: tuple[float, float] | None = None
    """Held-out reward before and after where the agent's calls are greedy; None if it was not measured."""
    forgetting: Forgetting | None = None
    num_eval_tasks: tuple[int, int] = (0, 0)
    """Number of held-out tasks of the rewards before and after."""
    num_policy_versions: int = 0
    num_sessions: int = 0
    num_turns: int = 0
    num_sampled_tokens: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    """Failed requests by reason or code, and failed `sessions`."""
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Turns by outcome."""
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests that the proxy answered with its own error, by code."""
    num_chains_max: int | None = None
    """Maximum number of chains of a session, if it was counted."""
    reload_pause_seconds_max: float = 0.0
    curve: list[Point] = dataclasses.field(default_factory=list)

    @property
    def failed_requests(self) -> int:
        return sum(self.failures.values())

    def set_before(self, results: Sequence[RunResult]) -> None:
        self.reward_before, self.margin_before = mean_reward(results), round(margin(results), 4)
        self.num_eval_tasks = len(results), 0

    def set_after(self, results: Sequence[RunResult]) -> None:
        self.reward_after, self.margin_after = mean_reward(results), round(margin(results), 4)
        self.num_eval_tasks = self.num_eval_tasks[0], len(results)

    def draw(self, directory: Path) -> None:
        """Write `learning.png`."""
        title = f"{self.title} (seed {self.seed}, {self.num_policy_versions} policy versions)"
        with picture(directory / "learning.png", "sessions played", title) as axes:
            sessions, rewards = [p.num_sessions for p in self.curve], [p.reward for p in self.curve]
            axes.plot(sessions, rewards, ".-", label="training tasks, each new")
            ends = [0, sessions[-1] if sessions else 0]
            rewards, margins = [self.reward_before, self.reward_after], [self.margin_before, self.margin_after]
            axes.errorbar(ends, rewards, yerr=margins, fmt="D", capsize=3, label="held-out tasks, 95 % interval")

    def lines(self, out: Path) -> list[str]:
        """Return the result in words, and where the files are."""
        before, after = self.reward_before, self.reward_after
        played = f"{self.num_sessions} sessions, {self.num_turns} turns, {self.num_sampled_tokens} sampled tokens"
        failures = ", ".join(f"{count} {name}" for name, count in self.failures.items())
        failed = f"{self.failed_requests} failed requests" + (f" ({failures})" if failures else "")
        first, last = f"{before:.2f} ± {self.margin_before:.2f}", f"{after:.2f} ± {self.margin_after:.2f}"
        return [
            f"held-out reward {first} → {last} (95 %), over {' and '.join(map(str, self.num_eval_tasks))} tasks",
            f"{self.num_policy_versions} policy versions, {played}, {failed}",
            f"{self.warm_up_seconds:.0f} s to build the model, {self.seconds:.0f} s from the start of the engine on",
            f"numbers: {out / 'report.json'}   curve: {out / 'learning.png'}   logs: {out / 'logs'}",
            f"one task before and after: {out / 'transcript.md'}",
            f"look inside: turnwise sessions --database sqlite:///{out / 'turnwise.db'}",
        ]
