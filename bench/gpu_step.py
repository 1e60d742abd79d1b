"""One optimizer step of the trainer over sessions of ten turns: throughput, utilisation, memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rollouts import SIZES, advantages, play, read, write_model
from training import operations_of, peak_operations

from trainer.batch.batch import build
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from trainer.model.optimizer import make_optimizer
from trainer.settings import TrainerSettings
from turnwise.store.database import Database

NUM_TURNS = 10
WARM_UP_STEPS, STEPS = 2, 3


def measure_step(size_name: str, *, num_sessions: int) -> dict[str, Any]:
    """Return the figures of a model with random weights."""
    size = SIZES[size_name]
    with tempfile.TemporaryDirectory() as scratch:
        database = Database(f"sqlite:///{scratch}/ledger.db")
        database.upgrade()
        play(database, size, num_sessions, NUM_TURNS)
        chains = read(database, NUM_TURNS, "chain")
        database.close()
        write_model(Path(scratch) / "model", size, NUM_TURNS)
        policy = Policy(TrainerSettings(model=f"{scratch}/model"))
        policy.load(0)
    agent = PolicyAgent(policy, TrainerSettings(max_logprob_gap=float("inf")))
    optimizer = make_optimizer(policy.parameters(), TrainerSettings())
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
