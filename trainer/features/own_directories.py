"""Hosts with directories of their own: a state is gathered to the first process, which alone writes it and reads it.

The first process holds one whole copy of the state on its CPU. Tensors travel one after the other, so each process
holds no more than one whole tensor beside that.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.world import World, copied
from turnwise.errors import BadCheckpoint

MOUNTS = Path("/proc/self/mountinfo")
LOCAL = frozenset({"ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs"})
"""File systems of one machine: they show at once what is written there, and never what another machine writes."""


def is_local(place: Path) -> bool:
    """Return whether a place, which may not exist, is known to be on a file system of this machine alone."""
    place = place.resolve()
    try:
        device = next(each for each in (place, *place.parents) if each.exists()).stat().st_dev
        mounts = [line.split() for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    own = [mount for mount in mounts if mount[2] == f"{os.major(device)}:{os.minor(device)}"]
    return bool(own) and all(mount[mount.index("-") + 1] in LOCAL for mount in own)


def gathered(world: World, tensors: dict[str, Any]) -> dict[str, Any] | None:
    """Return a whole copy of nested dictionaries of tensors on the CPU; None in all processes but the first."""
    world.share(None)  # the first one may still write the state before, for longer than NCCL waits
    whole: dict[str, Any] = _gathered(tensors, is_kept=world.is_first)
    return whole if world.is_first else None


def fill_from_first(world: World, tensors: dict[str, Any], read: Callable[[dict[str, Any], Any], None]) -> None:
    """Let the first process read whole tensors, and send each process its shards.

    Raises:
        BadCheckpoint: They cannot be read; in all processes.
    """
    whole = _empty(tensors) if world.is_first else {}

    def why_not() -> BadCheckpoint | None:
        try:
            read(whole, None)
        except BadCheckpoint as error:
            return error
        return None

    if (error := world.from_first(why_not)) is not None:
        raise error
    with torch.no_grad():
        _spread(world, tensors, whole)


def _gathered(tensors: Any, *, is_kept: bool) -> Any:
    if isinstance(tensors, dict):
        return {name: _gathered(value, is_kept=is_kept) for name, value in tensors.items()}
    whole = tensors.full_tensor() if isinstance(tensors, DTensor) else tensors
    return copied(whole) if is_kept else None


def _empty(tensors: Any) -> Any:
    if isinstance(tensors, dict):
        return {name: _empty(value) for name, value in tensors.items()}
    if isinstance(tensors, Tensor):
        return torch.empty(tensors.shape, dtype=tensors.dtype)
    return copy.deepcopy(tensors)


def _spread(world: World, tensors: dict[str, Any], whole: dict[str, Any]) -> None:
    """Fill tensors in all processes with those of the first one, whose memory is freed one by one."""
    for name, value in tensors.items():
        own = whole.pop(name, None)
        if isinstance(value, dict):
            _spread(world, value, own or {})
        elif isinstance(value, DTensor):
            sent = torch.empty(value.shape, dtype=value.dtype, device=value.device) if own is None else own
            value.to_local().copy_(distribute_tensor(sent, value.device_mesh, value.placements).to_local())
        elif isinstance(value, Tensor):
            value.copy_(world.share(own))
        else:
            tensors[name] = world.share(own)
