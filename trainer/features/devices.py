"""Several processes that train together, under `torchrun`, and a model that is divided over them by FSDP2.

Every process holds the same batch, packs it in the same way, and computes its share of the rows. Processes exchange
gradients (inside FSDP2) and a few sums; the first process sends the claimed batch to the others. Only the first one
loads the base model: the others build it without memory for its weights (on the meta device) and receive their shards.
Buffers, such as the frequencies of rotary embeddings, are always real: no checkpoint contains them.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.features.critic import NO_SHARDED_CRITIC
from trainer.features.heartbeats import watch
from trainer.features.optimizers import state_of
from trainer.features.own_directories import fill_from_first, gathered, is_local
from trainer.model.loading import (
    PACKED,
    WHOLE_MODEL,
    bad_checkpoint,
    load_model,
    model_class,
    prepared,
    quantised_by,
    trainable_config,
)
from trainer.model.model import Policy, Whole
from trainer.publish.checkpoint import comes_true, writing
from trainer.settings import TrainerSettings
from trainer.world import World
from turnwise.errors import SettingsError
from turnwise.files import synchronise
from turnwise.settings import Settings, child_environment
from turnwise.types import PolicyKind

Item = TypeVar("Item")
log = logging.getLogger(__name__)

CONTROL_TIMEOUT = timedelta(days=365)
"""How long a process waits for what another one shares. NCCL's own limit is ten minutes, which rollouts may exceed;
`torchrun` ends all processes when one dies, and `heartbeats` sees one that is silent."""
GRADIENT_BYTES = 4
"""FSDP keeps the gradient of every parameter, in float32, until the last row of a step."""
NONCE = ".shared"
"""File with a random word of the first process, which the other processes look for."""


class DevicesSettings(Settings):
    """Over which processes a model is divided."""

    multi_devices: bool = False
    """Shard over all processes that `torchrun` started."""
    replicas: int = Field(default=1, ge=1)
    """With several processes: copies of the model, each sharded over its share of the processes (HSDP). More copies
    need more memory and exchange shards within a machine only."""


class Processes(World):
    """This process among those that `torchrun` started."""

    is_apart = False
    """Whether some have a directory of their own, so that the first one alone keeps versions and states."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        if self.size > 1:  # all processes create their groups in the same order, in their main threads
            self.control_group, self.background_group = _group_for("control"), _group_for("background")

    def from_first(self, ask: Callable[[], Item]) -> Item:
        return cast("Item", self.share(ask() if self.is_first else None))

    def share(self, item: Item) -> Item:
        if self.size == 1:
            return item
        box: list[Any] = [item]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return cast("Item", box[0])

    def gather(self, item: Item) -> list[Item]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, item, group=self.control_group)
        return found

    def check_shared(self, directory: Path) -> None:
        """Find out whether all processes see one directory, which the first one has opened.

        Raises:
            NotWritten: The first one cannot write there.
        """
        if self.size == 1:
            return
        path = directory / NONCE

        def write() -> str:
            nonce = secrets.token_hex(16)
            with writing(path):
                path.write_text(nonce, encoding="utf-8")
                synchronise(path)
            return nonce

        def is_seen() -> bool:
            try:
                return path.read_text(encoding="utf-8") == nonce
            except OSError:
                return False

        nonce = self.from_first(write)
        sees_it = is_seen() if is_local(directory) else comes_true(is_seen)
        found = self.gather((socket.gethostname(), str(directory), sees_it))
        strange = [f"{own!r} of process {rank} on {host!r}" for rank, (host, own, sees) in enumerate(found) if not sees]
        if strange:
            self.is_apart, self.background_group = True, None
            log.warning(
                "policies_dir %s is not the one of the first process on %r, which keeps all versions and states alone "
                "in %r: each state is gathered whole in its memory, written and read there",
                ", ".join(strange),
                *found[0][:2],
            )

    def to_write(self, tensors: dict[str, Any]) -> Any:
        return gathered(self, tensors) if self.is_apart else super().to_write(tensors)

    def fill(self, tensors: dict[str, Any], read: Callable[[dict[str, Any], Any], None]) -> None:
        if self.is_apart:
            fill_from_first(self, tensors, read)
        else:
            super().fill(tensors, read)

    def own(self, rows: Sequence[Item], cost: Callable[[Item], float]) -> list[tuple[Item, bool]]:
        """Return the rows of this process.

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


_WATCHES = contextlib.ExitStack()
"""What ends the watch for the other hosts."""


def join_world() -> Sharded:
    """Join the processes that `torchrun` started, NCCL on GPUs, gloo on CPUs; return how they hold a model.

    Raises:
        SettingsError: Other machines cannot reach this one under the address of its host name.
    """
    if not dist.is_initialized():
        environment = child_environment({})
        check_address(environment)
        on_gpu = torch.cuda.is_available()
        dist.init_process_group("nccl" if on_gpu else "gloo")
        _WATCHES.callback(watch(environment))
        if on_gpu:
            torch.cuda.set_device(dist.get_node_local_rank())
    return Sharded()


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


def place_of(settings: TrainerSettings) -> Whole:
    return join_world() if _own(settings).multi_devices else Whole()


def check_divisible(settings: TrainerSettings) -> None:
    """Check that a model can be divided as the settings ask.

    Raises:
        SettingsError: Two settings do not fit together.
    """
    own = _own(settings)
    if own.multi_devices and (state_of(settings) != "device" or settings.weights_dtype != "float32"):
        raise SettingsError(
            f"multi_devices=true shards float32 weights and moments over the processes, so it excludes "
            f"optimizer_state={state_of(settings)!r} with weights_dtype={settings.weights_dtype!r}: set them to "
            "'device' and 'float32'"
        )
    if own.replicas > 1 and not own.multi_devices:
        raise SettingsError(
            f"replicas={own.replicas} needs several processes: set multi_devices=true and start with torchrun"
        )
    if own.multi_devices and settings.algorithm.needs_values:
        raise SettingsError(NO_SHARDED_CRITIC.format(str(settings.algorithm)))


def least_bytes(settings: TrainerSettings, num_parameters: int, num_processes: int) -> int:
    """Return what each process needs on its GPU at least: weights, gradients and moments, without any activations."""
    weight = torch.finfo(getattr(torch, settings.weights_dtype)).bits // 8
    if settings.kind is PolicyKind.LORA:
        each = float(weight)
    else:
        masters = {"device": 8 if weight == GRADIENT_BYTES else 12, "8bit": 2, "host": 0}[state_of(settings)]
        each = 2 * weight + masters
    whole_gradient = GRADIENT_BYTES if num_processes > 1 and settings.kind is PolicyKind.FULL else 0
    return int(num_parameters * (each * _own(settings).replicas / num_processes + whole_gradient))


def _own(settings: TrainerSettings) -> DevicesSettings:
    assert isinstance(settings, DevicesSettings)
    return settings


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
    if sys.exc_info()[0] is None:  # after an error this process counts as silent where torchrun does not end the others
        _WATCHES.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class Sharded(Whole):
    """A model of which each process holds its shards of parameters, gradients and optimizer, layer by layer."""

    is_whole = False

    def __init__(self, axis: str = "data") -> None:
        """`axis` names the mesh's dimension of shards."""
        self._axis = axis
        self._world: World | None = None
        self.syncs_every_row = False
        """Whether the processes add up their gradients after each row, which takes less memory; else after the last."""

    def world(self) -> World:
        self._world = self._world or Processes()
        return self._world

    def load(self, policy: Policy, seed: int, *, with_weights: bool) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        settings = policy.settings
        model = policy.tuned(empty_model(settings, policy.attention))
        mesh = mesh_of(policy.device, self._axis, _own(settings).replicas)
        precision = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
        for layer in [*policy.layers(model), model]:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        allocate(model, policy.device)
        if with_weights or settings.kind is PolicyKind.LORA:
            torch.manual_seed(seed)
            self._load_from_first(model, settings, lambda: load_model(settings, policy.attention))
        return model

    def sync_gradients(self, policy: Policy, *, is_last: bool) -> None:
        cast("Any", policy.model).set_requires_gradient_sync(self.syncs_every_row or is_last)

    def settle(self, model: nn.Module) -> None:
        cast("Any", model).reshard()  # the outermost weights stay whole until a backward pass

    def shards(self, model: nn.Module, *, trained_only: bool) -> dict[str, Any]:
        return get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=trained_only))

    def load_shards(self, model: nn.Module, shards: dict[str, Any], *, is_whole: bool) -> None:
        set_model_state_dict(model, shards, options=StateDictOptions(strict=is_whole))

    def load_weights(self, policy: Policy, read: Callable[[], nn.Module]) -> None:
        self._load_from_first(policy.model, policy.settings, read)

    def _load_from_first(self, model: nn.Module, settings: TrainerSettings, read: Callable[[], nn.Module]) -> None:
        weights = read().state_dict() if dist.get_rank() == 0 else {}
        is_whole = settings.kind is PolicyKind.FULL
        options = StateDictOptions(full_state_dict=True, strict=is_whole, broadcast_from_rank0=True)
        with bad_checkpoint(f"the trainer's state does not fit {settings.model!r}"):
            set_model_state_dict(model, weights, options=options)


def empty_model(settings: TrainerSettings, attention: str) -> nn.Module:
    """Return the base model with weights on the meta device and real buffers."""
    config = trainable_config(settings)
    if quantised_by(config) == PACKED:
        raise SettingsError(
            f"the weights of {settings.model!r} are quantised ({PACKED}), and several processes cannot share them: "
            "train in one process, or the model that is not quantised"
        )
    with bad_checkpoint(f"cannot load the model {settings.model!r}", WHOLE_MODEL), _weights_on_meta():
        model = model_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
        return prepared(model, settings)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the weights of an empty model memory on a device, with unspecified values; buffers keep theirs."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Create parameters on the meta device inside the block, and buffers where they are computed."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied weight is on the meta device already, and must remain the same object.
        if parameter is not None and parameter.device.type != "meta":
            empty: Tensor = parameter.detach().to("meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
