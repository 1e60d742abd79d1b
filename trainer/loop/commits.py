"""When a trained batch is acknowledged: in the transaction that follows the state which contains it.

With `checkpoint_every = 1` the state is written first, then one transaction publishes the version and acknowledges its
groups. With more, a version is published at once and its groups stay claimed. Every so many batches a thread writes a
copy of the state, and then one transaction acknowledges all batches that are in it. A trainer that dies in between
leaves those groups claimable, and the next one trains them from the last state on. So every group is in the weights
exactly once either way, and a version that was published meanwhile is followed by one that does not contain it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainer.loop.state import State, copied
from trainer.parallel import World
from trainer.publish.checkpoint import Checkpoints
from trainer.source import FinishedBatch, Source
from turnwise.types import Json


class Commits:
    """Writes states and acknowledges what they contain; every process has one and calls it in step."""

    def __init__(self, env: Source, checkpoints: Checkpoints, every: int) -> None:
        self._env = env
        self._checkpoints = checkpoints
        self._every = every
        self._world = World()
        self._pending: list[FinishedBatch] = []
        """Batches that no written state contains, oldest first. In the first process alone."""
        self._num_versions = 0
        """Versions since the last state."""
        self._writing: Future[None] | None = None
        self._written: set[int] = set()
        """The versions of the last state and of the one that is being written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @property
    def needed_versions(self) -> set[int]:
        """The versions whose state a restart may need."""
        return self._written

    def start(self, world: World, version: int) -> None:
        """Begin with the state of this version on disk."""
        self._world = world
        self._written = {version}

    def go_back(self, version: int) -> None:
        """Note that the weights are those of this version again."""
        self._written = self._written | {version}

    def add(self, finished: FinishedBatch | None, state: State, settings: Json) -> None:
        """Publish a version, and acknowledge its batch with the next state.

        Args:
            finished: The batch, with its version; None in all processes but the first.
            state: The state that contains it.
            settings: The settings to save with it.
        """
        self._num_versions += 1
        if finished is not None:
            self._pending.append(finished)
        if self._every == 1:
            self._write(state.progress.policy_version, self._values(state, settings), state.tensors())
            return
        if finished is not None and finished.policy is not None:
            self._env.publish(finished.policy)
        if self._num_versions >= self._every:
            self._write_behind(state, settings)

    def add_untrained(self, finished: FinishedBatch) -> None:
        """Acknowledge a batch that changed no weights, after those before it. In the first process alone."""
        self._pending.append(finished)
        self.settle()

    def settle(self) -> None:
        """Acknowledge what can be acknowledged now; raise what went wrong in the thread."""
        if self._writing is not None and self._writing.done():
            self._wait()
        if self._writing is None and self._num_versions == 0:
            self._ack(self._take())

    def flush(self, state: State, settings: Json) -> None:
        """Acknowledge everything, after a state that contains it."""
        self._wait()
        if self._num_versions:
            self._write_behind(state, settings)
        self._wait()
        self.settle()

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    def _write_behind(self, state: State, settings: Json) -> None:
        """Copy the state, and write it in the thread. One state is written at a time."""
        self._wait()
        version = state.progress.policy_version
        self._written = self._written | {version}
        values, tensors = self._values(state, settings), copied(state.tensors())
        batches, self._num_versions = self._take(), 0
        self._writing = self._thread.submit(self._write, version, values, tensors, batches)

    def _write(
        self, version: int, values: dict[str, Any], tensors: dict[str, Any], batches: list[FinishedBatch] | None = None
    ) -> None:
        """Write a state, then acknowledge the batches in it: all that are pending unless they are given."""
        self._checkpoints.write_state(version, values, tensors, self._world.background_group)
        if batches is None:
            batches, self._num_versions = self._take(), 0
        self._ack(batches)
        self._written = {version}

    def _ack(self, batches: list[FinishedBatch]) -> None:
        if batches:
            self._env.ack(batches)

    def _take(self) -> list[FinishedBatch]:
        taken, self._pending = self._pending, []
        return taken

    def _wait(self) -> None:
        """Wait for the state that is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @staticmethod
    def _values(state: State, settings: Json) -> dict[str, Any]:
        return state.values() | {"settings": settings}
