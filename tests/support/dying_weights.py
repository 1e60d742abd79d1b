"""A trainer that holds two versions in memory and is killed while it sends one.

    python dying_weights.py DATABASE STAGE

It announces its weights, prints a line, and ends as under `kill -9` at the stage.
"""

import os
import signal
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from trainer.features.transfers import HeldVersions
from trainer.features.transfers import server as weight_server
from trainer.features.transfers.server import WeightServer
from turnwise.engine_plugin.channel import Channel
from turnwise.features import transfers
from turnwise.store.database import Database

STAGES = {
    "asked for the version": (weight_server, "Rendezvous"),
    "before it joins the group": (weight_server, "Channel"),
    "after a part of the weights": (Channel, "broadcast"),
    "after the weights, before their check": (Channel, "agree"),
}
"""What is called at each stage."""
PART_BYTES = 2048
BROADCAST = Channel.broadcast


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"w": torch.randn(64, 64, generator=generator).bfloat16(), "b": torch.randn(64, generator=generator)}


def die(*_arguments: Any, **_options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def send_a_part(channel: Channel, buffer: torch.Tensor, chunk_bytes: int) -> None:
    BROADCAST(channel, buffer[:chunk_bytes], chunk_bytes)
    die()


if __name__ == "__main__":
    database = Database(sys.argv[1])
    owner, name = STAGES[sys.argv[2]]
    setattr(owner, name, send_a_part if name == "broadcast" else die)
    weight_server.CHUNK_BYTES = PART_BYTES
    weight_server.SILENCE_SECONDS = 10.0
    server = WeightServer(HeldVersions())
    for version in (1, 2):
        server.held.hold(version, weights(version), {"token_ids": [1], "logprobs": []})
    with database.write() as connection:
        transfers.announce_weights(connection, "trainer", server.url, datetime.now(UTC))
    print("ready", flush=True)
    signal.pause()
