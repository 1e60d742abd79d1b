"""Checks of a checkpoint directory that read only its files."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from support.tiny_checkpoints import write_adapter, write_weights

from proxy.reload.checkpoint import (
    check_headers,
    check_tokenizer,
    check_values,
    find_not_finite,
    read_header,
)
from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyKind
from turnwise.version_directory import Probe, read_probe

TENSORS = {"embed.weight": np.ones((4, 2), np.float32), "layer.weight": np.ones((2, 2), np.float16)}
CONFIG = {"model_type": "small", "architectures": ["Small"], "tie_word_embeddings": True}


def checkpoint(place: Path, tensors: dict = TENSORS, **config: object) -> Path:
    return write_weights(place, tensors, **CONFIG | config)


def refusal(path: Path, kind: PolicyKind = PolicyKind.FULL, served: Path | None = None) -> str:
    with pytest.raises(BadCheckpoint) as refused:
        check_headers(str(path), kind, None if served is None else str(served))
    return str(refused.value)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def tensor_of(shape: list[int], end: int) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header too small"),
        (b"\xff" * 100, "header too large"),
        (with_header(b"[]"), "invalid JSON in header"),
        (with_header(b"[" * 100_000), "invalid JSON in header"),
        (with_header(b"{}", b"x"), "file not fully covered"),
        (with_header(b'{"a": {}}'), "invalid JSON in header"),
        (with_header(tensor_of([2], 4), b"\0" * 4), "invalid shape, data type, or offset"),
        (with_header(tensor_of([-1, -1], 4), b"\0" * 4), "invalid JSON in header"),
        (with_header(tensor_of([2], 8), b"\0" * 7), "file not fully covered"),
        (with_header(b"\xff\xff"), "invalid UTF-8"),
    ],
)
def test_an_invalid_safetensors_file_is_named_with_its_defect(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=f"model.safetensors is not a whole safetensors file: .*{words}"):
        read_header(path)


def test_a_pipe_a_device_and_a_directory_are_refused_without_being_opened(tmp_path):
    """Nobody writes into the pipe, and the device has no end."""
    path = tmp_path / "model.safetensors"
    for make in (os.mkfifo, lambda place: place.symlink_to("/dev/zero"), Path.mkdir):
        make(path)
        with pytest.raises(BadCheckpoint, match="is no regular file"):
            read_header(path)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, missing):
    path = checkpoint(tmp_path / "a")
    (path / missing).unlink()
    assert "config.json" in refusal(path) if missing == "config.json" else "no *.safetensors" in refusal(path)


def test_a_config_must_be_an_object(tmp_path):
    path = checkpoint(tmp_path / "a")
    (path / "config.json").write_text("[]")
    assert "must hold a JSON object" in refusal(path)
    (path / "config.json").write_text("{")
    assert "is not JSON" in refusal(path)


def test_every_shard_of_the_index_must_exist(tmp_path):
    path = checkpoint(tmp_path / "a")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"gone": "model-2.safetensors"}}))
    assert "lacks 1 tensors that its index names, such as 'gone'" in refusal(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    assert "must hold an object of tensors and files" in refusal(path)


def test_a_checkpoint_of_the_served_model_passes_in_any_float_format(tmp_path):
    """The trainer may keep float32 of a model that is served in float16; an engine converts."""
    served = checkpoint(tmp_path / "served")
    ours = {name: tensor.astype(np.float32) for name, tensor in TENSORS.items()}
    check_headers(str(checkpoint(tmp_path / "a", ours)), PolicyKind.FULL, str(served))


def test_with_tied_weights_the_output_layer_is_optional(tmp_path):
    with_head = TENSORS | {"lm_head.weight": np.ones((4, 2), np.float32)}
    served, other = checkpoint(tmp_path / "served"), checkpoint(tmp_path / "a", with_head)
    check_headers(str(other), PolicyKind.FULL, str(served))
    check_headers(str(served), PolicyKind.FULL, str(other))
    untied = checkpoint(tmp_path / "untied", with_head, tie_word_embeddings=False)
    assert "lacks 1 tensors of the served model, such as 'lm_head.weight'" in refusal(served, served=untied)


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        ({"embed.weight": TENSORS["embed.weight"]}, {}, "lacks 1 tensors of the served model"),
        (TENSORS | {"more": np.ones(1, np.float32)}, {}, "1 tensors that the served model lacks"),
        (TENSORS | {"layer.weight": np.ones((2, 3), np.float16)}, {}, "as F16[2, 3], the served model as F16[2, 2]"),
        (TENSORS | {"layer.weight": np.ones((2, 2), np.int8)}, {}, "as I8[2, 2], the served model as F16[2, 2]"),
        (TENSORS, {"model_type": "large"}, "its model_type is 'large', the engine serves 'small'"),
        (TENSORS, {"architectures": ["Large"]}, "its architectures is ['Large']"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, tensors, config, words):
    served = checkpoint(tmp_path / "served")
    assert words in refusal(checkpoint(tmp_path / "a", tensors, **config), served=served)


def test_without_the_served_weights_only_the_directory_itself_is_checked(tmp_path):
    check_headers(str(checkpoint(tmp_path / "a")), PolicyKind.FULL, "owner/name")
    assert "is not a directory" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_is_found_in_every_float_format(tmp_path, kind, value):
    sick = np.ones((3, 3), kind)
    sick[2, 1] = value
    path = checkpoint(tmp_path / "a", {"fine": np.full((2, 2), np.finfo(kind).max, kind), "sick": sick})
    with pytest.raises(BadCheckpoint, match="'sick' that is infinite or NaN"):
        check_values(str(path))


def test_a_bfloat16_infinity_is_found_by_its_bits(tmp_path):
    """numpy has no bfloat16: 0x7F80 is +inf, 0x7F7F the largest number."""
    header = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    for bits, found in ((0x7F80, "a"), (0x7F7F, None), (0xFFC0, "a")):
        path = tmp_path / f"{bits}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bits.to_bytes(2, "little"))
        assert find_not_finite(path, read_header(path)) == found


def test_a_change_after_the_digest_was_written_is_found(tmp_path):
    path = checkpoint(tmp_path / "a")
    (path / "turnwise.json").write_text(json.dumps({"sha256": {"model.safetensors": "0" * 64}}))
    with pytest.raises(BadCheckpoint, match="changed after its digest"):
        check_values(str(path))


FACTORS = {
    "base_model.model.layer.lora_A.weight": np.ones((1, 2), np.float32),
    "base_model.model.layer.lora_B.weight": np.ones((2, 1), np.float32),
}


def test_an_adapter_must_fit_the_matrices_that_it_changes(tmp_path):
    """A is [rank, in] and B is [out, rank] of a weight [out, in]; here 2 × 2."""
    served = checkpoint(tmp_path / "served")
    check_headers(str(write_adapter(tmp_path / "a", FACTORS)), PolicyKind.LORA, str(served))
    wide = {name: np.ones((3, 3), np.float32) for name in FACTORS}
    assert "does not fit the served model's [2, 2]" in refusal(
        write_adapter(tmp_path / "b", wide, r=3), PolicyKind.LORA, served
    )
    renamed = {name.replace("layer", "other"): factor for name, factor in FACTORS.items()}
    words = refusal(write_adapter(tmp_path / "c", renamed), PolicyKind.LORA, served)
    assert "adapts 'other', which the served model lacks" in words


@pytest.mark.parametrize("packed", ["layer.weight_packed", "layer.weight.quant_state.bitsandbytes__nf4"])
def test_an_adapter_of_weights_that_are_stored_packed_must_name_layers_of_theirs(tmp_path, packed):
    """Eight or two values of a matrix lie in one number, so its shape tells nothing of the factors'."""
    served = checkpoint(tmp_path / "served", {packed: np.zeros((4, 1), np.uint8), "layer.weight": np.zeros((4, 1))})
    check_headers(str(write_adapter(tmp_path / "a", FACTORS)), PolicyKind.LORA, str(served))
    renamed = {name.replace("layer", "other"): factor for name, factor in FACTORS.items()}
    words = refusal(write_adapter(tmp_path / "b", renamed), PolicyKind.LORA, served)
    assert "adapts 'other', which the served model lacks" in words


