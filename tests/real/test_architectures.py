"""A running vLLM takes whole weights and adapters of kinds of models that it computes in ways of their own."""

import importlib.util

import pytest
from certificates.__main__ import loads
from certificates.loads import LIMITS
from certificates.tiny import TINY, build

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_an_adapter_over_weights_in_four_bits_gives_in_vllm_what_the_trainer_computes(tmp_path):
    found = loads("qwen3_nf4", build("qwen3_nf4", tmp_path / "model"))
    assert found["unchanged"]["mean"] > 10 * found["adapter"]["mean"]
    assert found["adapter"]["mean"] <= LIMITS["bfloat16"]


@pytest.mark.parametrize("name", ["qwen3moe", "gemma3", "granite4", "lfm2"])
def test_each_load_into_a_running_vllm_changes_all_that_the_trainer_changed(tmp_path, name):
    """The CPU's kernels pack experts and tied heads, and turn LFM2's queries; Granite 4 looks layers up by name."""
    if TINY[name].vision is not None and importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM serves no wrapper without torchvision, which `make setup` installs")
    found = loads(name, build(name, tmp_path / "model"))
    assert found["unchanged"]["max"] > 0.1  # the changes are large
    measured = {what: each["max"] for what, each in found.items() if what not in ("dtype", "unchanged")}
    assert measured.keys() == {"weights", "weights again"} | ({"adapter"} if name != "qwen3moe" else set())
    assert max(measured.values()) <= LIMITS["float32"]
