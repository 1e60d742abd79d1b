"""The trainer's gradient, computed again in float64 from the rows of the database by code that shares none of its own.

With betas of 0 and an epsilon of 1e4 an optimizer step is lr · g / (|g| + 1e4), so the gradient is read off the files
that the trainer publishes. The formulas here are those of the papers, written for one session at a time: nothing is
packed, shared between rows or cut into chunks. Only the training under test and the rows' origin use other code.

Of a session in several chains each path is a pass of its own. A summary counts to the step of what goes on from it.
"""

import itertools
import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from support import trainer_ledger
from torch import Tensor

EPSILON, STEP = 1e4, 0.5
"""Of Adam, and what a step moves the weights by for each unit of gradient."""
TOLERANCE = 1e-4
"""Of the gradient's norm: float32 differs by a few 1e-6, a factor of 1.001 by 1e-3."""
NUM_GROUPS = 4


@dataclass
class StoredTurn:
    """A turn, as its row has it."""

    turn_id: str
    parent: str | None
    chain: str
    step: int
    """That of its credit: of a summary the step of the first turn that goes on from it."""
    sampling: dict[str, Any]
    prompt: list[int]
    """What it adds to its parent's tokens."""
    sampled: list[int]
    old: Tensor


@dataclass
class StoredSession:
    """A session with its turns and reward lines, as the rows have them."""

    group: str
    credit: str
    gamma: float
    turns: list[StoredTurn]
    lines: list[tuple[int, float]]
    """Step and value of each; all lines of these sessions are of steps."""

    @property
    def reward(self) -> float:
        return sum(value for _, value in self.lines)

    @property
    def old(self) -> Tensor:
        return torch.cat([turn.old for turn in self.turns])

    @property
    def places(self) -> dict[str, Tensor]:
        """Where the sampled tokens of each turn stand among those of the session."""
        ends = np.cumsum([len(turn.sampled) for turn in self.turns]).tolist()
        return {
            turn.turn_id: torch.arange(end - len(turn.sampled), end) for turn, end in zip(self.turns, ends, strict=True)
        }


def read_sessions(path: Path) -> list[StoredSession]:
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        found = []
        for row in database.execute("SELECT * FROM sessions ORDER BY session_pk").fetchall():
            turns = database.execute("SELECT * FROM turns WHERE session_pk = ? ORDER BY seq", (row["session_pk"],))
            lines = database.execute("SELECT step, value FROM rewards WHERE session_pk = ?", (row["session_pk"],))
            found.append(
                StoredSession(
                    row["group_id"], row["credit"], row["gamma"], _turns(turns.fetchall()), [*map(tuple, lines)]
                )
            )
    database.close()
    return found


def _turns(rows: Sequence[sqlite3.Row]) -> list[StoredTurn]:
    steps = {}
    for row in reversed(rows):
        after = [each["turn_id"] for each in rows if row["turn_id"] in _continued(each)]
        steps[row["turn_id"]] = steps[after[0]] if after else row["step"]
    return [_turn(row, steps[row["turn_id"]]) for row in rows]


def _continued(row: sqlite3.Row) -> list[str]:
    stored = re.search(rb'"continues_summary":(\[[^]]*\])', row["parts"] or b"")
    return [] if stored is None else json.loads(stored[1])


def _turn(row: sqlite3.Row, step: int) -> StoredTurn:
    return StoredTurn(
        turn_id=row["turn_id"],
        parent=row["parent_turn_id"],
        chain=row["chain_id"],
        step=step,
        sampling=json.loads(row["sampling"]),
        prompt=np.frombuffer(row["prompt_delta"], "<i4").tolist(),
        sampled=np.frombuffer(row["token_ids"], "<i4").tolist(),
        old=torch.from_numpy(np.frombuffer(row["logprobs"], "<f4").astype(np.float64)),
    )


