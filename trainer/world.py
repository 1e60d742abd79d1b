"""The processes that train together: this one alone, unless a feature divides the training over several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

Item = TypeVar("Item")


class World:
    """This process among those that train together; all of them call a method in step."""

    rank: int = 0
    size: int = 1
    control_group: Any = None
    """The group of what processes tell each other; None for one process."""
    background_group: Any = None
    """The group in which a thread writes checkpoints while the others compute; None for one process."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, ask: Callable[[], Item]) -> Item:
        """Return what the first process is told."""
        return ask()

    def share(self, item: Item) -> Item:
        return item

    def check_shared(self, directory: Path) -> None:
        """Check that all processes see one directory, which the first one has opened."""

    def own(self, rows: Sequence[Item], cost: Callable[[Item], float]) -> list[tuple[Item, bool]]:  # noqa: ARG002
        """Return the rows of this process, each with whether it counts."""
        return [(row, True) for row in rows]

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values
