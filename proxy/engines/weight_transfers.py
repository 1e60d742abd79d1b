"""The weight transfers of one engine: vLLM's routes for them, and what the engine has answered about them."""

from __future__ import annotations

from typing import Any, Protocol

from turnwise.errors import EngineRefused, ReloadFailed
from turnwise.types import Json


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

    async def num_workers(self) -> int:
        """Return how many processes hold a part of its model.

        Raises:
            EngineRefused: it is a stand-in without that route.
        """
        return int((await self._ask("GET", "/get_world_size"))["world_size"])

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
