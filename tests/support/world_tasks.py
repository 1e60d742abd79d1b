"""What the processes of a gloo world do: resume from a state and write one, train a ledger, fail where others wait."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.gloo_worlds import sessions
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from trainer.batch.batch import Batch, build
from trainer.claims.ledger import RunProgress
from trainer.features import FEATURES, Settings, devices
from trainer.features.devices import Processes, Sharded
from trainer.model import model
from trainer.model.agent import PolicyAgent, Schedule
from trainer.model.model import Policy
from trainer.publish import checkpoint
from trainer.publish.checkpoint import Checkpoints
from trainer.versions.state import State
from trainer.workflows import OnPolicyWorkflow

FAILING_RANK = 1


def resume_and_train(
    spec: dict[str, Any], directory: Path, start: int, stop: int, *, is_sharded: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Resume after `start` optimizer steps, train until step `stop`, and write the state; 0 is a new run.

    A `{}` in the directory's name is the number of the process, which has a directory of its own then.

    Returns:
        Weights and moments as they were read, and as they were written.
    """
    torch.set_num_threads(1)
    checkpoint.SHARED_SECONDS = 0.0  # a directory that is not there now never is
    policy = Policy(Settings(**{"device": "cpu", **spec}))
    agent = PolicyAgent(policy, Settings(row_tokens=64, max_logprob_gap=100.0))
    if is_sharded:
        agent.shard(Sharded())
    agent.load(0, with_weights=start == 0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-6)
    schedule = Schedule(optimizer, Settings())
    state = State(progress=RunProgress(seed=0), policy=policy, optimizer=optimizer, schedule=schedule)
    checkpoints = Checkpoints(Path(str(directory).format(agent.world.rank)), keep=9)
    if agent.world.is_first:
        checkpoints.open()
    agent.world.check_shared(checkpoints.directory)
    if start:
        saved = agent.world.from_first(lambda: checkpoints.read_state(start))
        state = state.restored(saved, lambda tensors: checkpoints.read_tensors(start, tensors, agent.world))
    read = whole_tensors(state)
    batch = batch_of(sessions())
    for _ in range(start, stop):
        agent.gradient(optimizer, batch, range(len(batch.experiences)))
        agent.step(optimizer)
    written = agent.world.to_write(state.tensors())
    checkpoints.write_state(stop, state.values(), written, agent.world.background_group)
    checkpoints.close()
    return read, whole_tensors(state)


def write_first_process_last(directory: Path) -> bool:
    """Write a state that the first process begins a second later; return whether the others waited for it."""
    world, checkpoints = Processes(), Checkpoints(directory, keep=9)
    has_waited, deadline = True, time.monotonic() + 1.0
    while world.is_first and time.monotonic() < deadline:
        has_waited = has_waited and not list(directory.glob(".writing-*"))
        time.sleep(0.01)
    checkpoints.write_state(1, {}, {"weight": torch.ones(2)}, world.background_group)
    return has_waited


def held_after_resume(spec: dict[str, Any], directory: Path, version: int) -> int:
    """Resume where nothing may read the base model; return the elements of weights and moments in this process."""

    def refuse(*_: object) -> None:
        raise AssertionError("the base model is read")

    devices.load_model = refuse  # type: ignore[assignment]
    policy = Policy(Settings(**{"device": "cpu", **spec}))
    agent = PolicyAgent(policy, Settings())
    agent.shard(Sharded())
    agent.load(0, with_weights=False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-6)
    state = State(
        progress=RunProgress(seed=0),
        policy=policy,
        optimizer=optimizer,
        schedule=Schedule(optimizer, Settings()),
    )
    checkpoints = Checkpoints(directory, keep=9)
    world = agent.world
    state.restored(checkpoints.read_state(version), lambda found: checkpoints.read_tensors(version, found, world))
    moments = [value for of in optimizer.state.values() for name, value in of.items() if name != "step"]
    return sum(value.to_local().numel() for value in [*policy.parameters(), *moments])


def batch_of(found: list[Any]) -> Batch:
    return build(found, [np.array([float(index % 3 - 1)]) for index in range(len(found))], policy_version=0)


def whole_tensors(state: State) -> dict[str, Tensor]:
    """Return weights and moments by name, of all shards; in the first process alone."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = dict(get_model_state_dict(state.policy.model, options=options))
    moments = get_optimizer_state_dict(state.policy.model, state.optimizer, options=options).get("state", {})
    found |= {f"{name}.{kind}": value for name, kinds in moments.items() for kind, value in kinds.items()}
    return {name: value.clone() for name, value in found.items()}


def refuse_routing(directory: Path, good: list[Any], bad: Any) -> tuple[str | None, Tensor]:
    """Return why a session of another model is refused, and the logprobs of the others."""
    policy = Policy(Settings(model=str(directory), device="cpu"), FEATURES.terms)
    agent = PolicyAgent(policy, Settings(row_tokens=64, max_logprob_gap=100.0))
    agent.shard(Sharded())
    agent.load(0)
    return policy.why_unfit(bad), torch.from_numpy(agent.logprobs_of(batch_of(good), range(len(good))))


def train_ledger(settings: Settings, longest_row: int | None = None) -> int:
    """Train a ledger; return the number of batches. In one process longer rows do not fit into memory.

    A `{}` in the name of the versions' directory is the number of the process, which has one of its own then.
    """
    torch.set_num_threads(1)
    checkpoint.SHARED_SECONDS = 0.0
    own = Path(str(settings.policies_dir).format(dist.get_rank()))
    settings = settings.model_copy(update={"policies_dir": own})
    if longest_row is not None:
        model.check_repeatable = model.measured_alone = lambda *_: None  # their rows are not those that the test bounds
        if dist.get_rank() == FAILING_RANK:
            _bound_memory(longest_row)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_multi_devices=True, enable_jit=False)
    try:
        return workflow.learn(workflow.setup(0)).progress.num_batches
    finally:
        workflow.close()


def _bound_memory(longest_row: int) -> None:
    """Let the second layer fail: the other processes are in the forward pass, and wait for its weights."""
    forward = Qwen3DecoderLayer.forward

    def bounded(layer: Any, hidden: Tensor, *rest: Any, **options: Any) -> Any:
        if layer.self_attn.layer_idx == 1 and hidden.shape[1] > longest_row:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(layer, hidden, *rest, **options)

    Qwen3DecoderLayer.forward = bounded
