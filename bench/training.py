"""Measure the effect of merging turns on training: `python bench/training.py [--device cuda --size 0.5b]`.

Sessions of 5 to 40 turns are written to an SQLite ledger and read twice: as one packed sequence per chain, as the
trainer reads them, and as one row per turn with its whole prompt. The trainer's code computes loss and gradient of
both, and the losses must agree. At 10 turns the same completions also go through TRL's GRPO loss: one row per turn, as
agents outside of TRL produce them, and, for comparison, one row per session with a mask, as TRL's own tool loop
produces them. The candidates run alternately; the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rollouts import SIZES, advantages, play, read, write_model

from trainer.batch.batch import Batch, Row, build
from trainer.features import Settings
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from turnwise.store.database import Database

FEWER_TOKENS = 0.8
"""Required factor of fewer tokens in merged sequences, as a share of (T + 1) / 2."""
FASTER = 0.6
"""Required speedup, as a share of the factor in tokens."""
FASTER_THAN_TRL = 1.5
"""Required speedup in trained tokens per second over TRL with one row per turn."""
TARGETS = ("fewer_tokens", "faster", "faster_than_trl")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum difference between the losses of the same completions."""
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
"""Dense bfloat16 operations per second, from the vendor's data sheets."""
MERGED, BY_TURN, TRL_BY_TURN, TRL_BY_SESSION = "merged", "row a turn", "TRL, row a turn", "TRL, row a session"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute the gradient of the same completions."""

    tokens: int
    """Number of tokens that go through the model, including padding."""
    run: Callable[[], float]
    """Compute loss and gradient; return the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a candidate."""

    tokens: int
    seconds: float
    """Duration of the fastest round."""
    trained_per_second: float
    """Sampled tokens with loss per second."""


class Bench:
    """A model, a ledger, and the candidates that use them."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self._given = given
        self._size = SIZES[given.size]
        self._scratch = scratch
        write_model(scratch / "model", self._size, max(given.turns))
        self.policy = Policy(Settings(model=str(scratch / "model"), device=given.device))
        self.policy.load(0)
        self._database = Database(f"sqlite:///{scratch}/ledger.db")
        self._database.upgrade()

    def measure(self, num_turns: int) -> dict[str, Any]:
        """Return the measurements for one length of session."""
        play(self._database, self._size, self._given.sessions, num_turns)
        chains, turns = (_batch(read(self._database, num_turns, merge)) for merge in ("chain", "turn"))
        merged_rows, merged = self._ours(chains, Settings(row_tokens=self._given.row_tokens))
        _, by_turn = self._ours(turns, Settings(row_tokens=1))
        candidates = {MERGED: merged, BY_TURN: by_turn}
        if num_turns in self._given.trl_turns:
            candidates |= self._trl(chains, turns)
        found = self._compete(candidates, len(chains.table))
        tokens, speed = found[BY_TURN].tokens / found[MERGED].tokens, found[BY_TURN].seconds / found[MERGED].seconds
        trl = found.get(TRL_BY_TURN)
        return {
            "turns": num_turns,
            "trained_tokens": len(chains.table),
            "fewer_tokens": tokens,
            "fewer_tokens_target": FEWER_TOKENS * (num_turns + 1) / 2,
            "faster": speed,
            "faster_target": FASTER * tokens,
            "faster_than_trl": found[MERGED].trained_per_second / trl.trained_per_second if trl else None,
            "faster_than_trl_target": FASTER_THAN_TRL,
            "utilisation": self._utilisation(merged_rows, found[MERGED].seconds),
            "candidates": {name: dataclasses.asdict(one) for name, one in found.items()},
        }

    def close(self) -> None:
        """Close the ledger."""
        self._database.close()

    def _ours(self, batch: Batch, rule: Settings) -> tuple[Sequence[Row], Candidate]:
        agent = PolicyAgent(self.policy, rule)
        members = range(len(batch.experiences))
        rows = agent.rows(batch, members)

        def run() -> float:
            self.policy.model.zero_grad(set_to_none=True)
            return float(agent.accumulate_gradient(batch, members)[0].read()["loss"] or 0.0)

        return rows, Candidate(tokens=sum(len(row.layout.tokens) for row in rows), run=run)

    def _trl(self, chains: Batch, turns: Batch) -> dict[str, Candidate]:
        from trl_loss import TrlLoss, num_tokens

        trl = TrlLoss(self._scratch / "model", self._scratch / "trl", self.policy.device)
        inputs = {TRL_BY_TURN: trl.micro_batches(turns), TRL_BY_SESSION: trl.micro_batches(chains)}
        return {
            name: Candidate(tokens=num_tokens(rows), run=functools.partial(trl.gradient, rows))
            for name, rows in inputs.items()
        }

    def _compete(self, candidates: dict[str, Candidate], num_trained: int) -> dict[str, Measured]:
        """Measure the candidates alternately, after a warm-up round in which their losses must agree."""
        expected = candidates[BY_TURN].run()
        for name, candidate in candidates.items():
            loss = candidate.run()
            if abs(loss - expected) > TOLERANCE[self.policy.compute_dtype]:
                raise SystemExit(f"{name!r} computes a loss of {loss}, one row a turn has {expected}")
        best = dict.fromkeys(candidates, float("inf"))
        for _ in range(self._given.rounds):
            for name, candidate in candidates.items():
                gc.collect()
                best[name] = min(best[name], self._seconds(candidate.run))
        return {
            name: Measured(tokens=candidate.tokens, seconds=best[name], trained_per_second=num_trained / best[name])
            for name, candidate in candidates.items()
        }

    def _seconds(self, run: Callable[[], float]) -> float:
        started = time.perf_counter()
        run()  # returns a number on the host, so the GPU has finished
        return time.perf_counter() - started

    def _utilisation(self, rows: Iterable[Row], seconds: float) -> float | None:
        """Return the model's operations per second divided by the device's peak; None if the peak is unknown."""
        given = self._given.peak_tflops
        peak = given * 1e12 if given else peak_operations(self.policy.device)
        return None if peak is None else operations_of(self.policy, rows) / seconds / peak


