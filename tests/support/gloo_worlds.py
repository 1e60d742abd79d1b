"""Optimizer steps in worlds of several processes over gloo, to compare with one process.

The processes are forked from a server that has torch and transformers loaded, so a world of two takes a second.
"""

import functools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.experience_factory import experience
from support.waiting import WAIT_SECONDS

from trainer.batch.batch import build
from trainer.features import Settings
from trainer.features.devices import Sharded, leave_world
from trainer.features.reference import Reference
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy

NUM_STEPS = 3
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["support.gloo_worlds", "transformers.models.qwen3.modeling_qwen3"])


class WorldFailed(Exception):
    def __init__(self, errors: dict[int, str], num_hanging: int) -> None:
        super().__init__(
            f"{num_hanging} processes did not end within {WAIT_SECONDS:g} s; {next(iter(errors.values()), '')}"
        )
        self.errors = errors
        """Traceback of each process that raised, by its rank."""
        self.num_hanging = num_hanging


def sessions(vocabulary: int = 48) -> list[Any]:
    """Return twelve sessions of four groups, which share prompts and branch, of 20 to 42 tokens."""
    rng = np.random.default_rng(0)
    found = []
    for group in range(4):
        prompt = rng.integers(1, vocabulary, 8)
        for run in range(3):
            own = rng.integers(1, vocabulary, 12 + 11 * run)
            mask = [False] * 8 + [bool(index % 5) for index in range(len(own))]
            tokens = np.concatenate([prompt, own])
            name = f"{group}-{run}"
            found.append(
                experience(
                    session_id=name,
                    group_id=str(group),
                    tokens=tokens,
                    loss_mask=mask,
                    logprobs=np.full(len(tokens), -3.5),
                )
            )
    return found


def compiled_steps(spec: dict[str, Any], rule: dict[str, Any]) -> dict[str, Any]:
    torch.compile = functools.partial(torch.compile, backend="eager")  # it generates no code, which takes half a minute
    found = steps(spec, rule, is_sharded=True, is_compiled=True)
    return found | {"num_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def steps(
    spec: dict[str, Any], rule: dict[str, Any], *, is_sharded: bool = False, is_compiled: bool = False
) -> dict[str, Any]:
    """Return losses, gradient norms, logprobs and weights of a few optimizer steps."""
    torch.set_num_threads(1)
    policy = Policy(Settings(**{"device": "cpu", **spec}))
    policy.compiled = is_compiled
    made = Settings(**{"row_tokens": 64, "max_logprob_gap": 100.0, **rule})
    heads = [Reference(policy, Policy(policy.settings))] if made.algorithm.needs_reference else []
    agent = PolicyAgent(policy, made, heads)
    if is_sharded:
        agent.shard(Sharded())
    agent.load(0)
    found = sessions()
    credit = [np.array([float(index % 3 - 1)]) for index in range(len(found))]
    batch = build(found, credit, policy_version=0)
    # With a smaller eps AdamW would scale up the rounding errors of weights that have hardly a gradient.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-6)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        gauges, _ = agent.gradient(optimizer, batch, range(len(found)))
        norm = agent.step(optimizer)
        losses.append(gauges.read()["loss"])
        norms.append(norm)
    logprobs = agent.logprobs_of(batch, range(len(found)))
    text = policy.next_logprobs(found[0].tokens.tolist())
    weights = policy.trained_state()
    published = {} if spec.get("kind") == "lora" else policy.published(weights)
    return {
        "losses": losses,
        "norms": norms,
        "logprobs": torch.from_numpy(logprobs),
        "text": text,
        "weights": weights,
        "published": published,
    }


def world_of(size: int, spec: dict[str, Any], **rule: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_world(size, steps, spec, rule, is_sharded=True)[0]
    return found


def run_world(size: int, task: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Call a function of an importable module in so many processes of one group; return what each returned.

    A process that raises leaves the group, which ends the collectives that the others wait in.

    Raises:
        WorldFailed: A process raised, or did not end.
    """
    with tempfile.TemporaryDirectory() as scratch:
        call = functools.partial(task, *arguments, **options)
        processes = [
            _SERVER.Process(target=_member, args=(rank, size, scratch, call), daemon=True) for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + WAIT_SECONDS
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        hanging = [process for process in processes if process.is_alive()]
        for process in hanging:
            process.kill()
        errors = {int(path.stem): path.read_text() for path in Path(scratch).glob("*.error")}
        if hanging or errors:
            raise WorldFailed(errors, len(hanging))
        assert all(process.exitcode == 0 for process in processes)
        return [torch.load(Path(scratch) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _member(rank: int, size: int, scratch: str, call: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=size)
    try:
        torch.save(call(), f"{scratch}/{rank}.pt")
    except BaseException:
        (Path(scratch) / f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        leave_world()
