"""Which GPUs and how much of their memory the engines and the trainer of `turnwise up` get.

Without settings: on one GPU both share it, split by memory; on several GPUs the engines get the first half and the
trainer the rest. Each engine takes `tensor_parallel` GPUs, so four GPUs at 2 make two engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.errors import SettingsError

SHARED_GPU_MEMORY = 0.4
"""Share of the engine's memory on a GPU that the trainer uses too: full AdamW needs the larger part."""


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of each process."""

    engines: tuple[tuple[int, ...], ...]
    """GPUs of each engine; one empty tuple is one engine on the CPU."""
    trainer: tuple[int, ...]
    """GPUs of the trainer, one process each; empty: the CPU."""
    engine_memory: float | None
    """Share of each engine GPU's memory; None leaves it to vLLM."""


def plan_gpus(
    num_gpus: int,
    *,
    has_trainer: bool = True,
    engine_gpus: tuple[int, ...] | None = None,
    trainer_gpus: tuple[int, ...] | None = None,
    tensor_parallel: int = 1,
    engine_memory: float | None = None,
) -> GpuPlan:
    """Return which process gets which GPUs.

    Args:
        num_gpus: GPUs of this machine.
        has_trainer: Whether a trainer runs here too.
        engine_gpus: GPUs of all engines; None chooses them.
        trainer_gpus: GPUs of the trainer; None chooses them.
        tensor_parallel: GPUs of one engine.
        engine_memory: Share of each engine GPU's memory; None chooses it.

    Raises:
        SettingsError: a GPU is named that this machine does not have, or the engine's GPUs cannot be divided.
    """
    named = (*(engine_gpus or ()), *(trainer_gpus or ()))
    if missing := sorted(gpu for gpu in named if gpu >= num_gpus):
        raise SettingsError(f"there is no GPU {missing[0]}: this machine has {num_gpus}, counted from 0")
    if num_gpus == 0:
        return GpuPlan(engines=((),), trainer=(), engine_memory=None)
    engines, trainer = _divided(num_gpus, engine_gpus, trainer_gpus, has_trainer=has_trainer)
    if len(engines) % tensor_parallel:
        raise SettingsError(
            f"{len(engines)} GPUs for engines cannot be divided into groups of {tensor_parallel}; change "
            "tensor_parallel or engine_gpus"
        )
    is_shared = bool(set(engines) & set(trainer))
    groups = [engines[start : start + tensor_parallel] for start in range(0, len(engines), tensor_parallel)]
    return GpuPlan(
        engines=tuple(groups),
        trainer=trainer,
        engine_memory=engine_memory or (SHARED_GPU_MEMORY if is_shared else None),
    )


def _divided(
    num_gpus: int, engine_gpus: tuple[int, ...] | None, trainer_gpus: tuple[int, ...] | None, *, has_trainer: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the GPUs of all engines and those of the trainer."""
    everything = tuple(range(num_gpus))
    if not has_trainer:
        return engine_gpus or everything, ()
    if engine_gpus is None:
        rest = tuple(gpu for gpu in everything if gpu not in (trainer_gpus or ()))
        wanted = rest[: max(1, num_gpus // 2)] if trainer_gpus is None else rest
        engine_gpus = wanted or everything[:1]
    if trainer_gpus is None:
        trainer_gpus = tuple(gpu for gpu in everything if gpu not in engine_gpus) or engine_gpus[:1]
    return engine_gpus, trainer_gpus
