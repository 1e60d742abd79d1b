"""Measure steps of several policies over one base model: `python bench/policies.py`.

Each policy has rows and an adapter of its own. *In turns* is what the trainer does: an adapter is put in place, and its
rows go forward and backward, policy after policy. *Packed* computes the rows of all policies at once, with the base
model's layers over all of them and each row's own adapter: by stacked products (`bmm`), or by a loop over the rows. The
gradients must agree. Times are CPU seconds of one thread; the candidates run alternately, and the best round counts.
The model has the shape of the demo's. Packed rows without any adapter are the least that packing could take.

`python bench/policies.py --trainer` trains them with the trainer, and prints the share of each part of a batch in the
CPU seconds of its main thread, and what a policy takes on disk.

Legend: P policies, R rows of a policy, T tokens of a row.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from rollouts import SIZES, play, write_model
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.claims import Claims
from trainer.commit import Commits
from trainer.policies import Policies
from trainer.policy.adapters import Adapter
from trainer.policy.agent import PolicyAgent
from trainer.settings import TrainerSettings
from trainer.train import OnPolicyWorkflow
from trainer.update import Updates
from turnwise.demo.small_model import SmallModelSpec
from turnwise.store import named_policies
from turnwise.store.database import Database

FASTER = 2.0
"""Required speedup of packed steps at 8 policies."""
TOLERANCE = 1e-3
"""Largest difference of gradients, relative to the largest gradient."""
RANK = 16


def make_model() -> nn.Module:
    """Return the demo's model with random weights and an adapter."""
    from peft import LoraConfig, get_peft_model

    spec = SmallModelSpec()
    config = Qwen3Config(
        vocab_size=spec.vocabulary_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
    )
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=RANK, lora_alpha=32, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the negative logprob of the rows' tokens, summed; tokens are [P, T] or [1, T]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


class InTurns:
    """Policy after policy."""

    def __init__(self, model: nn.Module, num_policies: int) -> None:
        self._model = model
        first = Adapter.in_place(model)
        self.adapters = [first.copied() for _ in range(num_policies)]

    def run(self, tokens: Tensor) -> None:
        """Compute the gradients, a pass for each row of a policy, as the trainer does. Tokens are [P, R, T]."""
        for adapter, rows in zip(self.adapters, tokens, strict=True):
            adapter.put()
            for row in rows:
                loss_of(self._model, row[None]).backward()

    def gradients(self) -> Iterator[list[Tensor]]:
        """Return and clear the gradients of each policy, in the order of the model's parameters."""
        for adapter in self.adapters:
            adapter.put()
            trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            yield [parameter.grad for parameter in trained if parameter.grad is not None]
            for parameter in trained:
                parameter.grad = None


class Packed:
    """The rows of all policies in one pass."""

    def __init__(self, model: nn.Module, num_policies: int, *, is_stacked: bool) -> None:
        self._model = model
        self._is_stacked = is_stacked
        self._layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
        self._stacked = [self._copies(layer, num_policies) for layer in self._layers]

    @staticmethod
    def _copies(layer: LoraLinear, count: int) -> tuple[nn.Parameter, nn.Parameter]:
        weights = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        a, b = (nn.Parameter(weight.detach().expand(count, -1, -1).clone()) for weight in weights)
        return a, b

    @contextlib.contextmanager
    def _in_place(self, rows_a_policy: int) -> Iterator[None]:
        """Let each layer add each row's own adapter."""
        for layer, (a, b) in zip(self._layers, self._stacked, strict=True):
            layer.forward = self._forward(layer, a, b, rows_a_policy)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _forward(self, layer: LoraLinear, down: Tensor, up: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
        scale, base = layer.scaling["default"], layer.base_layer

        def forward(inputs: Tensor) -> Tensor:
            count, length = len(down), inputs.shape[1]
            x = inputs.reshape(count, rows * length, -1)
            if self._is_stacked:
                added = torch.bmm(torch.bmm(x, down.transpose(1, 2)), up.transpose(1, 2))
            else:
                added = torch.stack([x[p] @ down[p].T @ up[p].T for p in range(count)])
            return base(inputs) + added.reshape(*inputs.shape[:2], -1) * scale

        return forward

    def run(self, tokens: Tensor) -> None:
        """Compute the gradients, one row of every policy a pass."""
        for rows in tokens.transpose(0, 1):
            with self._in_place(1):
                loss_of(self._model, rows).backward()

    def gradients(self) -> Iterator[list[Tensor]]:
        """Return and clear the gradients of each policy, in the order of the model's parameters."""
        parameters = [parameter for pair in self._stacked for parameter in pair]
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        for number in range(len(found[0])):
            yield [gradient[number] for gradient in found]


def without_adapter(model: nn.Module, tokens: Tensor) -> None:
    """Compute the rows of all policies at once, forward and backward to the embeddings, without adapters."""
    embeddings = model.get_input_embeddings().weight
    embeddings.requires_grad_(True)
    with model.disable_adapter():
        for rows in tokens.transpose(0, 1):
            loss_of(model, rows).backward()
    embeddings.requires_grad_(False)
    embeddings.grad = None


def measure(num_policies: int, row_tokens: int, num_rows: int, rounds: int) -> dict[str, float]:
    """Return the CPU seconds of each candidate."""
    torch.manual_seed(1)
    tokens = torch.randint(0, SmallModelSpec().vocabulary_size, (num_policies, num_rows, row_tokens))
    model = make_model()
    stacked, looped = (Packed(model, num_policies, is_stacked=way) for way in (True, False))
    turns = InTurns(model, num_policies)
    ways = {"in_turns": turns, "stacked": stacked, "looped": looped}
    runs: dict[str, Callable[[], None]] = {name: lambda way=way: way.run(tokens) for name, way in ways.items()}
    runs["without_adapters"] = lambda: without_adapter(model, tokens)
    for run in runs.values():
        run()
    check([list(way.gradients()) for way in ways.values()])
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
            if name in ways:
                list(ways[name].gradients())
    return best


def check(found: Sequence[list[list[Tensor]]]) -> None:
    """Check that all candidates computed the same gradients."""
    expected, *others = found
    for other in others:
        for one, two in zip(expected, other, strict=True):
            for left, right in zip(one, two, strict=True):
                gap = float((left - right).abs().max() / left.abs().max())
                if gap > TOLERANCE:
                    sys.exit(f"gradients differ by {gap:.2g} of the largest")


PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "claims": (Claims, ("next", "refilled", "selected", "batch_of")),
    "step": (Updates, ("with_token_credit", "take")),
    "export": (PolicyAgent, ("export",)),
    "publish": (Commits, ("next_version", "_published")),
    "state": (Commits, ("_write_behind", "settle")),
}
"""The parts of a batch, and the methods that do them; the state is written and acknowledged by a thread."""
BATCHES, GROUPS = 3, 8


