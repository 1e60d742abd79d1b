"""The weight transfers of one engine: vLLM's routes for them, and what the engine has answered about them."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Protocol

from turnwise.errors import EngineRefused, ReloadFailed
from turnwise.types import Json

BACKENDS = {"TurnwiseWeights": "turnwise", "NCCLWeightTransferEngine": "nccl", "IPCWeightTransferEngine": "ipc"}
"""The supported backends of vLLM's weight transfer, by the classes that vLLM names in its errors."""


class Ask(Protocol):
    """The type of `Engine.ask`."""

    async def __call__(self, method: str, path: str, body: Json | None = None, *, seconds: float = 10.0) -> Any:
        """Call a control route and return its decoded answer."""


class WeightTransfers:
    """Sends weights to one engine."""

    def __init__(self, url: str, ask: Ask) -> None:
        self._url = url
        self._ask = ask
        self.is_unsupported = False
        """Whether the engine has answered that it was started without weight transfers."""
        self.backend: str | None = None
        """Their backend; None while it is not known."""
        self.connection: str | None = None
        """Id of the trainer's NCCL group that the engine's workers have joined; None for none."""

    async def num_workers(self) -> int:
        """Return how many processes hold a part of its model.

        Raises:
            EngineRefused: it is a stand-in without that route.
        """
        return int((await self._ask("GET", "/get_world_size"))["world_size"])

    async def find_backend(self, *, seconds: float) -> str:
        """Return the backend of its weight transfers, which an incomplete request makes it name.

        vLLM has no route that names it cheaply. Its backend `ipc` needs no field, so it accepts the request.

        Raises:
            EngineRefused: it was not started for transfers, or with a backend that is not supported.
        """
        if self.backend is None:
            try:
                await self.connect({}, seconds=seconds)
                self.backend = "ipc"
            except EngineRefused as refused:
                self.backend = _backend_of(refused)
        return self.backend

    async def connect(self, init_info: Json, *, seconds: float) -> None:
        """Connect its workers with a trainer, in place of an earlier one.

        Raises:
            EngineRefused: it was not started for transfers, or cannot connect.
        """
        with contextlib.suppress(EngineRefused):
            await self._ask("POST", "/shutdown_weight_transfer_engine", seconds=seconds)
        await self._ask("POST", "/init_weight_transfer_engine", {"init_info": init_info}, seconds=seconds)

    async def load_updates(self, updates: list[Json], *, seconds: float) -> None:
        """Replace the base weights with those that a trainer sends now; the engine is paused.

        Raises:
            EngineRefused: it did not load all of them.
        """
        await self._start(seconds)
        for update in updates:
            await self._ask("POST", "/update_weights", {"update_info": update}, seconds=seconds)
        await self._ask("POST", "/finish_weight_update", {}, seconds=seconds)

    async def abandon_update(self, *, seconds: float) -> None:
        """End an update that failed: tensors without new values are put back, so that a directory can be loaded."""
        with contextlib.suppress(EngineRefused):
            await self._start(seconds)
            await self._ask("POST", "/finish_weight_update", {}, seconds=seconds)

    async def receive(self, init_info: Json, *, seconds: float) -> None:
        """Start to receive a version from a trainer, beside the running calls.

        Raises:
            EngineRefused: it was not started for transfers, or cannot receive this one.
        """
        await self._ask("POST", "/init_weight_transfer_engine", {"init_info": init_info}, seconds=seconds)

    async def load_received(self, version: int, *, seconds: float) -> None:
        """Replace the base weights with a version that it received.

        Raises:
            ReloadFailed: the engine refused it.
        """
        try:
            await self._start(seconds)
            await self._ask("POST", "/update_weights", {"update_info": {"version": version}}, seconds=seconds)
            await self._ask("POST", "/finish_weight_update", {}, seconds=seconds)
        except EngineRefused as refused:
            raise ReloadFailed(
                f"the engine at {self._url} did not load version {version}, which it had received: {refused}",
                is_transient=refused.is_transient,
            ) from refused

    async def _start(self, seconds: float) -> None:
        """Start a weight update, and end the one that a process which died had started."""
        try:
            await self._ask("POST", "/start_weight_update", seconds=seconds)
        except EngineRefused:
            await self._ask("POST", "/finish_weight_update", {}, seconds=seconds)
            await self._ask("POST", "/start_weight_update", seconds=seconds)


def _backend_of(refused: EngineRefused) -> str:
    """Return the backend whose class vLLM names where it refuses an incomplete request.

    Raises:
        EngineRefused: it names none, or one that is not supported.
    """
    found = re.search(r"Invalid init_info for (\w+)", str(refused))
    if found is None or found[1] not in BACKENDS:
        raise refused
    return BACKENDS[found[1]]