def blur(path: Path) -> None:
    """Let the stored logprobs differ from the model's, as an engine's do, and all rewards from one another."""
    rng = np.random.default_rng(0)
    with sqlite3.connect(path) as database:
        for turn_id, blob in database.execute("SELECT turn_id, logprobs FROM turns ORDER BY turn_id").fetchall():
            values = np.frombuffer(blob, "<f4")
            blurred = np.minimum(values + rng.normal(0, 0.15, len(values)), -1e-3).astype("<f4")
            database.execute("UPDATE turns SET logprobs = ? WHERE turn_id = ?", (blurred.tobytes(), turn_id))
        for (reward_id,) in database.execute("SELECT reward_id FROM rewards ORDER BY reward_id").fetchall():
            database.execute("UPDATE rewards SET value = ? WHERE reward_id = ?", (float(rng.uniform()), reward_id))
    database.close()


class Model:
    """A model in float64 whose logprobs are those of what sampled, and the model that sampled."""

    def __init__(self, directory: Path, *, is_plain: bool) -> None:
        """Where `is_plain`, the model's own distribution is taken whatever sampled."""
        self.module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.parameters = dict(self.module.named_parameters())
        self._is_plain = is_plain

    def logprobs(self, session: StoredSession, *, of_base: bool = False) -> Tensor:
        """Return the logprob of each sampled token of a session, in order."""
        found: dict[str, Tensor] = {}
        parents = {turn.parent for turn in session.turns}
        for leaf in session.turns:
            if leaf.turn_id not in parents:
                found |= self._of_path(path_to(leaf, session.turns), of_base=of_base)
        return torch.cat([found[turn.turn_id] for turn in session.turns])

    def _of_path(self, path: Sequence[StoredTurn], *, of_base: bool) -> dict[str, Tensor]:
        tokens: list[int] = []
        starts = []
        for turn in path:
            tokens += turn.prompt
            starts.append(len(tokens))
            tokens += turn.sampled
        given = torch.tensor([tokens])
        logits = (self.base if of_base else self.module)(given).logits[0]
        with torch.no_grad():
            of_sampler = self.base(given).logits[0]
        found = {}
        for turn, start in zip(path, starts, strict=True):
            of_turn = []
            for place, token in enumerate(turn.sampled):
                at = start + place - 1
                history = tokens[:start], turn.sampled[:place]
                of_turn.append(self._distribution(logits[at], of_sampler[at], turn.sampling, *history)[token])
            found[turn.turn_id] = torch.stack(of_turn)
        return found

    def _distribution(
        self, logits: Tensor, of_sampler: Tensor, sampling: dict[str, Any], prompt: list[int], before: list[int]
    ) -> Tensor:
        if self._is_plain:
            return logits.log_softmax(-1)
        processed = penalised(logits, sampling, prompt, before)
        if "top_k" in sampling:
            kept = penalised(of_sampler, sampling, prompt, before).topk(sampling["top_k"]).indices
            processed = torch.full_like(processed, -torch.inf).index_put((kept,), processed[kept])
        return processed.log_softmax(-1)


def path_to(leaf: StoredTurn, turns: Sequence[StoredTurn]) -> list[StoredTurn]:
    by_id, path = {turn.turn_id: turn for turn in turns}, [leaf]
    while path[0].parent is not None:
        path.insert(0, by_id[path[0].parent])
    return path


def penalised(logits: Tensor, sampling: dict[str, Any], prompt: list[int], before: list[int]) -> Tensor:
    """Return logits after the penalties and the temperature."""
    factor, seen = sampling.get("repetition_penalty", 1.0), [*{*prompt, *before}]
    values = logits[seen]
    found = logits.index_put((torch.tensor(seen),), torch.where(values > 0, values / factor, values * factor))
    counts = torch.bincount(torch.tensor(before, dtype=torch.long), minlength=len(logits))
    found = (
        found - sampling.get("frequency_penalty", 0.0) * counts - sampling.get("presence_penalty", 0.0) * (counts > 0)
    )
    return found / sampling.get("temperature", 1.0)


def grouped(sessions: Sequence[StoredSession]) -> list[list[StoredSession]]:
    return [[one for one in sessions if one.group == name] for name in dict.fromkeys(one.group for one in sessions)]


def normalised(values: Sequence[float]) -> list[float]:
    spread = np.std(values, ddof=1) + 1e-6
    return [(value - np.mean(values)) / spread for value in values]


