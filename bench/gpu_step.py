"""One optimizer step of the trainer over sessions of ten turns: throughput, utilisation, memory, its gradient."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rollouts import SIZES, advantages, play, read, write_model
from training import operations_of, peak_operations

from trainer.batch.batch import build
from trainer.batch.chain import Chain
from trainer.features import Settings
from trainer.features.memory import SavingAgent
from trainer.features.optimizers import make_optimizer
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from turnwise.store.database import Database

NUM_TURNS = 10
WARM_UP_STEPS, STEPS = 2, 3


@contextlib.contextmanager
def made(size_name: str, *, num_sessions: int) -> Iterator[tuple[str, list[Chain]]]:
    """Write a model with random weights, and play sessions; yield the model's directory, and the chains."""
    size = SIZES[size_name]
    with tempfile.TemporaryDirectory() as scratch:
        database = Database(f"sqlite:///{scratch}/ledger.db")
        database.upgrade()
        play(database, size, num_sessions, NUM_TURNS)
        chains = read(database, NUM_TURNS, "chain")
        database.close()
        write_model(Path(scratch) / "model", size, NUM_TURNS)
        yield f"{scratch}/model", chains


def gradient_differences() -> dict[str, float]:
    """Return how far a batch's gradient on the GPU is from that of SDPA in float32 on the CPU, by dtype and attention.

    The differences are relative to the norm of the gradient. Without a GPU there are none.
    """
    if not torch.cuda.is_available():
        return {}
    with made("small", num_sessions=4) as (model, chains):

        def gradient(device: str, dtype: str, attention: str) -> torch.Tensor:
            settings: dict[str, Any] = {"device": device, "dtype": dtype, "attention": attention}
            settings |= {"model": model, "max_logprob_gap": float("inf")}
            policy = Policy(Settings(**settings))
            policy.load(0)
            agent = PolicyAgent(policy, policy.settings)
            batch = build(chains, advantages(chains), policy_version=0)
            agent.gradient(make_optimizer(policy.parameters(), policy.settings), batch, range(len(batch.experiences)))
            if not policy.shares_rows:
                raise RuntimeError(f"{attention} in {dtype}: {policy.why_alone}")
            parts = [each.grad.float().cpu().flatten() for each in policy.parameters() if each.grad is not None]
            return torch.cat(parts)

        known = gradient("cpu", "float32", "sdpa")
        return {
            f"{attention}_{dtype}": float((gradient("cuda", dtype, attention) - known).norm() / known.norm())
            for attention in ("sdpa", "flex_attention")
            for dtype in ("float32", "bfloat16")
        }


def measure_step(size_name: str, *, num_sessions: int) -> dict[str, Any]:
    """Return the figures of a model with random weights."""
    with made(size_name, num_sessions=num_sessions) as (model, chains):
        agent = SavingAgent(Policy(Settings(model=model)), Settings(max_logprob_gap=float("inf")))
        agent.load(0)
    policy = agent.policy
    optimizer = make_optimizer(policy.parameters(), Settings())
    batch = build(chains, advantages(chains), policy_version=0)
    members = range(len(batch.experiences))
    rows = agent.rows(batch, members)
    best = float("inf")
    for number in range(WARM_UP_STEPS + STEPS):
        started = time.perf_counter()
        agent.gradient(optimizer, batch, members)
        agent.step(optimizer)
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP_STEPS:
            best = min(best, time.perf_counter() - started)
    peak = peak_operations(policy.device)
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "row_tokens": agent.row_tokens,
        "tokens": sum(len(row.layout.tokens) for row in rows),
        "attended_pairs": sum(int((row.layout.positions + 1).sum()) for row in rows),
        "trained_tokens": len(batch.table),
        "step_seconds": best,
        "trained_tokens_per_second": len(batch.table) / best,
        "tokens_per_second": sum(len(row.layout.tokens) for row in rows) / best,
    }
    if peak is not None:
        figures["utilisation"] = operations_of(policy, rows) / best / peak
    if policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(policy.device).total_memory
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(policy.device)
        figures["memory_left_share"] = 1 - torch.cuda.max_memory_reserved(policy.device) / total
    return figures