def operations_of(policy: Policy, rows: Iterable[Row]) -> int:
    """Return the model's operations of these rows, forward and backward.

    Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B: 6 N + 12 L H Q T operations per token, with N
    parameters, L layers, H heads of dimension Q, T tokens attended to. Here N excludes the embeddings, the output layer
    counts only for tokens that predict a trained token, and T is the number of tokens that a token attends to, without
    masked tokens.
    """
    config = policy.config
    body = sum(value.numel() for name, value in policy.model.named_parameters() if ".layers." in name)
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    operations = 0
    for row in rows:
        operations += 6 * body * len(row.layout.tokens)
        operations += 6 * config.hidden_size * config.vocab_size * len(set(row.predictor.tolist()))
        operations += 12 * width * int((row.layout.positions + 1).sum())
    return operations


def _batch(experiences: Sequence[Any]) -> Batch:
    return build(experiences, advantages(experiences), policy_version=0)


def peak_operations(device: torch.device) -> float | None:
    """Return the device's bfloat16 operations per second; None if they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def missed(figures: dict[str, Any], targets: Sequence[str]) -> list[str]:
    """Return a sentence for each missed target."""
    return [
        f"{figures['turns']} turns: {name} is {figures[name]:.2f}, below {figures[f'{name}_target']:.2f}"
        for name in targets
        if figures[name] is not None and figures[name] < figures[f"{name}_target"]
    ]


def show(figures: dict[str, Any]) -> None:
    """Print the measurements for one length of session."""
    used = "" if figures["utilisation"] is None else f"   model-FLOPs utilisation {figures['utilisation']:.1%}"
    print(f"{figures['turns']} turns, {figures['trained_tokens']:,} trained tokens{used}")
    merged = figures["candidates"][MERGED]
    for name, one in figures["candidates"].items():
        print(
            f"  {name:<20}{one['tokens']:>10,} tokens{one['seconds']:>9.3f} s"
            f"{one['trained_per_second']:>10,.0f} trained tokens/s"
            f"{one['tokens'] / merged['tokens']:>8.2f}× the tokens{one['seconds'] / merged['seconds']:>8.2f}× the time"
        )


def main() -> int:
    """Print a block per length of session; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 10, 20, 40])
    parser.add_argument("--trl-turns", type=int, nargs="*", default=[10], help="at which lengths TRL runs beside it")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--row-tokens", type=int, help="of a packed row; by default the trainer's own choice")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the utilisation; by default by its name")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS, help="a busy machine keeps the first")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # no vLLM is used here
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(given, Path(directory))
        found = []
        for num_turns in given.turns:
            found.append(bench.measure(num_turns))
            show(found[-1])
        bench.close()
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    complaints = [sentence for figures in found for sentence in missed(figures, given.targets)]
    print("\n".join(complaints) or "every target is met")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
