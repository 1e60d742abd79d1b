"""The interface of a kind of engine: all that the proxy asks of an engine beside `/health` and `/v1/models`.

Each kind is a subclass of `Engine` in a folder of its own, such as `proxy.engines.vllm`, with its routes, its request
fields and its replies. The pool makes all engines of one kind.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from proxy.dialects.base import Call, Captured
from proxy.engines.http_client import Answer
from proxy.sessions.place import Place
from turnwise.errors import EngineRefused
from turnwise.types import Json


class EngineKind(abc.ABC):
    """What an engine does by routes and in formats of its own."""

    own_fields: ClassVar[frozenset[str]]
    """Request fields that steer the engine itself; a client's are removed."""
    dtype: str | None = None
    """Number format of its weights, such as `float32`; None if it does not say."""

    @abc.abstractmethod
    async def check_features(self) -> None:
        """Find out what it was started with, and check that it meets the requirements of exact capture.

        Raises:
            EngineUnsuitable: naming what is missing and how to get it.
            EngineUnavailable: no answer.
        """

    @abc.abstractmethod
    async def sample(self, call: Call, place: Place, model: str, headers: dict[str, str]) -> Answer:
        """Send a call to a served model, so that its reply has all that capture needs.

        The caller reads the answer in a `with` block.

        Raises:
            EngineUnavailable: no connection, or one that broke before the answer's head.
            EngineRefused: an error status, with the engine's own body.
            InvalidRequest: the request would crash the engine.
        """

    @abc.abstractmethod
    def effective_sampling(self, call: Call) -> Json:
        """Return how it samples a call: its parameters, the engine's defaults, and what the engine makes of both."""

    @abc.abstractmethod
    def read_reply(self, parts: list[bytes], captured: Captured, call: Call, place: Place) -> list[bytes]:
        """Capture a whole reply, or chunks of a stream; return them without the fields the client did not ask for.

        Raises:
            msgspec.DecodeError: a part is not what the engine's route answers.
        """

    @abc.abstractmethod
    async def tokenise(self, request: Json) -> list[int]:
        """Return the prompt of a chat request.

        Raises:
            EngineUnavailable: no answer in time, or one without the prompt.
            EngineRefused: an error status.
        """

    @abc.abstractmethod
    async def token_logprobs(
        self, model: str, token_ids: list[int], positions: list[int], parameters: Json | None = None
    ) -> list[float]:
        """Return the logprobs of some of a text's tokens, each given the tokens before it, under a served model.

        Raises:
            EngineRefused: the engine does not support that.
            EngineUnavailable: no answer.
        """

    @abc.abstractmethod
    async def pause(self) -> None:
        """Stop sampling; running calls are kept, new ones queue."""

    @abc.abstractmethod
    async def is_paused(self) -> bool:
        """Return whether sampling is stopped."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Continue sampling."""

    @abc.abstractmethod
    async def is_sleeping(self) -> bool:
        """Return whether it gave up its memory; False from an engine without sleep mode."""

    @abc.abstractmethod
    async def sleep(self, level: int, *, seconds: float) -> None:
        """Stop sampling and give up memory; running calls are kept, new ones queue."""

    @abc.abstractmethod
    async def wake(self, part: str, *, seconds: float) -> None:
        """Take back memory: `weights`, or `kv_cache`; sampling resumes once the engine has both."""

    @abc.abstractmethod
    async def load_weights(self, path: str, *, seconds: float) -> None:
        """Replace the base weights with those of a checkpoint directory.

        Raises:
            ReloadFailed: the engine refused them.
        """

    @abc.abstractmethod
    async def num_workers(self) -> int:
        """Return how many processes hold a part of its model.

        Raises:
            EngineRefused: it does not say; then it takes no weights from memory.
        """

    @abc.abstractmethod
    async def receive_weights(self, init_info: Json, *, seconds: float) -> None:
        """Start to receive a version from a trainer, beside the running calls.

        Raises:
            EngineRefused: it was not started for transfers, or cannot receive this one.
        """

    @abc.abstractmethod
    async def load_received(self, version: int, *, seconds: float) -> None:
        """Replace the base weights with a version that it received.

        Raises:
            ReloadFailed: the engine refused it.
        """

    @staticmethod
    @abc.abstractmethod
    def says_it_takes_no_weights(refused: EngineRefused) -> bool:
        """Return whether the refusal means that it takes no weights from memory until it is restarted."""

    @abc.abstractmethod
    async def write_label(self, label: str) -> None:
        """Write the label of the base weights into the engine."""

    @abc.abstractmethod
    async def weights_label(self) -> str | None:
        """Return the label of the base weights, None from an engine that keeps none."""

    @abc.abstractmethod
    async def add_adapter(self, name: str, path: str, *, seconds: float) -> None:
        """Load a LoRA adapter beside what is served.

        Raises:
            EngineRefused: it cannot be loaded.
        """

    @abc.abstractmethod
    async def remove_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; one that is not loaded is no error."""