def train(num_policies: int, scratch: Path) -> dict[str, Any]:
    """Train policies over one ledger; return shares of the parts, and sizes."""
    database = Database(f"sqlite:///{scratch}/ledger.db")
    database.upgrade()
    size, num_turns = SIZES["small"], 4
    write_model(scratch / "model", size, num_turns)
    with database.write() as conn:
        made = [named_policies.create_named_policy(conn, "default", f"p{n}")[0] for n in range(1, num_policies)]
    for policy_id in [0, *(policy.policy_id for policy in made)]:
        play(database, size, 4 * GROUPS * BATCHES, num_turns, policy_id)
    seconds: Counter[str] = Counter()
    for part, (owner, names) in PARTS.items():
        for name in names:
            setattr(owner, name, _timed(getattr(owner, name), part, seconds))
    settings = TrainerSettings(
        database=f"sqlite:///{scratch}/ledger.db",
        model=str(scratch / "model"),
        policies_dir=scratch / "policies",
        kind="lora",
        lora_rank=RANK,
        groups_per_batch=GROUPS,
        num_minibatches=2,
        total_batches=BATCHES,
        wait_seconds=0.0,
        progress=False,
        max_logprob_gap=10.0,  # all batches were sampled by version 0
    )
    policies = Policies(settings, OnPolicyWorkflow)
    began = time.monotonic()
    policies.learn()
    wall = time.monotonic() - began
    policies.close()
    database.close()
    total = sum(seconds.values())
    files = {
        name: _size(path)
        for name, path in (("version", "v000001"), ("state", "v000001.trainer"))
        for path in [scratch / "policies" / path]
    }
    return {
        "policies": num_policies,
        "batches": num_policies * BATCHES,
        "seconds_a_batch": round(total / num_policies / BATCHES, 3),
        "wall_seconds": round(wall, 1),
        **{f"{part}_share": round(seconds[part] / total, 3) for part in PARTS},
        **{f"{name}_bytes": value for name, value in files.items()},
    }


def _timed(function: Callable[..., Any], part: str, seconds: Counter[str]) -> Callable[..., Any]:
    """Return a function that adds its CPU seconds to those of a part."""

    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds[part] += time.thread_time() - began

    return timed


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def main() -> None:
    """Print a line of JSON for each number of policies and size of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--row-tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rows", type=int, default=2, help="rows of each policy in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainer", action="store_true", help="train them, and time the parts of a batch")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.trainer:
        for count in given.policies:
            with tempfile.TemporaryDirectory() as scratch:
                print(json.dumps(train(count, Path(scratch))), flush=True)
        return
    for row_tokens in given.row_tokens:
        for count in given.policies:
            seconds = measure(count, row_tokens, given.rows, given.rounds)
            faster = seconds["in_turns"] / min(seconds["stacked"], seconds["looped"])
            line = {"policies": count, "row_tokens": row_tokens, "faster": round(faster, 2), "target": FASTER}
            print(json.dumps(line | {name: round(value, 4) for name, value in seconds.items()}), flush=True)


if __name__ == "__main__":
    main()