def token_advantages(group: Sequence[StoredSession]) -> list[Tensor]:
    """Return GRPO's advantage of each sampled token of each session: by session, or by step over the returns."""
    if group[0].credit == "propagate":
        of_sessions = normalised([one.reward for one in group])
        return [torch.full_like(one.old, value) for one, value in zip(group, of_sessions, strict=True)]
    returns = []
    for one in group:
        by_step = {
            step: sum(value for at, value in one.lines if at == step) for step in sorted(t.step for t in one.turns)
        }
        later, found = 0.0, {}
        for step in sorted(by_step, reverse=True):
            later = found[step] = by_step[step] + one.gamma * later
        returns.append(found)
    # Each turn is a value of its own, also where a step has several.
    values: dict[int, list[float]] = {}
    for one, found in zip(group, returns, strict=True):
        for turn in one.turns:
            values.setdefault(turn.step, []).append(found[turn.step])
    of_steps = {step: iter(normalised(of_step)) for step, of_step in values.items()}
    return [torch.cat([torch.full_like(turn.old, next(of_steps[turn.step])) for turn in one.turns]) for one in group]


Loss = Callable[[Model, Sequence[Sequence[StoredSession]]], Tensor]


def by_token(of_token: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """Return the mean of a loss of logprob, ratio and advantage over the tokens of a step."""

    def loss(model: Model, groups: Sequence[Sequence[StoredSession]]) -> Tensor:
        parts = []
        for group in groups:
            for one, advantages in zip(group, token_advantages(group), strict=True):
                logprobs = model.logprobs(one)
                parts.append(of_token(logprobs, (logprobs - one.old).exp(), advantages))
        return torch.cat(parts).mean()

    return loss


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(_: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Clip 0.2 and 0.28; where the advantage is negative, 3 bounds the ratio."""
    return torch.where((advantages < 0) & (ratio > 3), -3 * advantages, clipped(ratio, advantages, 0.2, 0.28))


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    return -ratio.detach().clamp(0.0, 1.1) * advantages * logprobs


def gspo(model: Model, groups: Sequence[Sequence[StoredSession]]) -> Tensor:
    """The ratio of a chain is the geometric mean of its tokens'; sessions count alike, and in them all tokens."""
    parts = []
    for group in groups:
        for one, advantages in zip(group, token_advantages(group), strict=True):
            logprobs, places = model.logprobs(one), one.places
            of_session = []
            for chain in dict.fromkeys(turn.chain for turn in one.turns):
                own = torch.cat([places[turn.turn_id] for turn in one.turns if turn.chain == chain])
                ratio = (logprobs[own] - one.old[own]).mean().exp()
                of_session += [clipped(ratio, advantages[at], 0.02, 0.02) for at in own]
            parts.append(torch.stack(of_session).mean())
    return torch.stack(parts).mean()


def dpo(model: Model, groups: Sequence[Sequence[StoredSession]]) -> Tensor:
    parts = []
    for group in groups:
        rewards = [one.reward for one in group]
        margins = []
        for number in (rewards.index(max(rewards)), rewards.index(min(rewards))):
            with torch.no_grad():
                reference = model.logprobs(group[number], of_base=True)
            margins.append((model.logprobs(group[number]) - reference).sum())
        parts.append(-torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1])))
    return torch.stack(parts).mean()


def sft(model: Model, groups: Sequence[Sequence[StoredSession]]) -> Tensor:
    good = [one for group in groups for one in group if one.reward >= 1.0]
    return -torch.cat([model.logprobs(one) for one in good]).mean()


@dataclass(frozen=True)
class Recipe:
    """What is trained, and the loss that it should have."""

    settings: dict[str, Any]
    loss: Loss
    play: str = "plain"
    is_plain: bool = False
    num_minibatches: int = 1
    gamma: float | None = None
    lora: dict[str, Any] = field(default_factory=dict)


