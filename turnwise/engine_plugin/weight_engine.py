"""vLLM's weight transfer backend: the model gets its new weights in one call, from memory that holds them already.

`/init_weight_transfer_engine` starts to receive a version while calls go on. `/update_weights` waits for it, and loads
it in the way in which vLLM loads a checkpoint, so every layout and quantisation that vLLM can reload works.
"""

from __future__ import annotations

import dataclasses

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from turnwise.engine_plugin.receiver import Receiver, TransferInfo


@dataclasses.dataclass
class InitInfo(TransferInfo, WeightTransferInitInfo):  # type: ignore[misc]
    """A version that is about to be sent."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to load."""

    version: int
    seconds: float = 60.0


class TurnwiseWeights(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives versions from the trainer and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self._receiver = Receiver()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        self._receiver.begin(init_info, parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def start_weight_update(self) -> None:
        """Do nothing: the model is not touched until the version is known to be whole."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a version that arrived.

        Raises:
            TransferFailed: It did not arrive whole; the model is unchanged.
        """
        tensors = self._receiver.take(update_info.version, update_info.seconds)
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` has finished the load."""

    def shutdown(self) -> None:
        """Do nothing: a transfer ends by itself, within its time limit."""
