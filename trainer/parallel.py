"""The processes that train together: one by default, several under `torchrun`.

Every process holds the same batch, packs it in the same way, and computes its share of the rows. Processes exchange
gradients (inside FSDP2) and a few sums; the first process sends the claimed batch to the others.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from turnwise.errors import SettingsError
from turnwise.settings import child_environment

Item = TypeVar("Item")

CONTROL_TIMEOUT = timedelta(days=365)
"""How long a process waits for what another one shares. NCCL's own limit is ten minutes, which rollouts may exceed;
`torchrun` ends all processes when one dies."""


class World:
    """This process among those that train together."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.control_group = _group_for("control") if self.size > 1 else None
        """The group of what processes tell each other; None for one process."""
        if self.size > 1:
            _group_for("background")  # all processes create their groups in the same order, in their main threads

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, ask: Callable[[], Item]) -> Item:
        return cast("Item", self.share(ask() if self.is_first else None))

    def share(self, item: Item) -> Item:
        if self.size == 1:
            return item
        box: list[Any] = [item]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return cast("Item", box[0])

    def gather(self, item: Item) -> list[Item]:
        found: list[Any] = [item] * self.size
        if self.size > 1:
            dist.all_gather_object(found, item, group=self.control_group)
        return found

    @property
    def background_group(self) -> Any:
        """The group in which a thread writes checkpoints while the others compute; None for one process."""
        return _group_for("background") if self.size > 1 else None

    def own(self, rows: Sequence[Item], cost: Callable[[Item], float]) -> list[tuple[Item, bool]]:
        """Return the rows of this process, each with whether it counts.

        All processes get as many, since FSDP gathers weights in step: the last ones may compute a row for nothing. The
        rows that are computed at the same time have similar costs, since every process waits for the slowest.
        """
        ordered = list(rows) if self.size == 1 else sorted(rows, key=cost, reverse=True)
        places = range(self.rank, -(-len(ordered) // self.size) * self.size, self.size)
        return [(ordered[min(place, len(ordered) - 1)], place < len(ordered)) for place in places]

    def sum(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def join_world() -> World:
    """Join the processes that `torchrun` started: NCCL on GPUs, gloo on CPUs.

    Raises:
        SettingsError: Other machines cannot reach this one under the address of its host name.
    """
    if not dist.is_initialized():
        check_address(child_environment({}))
        on_gpu = torch.cuda.is_available()
        dist.init_process_group("nccl" if on_gpu else "gloo")
        if on_gpu:
            torch.cuda.set_device(dist.get_node_local_rank())
    return World()


def check_address(environment: Mapping[str, str]) -> None:
    """Check the address that gloo gives to the other machines: that of the host name, unless an interface is named.

    Gloo connects the processes also where NCCL computes. With an address of loopback they wait for one another.
    """
    if environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE") or environment.get("GLOO_SOCKET_IFNAME"):
        return
    host = socket.gethostname()
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        found = set()
    if all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        raise SettingsError(
            f"the host name {host!r} resolves to {', '.join(sorted(found)) or 'nothing'}, where other machines cannot "
            "reach this one: set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME for GPUs, to the interface that connects "
            "the machines (such as eth0) on each of them, or correct /etc/hosts"
        )


@functools.cache
def _group_for(_purpose: Literal["control", "background"]) -> Any:
    return dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)


def mesh_of(device: torch.device, axis: str, replicas: int) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards; `axis` names its dimension of shards, beside one of replicas (HSDP).

    Raises:
        SettingsError: The processes cannot be divided into as many replicas.
    """
    size = dist.get_world_size()
    if size % replicas:
        raise SettingsError(
            f"{size} processes cannot be divided by replicas={replicas}: set a divisor of the number of processes"
        )
    if replicas == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=(axis,))
    return init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replica", axis))


def leave_world() -> None:
    _group_for.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