def test_an_adapter_of_a_tied_output_head_must_fit_the_embeddings(tmp_path):
    """The head has no tensor of its own; the embeddings are [4, 2]."""
    served = checkpoint(tmp_path / "served", {"model.embed_tokens.weight": TENSORS["embed.weight"]})
    head = {"lm_head.lora_A.weight": np.ones((1, 2), np.float32), "lm_head.lora_B.weight": np.ones((4, 1), np.float32)}
    check_headers(str(write_adapter(tmp_path / "a", head)), PolicyKind.LORA, str(served))
    other = head | {"lm_head.lora_B.weight": np.ones((3, 1), np.float32)}
    assert "does not fit the served model's [4, 2]" in refusal(
        write_adapter(tmp_path / "b", other), PolicyKind.LORA, served
    )


def test_an_adapter_directory_must_hold_an_adapter(tmp_path):
    assert "adapter_config.json cannot be read" in refusal(checkpoint(tmp_path / "a"), PolicyKind.LORA)
    assert "not a LoRA adapter" in refusal(write_adapter(tmp_path / "b", FACTORS, peft_type="IA3"), PolicyKind.LORA)
    assert "holds no tensor" in refusal(write_adapter(tmp_path / "c", {}), PolicyKind.LORA)


def test_a_probe_is_read_if_it_exists(tmp_path):
    path = checkpoint(tmp_path / "a")
    assert read_probe(path) is None
    (path / "turnwise.json").write_text(json.dumps({"probe": {"token_ids": [1, 2, 3], "logprobs": [-0.5, -1.5]}}))
    assert read_probe(path) == Probe([1, 2, 3], [-0.5, -1.5])
    (path / "turnwise.json").write_text(json.dumps({"probe": {"token_ids": [1], "logprobs": []}}))
    assert read_probe(path) is None