def trained(recipe: Recipe, directory: Path, model: Path, ledger: Path) -> dict[str, Tensor]:
    """Train one batch of all groups; return the tensors that were published."""
    with sqlite3.connect(ledger) as source, sqlite3.connect(directory / "ledger.db") as copy:
        source.backup(copy)
        if recipe.gamma is not None:
            copy.execute("UPDATE sessions SET credit = 'step_wise', gamma = ?", (recipe.gamma,))
    source.close()
    copy.close()
    changes = {"betas": (0.0, 0.0), "adam_epsilon": EPSILON, "learning_rate": STEP * EPSILON, "max_grad_norm": 1e9}
    changes |= {"groups_per_batch": NUM_GROUPS, "num_minibatches": recipe.num_minibatches, "total_batches": 1}
    changes |= {"max_logprob_gap": 9.0, "row_tokens": 64, **recipe.settings, **recipe.lora}
    state = trainer_ledger.train(trainer_ledger.settings_for(directory, model, **changes))
    assert state.progress.num_optimizer_steps == recipe.num_minibatches
    name = "adapter_model" if recipe.lora else "model"
    return load_file(directory / "policies/v000001" / f"{name}.safetensors")


def gradient(recipe: Recipe, model: Model, groups: Sequence[Sequence[StoredSession]]) -> dict[str, Tensor]:
    values = list(model.parameters.values())
    found = torch.autograd.grad(recipe.loss(model, groups), values)
    return dict(zip(model.parameters, found, strict=True))


def moved(gradient: Tensor) -> Tensor:
    return STEP * EPSILON * gradient / (gradient.abs() + EPSILON)


def expected_weights(
    recipe: Recipe, directory: Path, steps: Iterable[Sequence[Sequence[StoredSession]]]
) -> dict[str, Tensor]:
    """Return the weights after these optimizer steps, each of which is over some groups."""
    model = Model(directory, is_plain=recipe.is_plain)
    for groups in steps:
        found = gradient(recipe, model, groups)
        with torch.no_grad():
            for name, value in model.parameters.items():
                value -= moved(found[name])
    return {name: value.detach() for name, value in model.parameters.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """Return how far the change of the weights is from the expected one, as a share of that."""
    apart = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    change = sum(float((expected[name] - before[name].double()).square().sum()) for name in expected)
    return (apart / change) ** 0.5


def distance_of_adapter(
    recipe: Recipe, directory: Path, published: dict[str, Tensor], config: dict[str, Any], groups: Any
) -> float:
    """Return the same for an adapter, whose B begins at 0: its gradient is scale · G Aᵀ, and that of A is 0."""
    scale = config["lora_alpha"] / config["r"]
    of_weights = gradient(recipe, Model(directory, is_plain=recipe.is_plain), groups)
    expected, found = {}, {}
    for name, value in published.items():
        if "lora_B" in name:
            first = published[name.replace("lora_B", "lora_A")].double()
            module = name.removeprefix("base_model.model.").replace(".lora_B.weight", ".weight")
            expected[name], found[name] = -moved(scale * of_weights[module] @ first.T), value
    assert len(expected) == 14  # seven projections of two layers
    return distance(found, expected, {name: torch.zeros_like(value) for name, value in found.items()})


def apart(recipe: Recipe, directory: Path, model: Path, ledger: Path) -> float:
    """Train, and return how far the published weights are from those that the rows give."""
    published = trained(recipe, directory, model, ledger)
    groups = grouped(read_sessions(directory / "ledger.db"))
    if recipe.lora:
        config = json.loads((directory / "policies/v000001/adapter_config.json").read_text())
        return distance_of_adapter(recipe, model, published, config, groups)
    before = load_file(model / "model.safetensors")
    size = NUM_GROUPS // recipe.num_minibatches
    orders = [groups]
    if recipe.num_minibatches == 2:  # which groups are in which step is drawn
        firsts = itertools.combinations(range(NUM_GROUPS), size)
        orders = [
            [*(groups[n] for n in first), *(groups[n] for n in range(NUM_GROUPS) if n not in first)] for first in firsts
        ]
    return min(
        distance(
            published,
            expected_weights(recipe, model, [order[at : at + size] for at in range(0, NUM_GROUPS, size)]),
            before,
        )
        for order in orders
    )
