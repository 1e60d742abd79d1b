"""The processes that train together, and what each keeps: this one alone, unless a feature divides the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class World:
    """This process among those that train together; all of them call a method in step."""

    rank: int = 0
    size: int = 1
    control_group: Any = None
    """The group of what processes tell each other; None for one process."""
    background_group: Any = None
    """The group in which a thread writes checkpoints while the others compute; None where one process writes."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, ask: Callable[[], Item]) -> Item:
        """Return what the first process is told."""
        return ask()

    def share(self, item: Item) -> Item:
        return item

    def gather(self, item: Item) -> list[Item]:
        return [item]

    def check_shared(self, directory: Path) -> None:
        """Find out whether all processes see one directory, which the first one has opened."""

    def to_write(self, tensors: dict[str, Any]) -> Any:
        """Return what this process writes of a state, copied to the CPU; None where the first one writes all of it."""
        return copied(tensors)

    def fill(self, tensors: dict[str, Any], read: Callable[[dict[str, Any], Any], None]) -> None:
        """Fill tensors, whole or sharded; `read` fills those that it gets, with its group of processes."""
        read(tensors, self.control_group)

    def own(self, rows: Sequence[Item], cost: Callable[[Item], float]) -> list[tuple[Item, bool]]:  # noqa: ARG002
        """Return the rows of this process, each with whether it counts."""
        return [(row, True) for row in rows]

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values


def copied(tensors: Any) -> Any:
    """Return nested dictionaries of tensors, copied to the CPU, for a thread that writes while training continues."""
    if isinstance(tensors, dict):
        return {name: copied(value) for name, value in tensors.items()}
    if isinstance(tensors, torch.Tensor):
        value = tensors.detach()
        return value.clone() if value.device.type == "cpu" else value.cpu()
    return tensors
