"""Engines on the same GPU sleep while the trainer computes: the trainer says so where it hands out weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from trainer.claims.holds import Beside
from trainer.features.transfers import Transfers
from turnwise.settings import Settings
from turnwise.types import Json


class SleepSettings(Settings):
    """Whether engines sleep."""

    engine_sleep_level: Literal[0, 1, 2] = 0
    """Let engines on the same GPU sleep while the trainer computes, by vLLM's sleep mode: 1 moves their weights to host
    memory, 2 drops them and loads the served version again; 0 never. The proxy needs `engine_sleep = true`."""


class EngineSleep(Beside[SleepSettings]):
    """Lets engines sleep around the computation of each batch, of all policies by the server of the first one."""

    @classmethod
    def is_on(cls, settings: SleepSettings) -> bool:
        return settings.engine_sleep_level > 0

    def opened(self, version: int, probe: Json | None) -> None:  # noqa: ARG002
        if self._learner.world.is_first:
            self._transfers().serve()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        server = self._transfers().server
        with contextlib.nullcontext() if server is None else server.engines_asleep(self._settings.engine_sleep_level):
            self._learner.world.from_first(lambda: None)  # the other processes wait for the first one
            try:
                yield
            finally:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _transfers(self) -> Transfers:
        transfers: Transfers = self._first[Transfers]
        return transfers
