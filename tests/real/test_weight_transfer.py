"""A real vLLM that receives weights from a trainer's memory: what it serves, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import forward_of, write_perturbed
from support.control_plane import ask, metric, policy, publish, publish_in_store, wait_for_status
from support.engines import RunningEngine
from support.weights_in_memory import weights_in_memory

from turnwise.engine_plugin.channel import Channel, TransferFailed

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
"""Nats between the engine and `transformers`; both compute in float32."""


NOWHERE = Path("/nowhere/at/all")


def gap(engine: RunningEngine, directory) -> float:
    """Return the largest |logprob difference| of the engine from `transformers` over a text of the engine's."""
    body = {"model": engine.model, "prompt": [40, 41, 42], "max_tokens": 16, "temperature": 0, "logprobs": 1}
    choice = ask(engine.url, "/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})["choices"][0]
    expected = forward_of(directory)([40, 41, 42, *choice["token_ids"]], 3)
    return float((torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max())


def test_versions_in_float32_and_bfloat16_are_served_as_they_were_sent(served, engine, tmp_path):
    first = write_perturbed(engine.model_dir, tmp_path / "v1", 1)
    second = write_perturbed(first, tmp_path / "v2", 2, noise=0.0)
    tensors = load_file(second / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][:, 0] += 0.5  # one column of one layer
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    third = tmp_path / "v3"
    third.mkdir()
    (third / "config.json").write_text((second / "config.json").read_text())
    save_file({key: value.bfloat16() for key, value in tensors.items()}, third / "model.safetensors", {"format": "pt"})
    with weights_in_memory(served.database_url) as trainer:
        for version, directory in ((1, first), (2, second), (3, third)):
            trainer.hold(version, directory)
            publish_in_store(served, version, NOWHERE)
            wait_for_status(served, version)
            assert gap(engine, directory) < TOLERANCE
    assert gap(engine, first) > TOLERANCE
    assert metric(served, "turnwise_weight_transfers_total", result="sent") == 3


def test_a_half_sent_version_leaves_the_last_good_one_served(served, engine, tmp_path, monkeypatch):
    good = write_perturbed(engine.model_dir, tmp_path / "v1", 1)
    wait_for_status(served, publish(served, good))

    def send_a_part(self: Channel, buffer: torch.Tensor, chunk_bytes: int) -> None:
        whole(self, buffer[: 5 * chunk_bytes], chunk_bytes)
        raise TransferFailed("the trainer ended")

    whole = Channel.broadcast
    monkeypatch.setattr(Channel, "broadcast", send_a_part)
    monkeypatch.setattr("trainer.publish.weight_server.CHUNK_BYTES", 1 << 16)
    with weights_in_memory(served.database_url) as trainer:
        trainer.hold(2, write_perturbed(engine.model_dir, tmp_path / "v2", 2))
        publish_in_store(served, 2, NOWHERE)
        assert "is not a directory" in wait_for_status(served, 2, "failed")["error"]
        assert policy(served, 1)["status"] == "active"
        assert gap(engine, good) < TOLERANCE
        monkeypatch.undo()
        third = write_perturbed(engine.model_dir, tmp_path / "v3", 3)
        trainer.hold(3, third)
        publish_in_store(served, 3, NOWHERE)
        wait_for_status(served, 3)
        assert gap(engine, third) < TOLERANCE