@pytest.mark.parametrize(
    "probe", [{}, {"token_ids": [1, 2]}, {"token_ids": [1, 2], "logprobs": []}, {"token_ids": 3}, [1], "text"]
)
def test_a_probe_of_another_form_is_named(tmp_path, probe):
    """A directory that somebody publishes may have a manifest of their own."""
    path = checkpoint(tmp_path / "a")
    (path / "turnwise.json").write_text(json.dumps({"probe": probe}))
    with pytest.raises(BadCheckpoint, match=r"turnwise.json has a probe without lists"):
        read_probe(path)


def test_digests_of_another_form_are_named(tmp_path):
    path = checkpoint(tmp_path / "a")
    (path / "turnwise.json").write_text(json.dumps({"sha256": ["model.safetensors"]}))
    with pytest.raises(BadCheckpoint, match="must hold an object of file names and digests"):
        check_values(str(path))


def test_the_checked_positions_are_spread_over_the_probe():
    """10 tokens have 9 logprobs, at positions 1 to 9; with a limit of 4, every third from the end: 9, 6, 3."""
    probe = Probe(list(range(10)), [0.0] * 9)
    assert probe.positions(4) == [9, 6, 3]
    assert probe.positions(100) == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert Probe([1, 2], [0.0]).positions(4) == [1]


TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    "added_tokens": [{"id": 3, "content": "<end>"}],
}


def tokenizer(place, changes):
    place.mkdir()
    (place / "tokenizer.json").write_text(json.dumps(TOKENIZER | changes))
    return str(place)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "2", "model": TOKENIZER["model"] | {"merges": [["a", "b"]]}}, None),
        ({"model": {"vocab": {"a": 1, "b": 0, "ab": 2}, "merges": ["a b"]}}, "gives 2 tokens other ids .* of 'a'"),
        ({"model": {"vocab": [["b", -1.0], ["a", -1.0], ["ab", -2.0]], "merges": ["a b"]}}, "gives 2 tokens other ids"),
        ({"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}, "gives some tokens other ids"),
        ({"added_tokens": [{"id": 4, "content": "<end>"}]}, "of '<end>'"),
        ({"model": TOKENIZER["model"] | {"merges": []}}, "has other merges"),
        ({"model": []}, "has not the form of a tokenizer.json"),
        ({"added_tokens": [{}]}, "has not the form of a tokenizer.json"),
    ],
)
def test_a_version_with_another_tokenizer_than_the_engines_is_refused(tmp_path, changes, words):
    """One that gives the same ids passes, however its file is written; so does a directory without one."""
    served, version = tokenizer(tmp_path / "served", {}), tokenizer(tmp_path / "version", changes)
    if words is None:
        check_tokenizer(version, served)
        check_tokenizer(str(tmp_path), served)
        return
    with pytest.raises(BadCheckpoint, match=words):
        check_tokenizer(version, served)
