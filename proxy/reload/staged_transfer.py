"""Versions for engines that were started with vLLM's own backends `nccl` or `ipc`.

Such an engine receives while it is paused, straight into its model. So a failure leaves the model half loaded: the
update is ended, which puts the old tensors back in place, and the version is read from its directory in the same pause.
"""

from __future__ import annotations

import dataclasses

from proxy.engines.engine import Engine
from proxy.reload.trainer_http import ANSWER_SECONDS, ask_trainer
from turnwise.errors import EngineError, EngineRefused
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that lies on the trainer's GPU, for one engine."""

    url: str
    """Address of the trainer's weights."""
    transfer_id: str
    updates: list[Json]
    """Bodies for `/update_weights`, in order."""


async def prepare(url: str, version: int, engine: Engine, num_workers: int, seconds: float) -> StagedVersion | str:
    """Let a trainer copy a version to its GPU, and connect the engine with it; return why not where it cannot.

    Raises:
        EngineError: the engine cannot be connected.
    """
    request: Json = {
        "version": version,
        "num_workers": num_workers,
        "backend": engine.transfers.backend,
        "engine": engine.url,
        "connection": engine.transfers.connection,
    }
    answer = await ask_trainer(url, "POST", "/transfers", request, max(seconds, ANSWER_SECONDS))
    if answer is None:
        return "the trainer does not hold it any more, or does not answer"
    if "error" in answer:
        return str(answer["error"])
    staged = StagedVersion(url, answer["transfer_id"], answer["updates"])
    if answer["init_info"] is not None:
        engine.transfers.connection = None
        try:
            await engine.transfers.connect(answer["init_info"], seconds=seconds)
        except EngineError:
            await _end(staged, seconds, is_loaded=False)
            raise
    engine.transfers.connection = answer["connection"]
    return staged


async def load(staged: StagedVersion, engine: Engine, seconds: float) -> str | None:
    """Load a version into a paused engine; return why it did not succeed, None if it did.

    Raises:
        EngineUnavailable: the engine does not answer, so it is not known what it has loaded.
    """
    # Unless all of it arrives, the engine joins another group: this one may wait for the rest, also after a time limit.
    connection, engine.transfers.connection = engine.transfers.connection, None
    began = await ask_trainer(staged.url, "POST", f"/transfers/{staged.transfer_id}/begin", {}, ANSWER_SECONDS)
    if began is None:
        return "the trainer has ended the transfer, or does not answer"
    try:
        await engine.transfers.load_updates(staged.updates, seconds=seconds)
    except EngineError as error:
        await _end(staged, ANSWER_SECONDS, is_loaded=False)
        if not isinstance(error, EngineRefused):
            raise
        await engine.transfers.abandon_update(seconds=seconds)
        return str(error)
    engine.transfers.connection = connection
    await _end(staged, ANSWER_SECONDS, is_loaded=True)
    return None


async def _end(staged: StagedVersion, seconds: float, *, is_loaded: bool) -> None:
    """Let the trainer free the memory; without this request it does so after its time limit."""
    body: Json = {"is_loaded": is_loaded}
    await ask_trainer(staged.url, "POST", f"/transfers/{staged.transfer_id}/end", body, seconds)
