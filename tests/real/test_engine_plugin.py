"""The plug-in inside a real vLLM: what would be read or applied in part, and seeded calls in parts on a CPU."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import transformers
from certificates.loads import ENVIRONMENT
from certificates.tiny import build
from PIL import Image
from safetensors.torch import load_file, save_file
from support.vllm_sources import recorded
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.processing.context import InputProcessingContext

from trainer.forward import change_at_random
from turnwise.engine_plugin import upstream
from turnwise.engine_plugin.features.images import refuse_unfit_images
from turnwise.types import PolicyKind

pytestmark = pytest.mark.engine

ASK = """
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
flags = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 * 2**20}
engine = LLM(model=sys.argv[1], block_size=32, max_num_seqs=4, max_num_batched_tokens=int(sys.argv[2]), **flags)
prompts = [TokensPrompt(prompt_token_ids=[(number * place) % 500 + 1 for place in range(90)]) for number in (3, 7)]
asked = [SamplingParams(max_tokens=12, seed=seed) for seed in (1, 2)]
replies = engine.generate(prompts, asked, use_tqdm=False)
print(json.dumps([list(each.outputs[0].token_ids) for each in replies]))
"""

ADAPT = """
import sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
flags = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 * 2**20}
engine = LLM(model=sys.argv[1], block_size=32, max_num_seqs=4, enable_lora=True, max_lora_rank=16, **flags)
for number, path in enumerate(sys.argv[2:], start=1):
    try:
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
        request = LoRARequest(f"a{number}", number, path)
        engine.generate(prompt, SamplingParams(max_tokens=1), lora_request=request, use_tqdm=False)
        print("taken")
    except ValueError as error:
        print("refused:", error)
"""

REPLACED = """
import inspect, sys, types
from turnwise import engine_plugin
from turnwise.engine_plugin.features import images, supports
engine_plugin.register()
images._show_in_replies()
supports._show_in_replies()
for module in [each for name, each in sys.modules.items() if name.startswith("vllm.")]:
    owners = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    for owner in [module, *owners]:
        for name, value in vars(owner).items():
            function = value.__func__ if type(value) is classmethod else value
            if type(function) is types.FunctionType and "engine_plugin" in function.__code__.co_filename:
                print(":".join([module.__name__, name if owner is module else f"{owner.__name__}.{name}"]))
"""


def ask(model: str, batched_tokens: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", ASK, model, str(batched_tokens)]
    return subprocess.run(argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)


def test_the_plug_in_replaces_what_it_declares_and_nothing_else():
    argv = [sys.executable, "-c", REPLACED]
    done = subprocess.run(argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    declared = {name for each in upstream.PATCHES.values() for name in each.replaced if recorded()[name][0]}
    found = {line for line in done.stdout.splitlines() if line.startswith("vllm.")}
    assert declared <= found
    assert {name.partition(":")[2] for name in found} == {name.partition(":")[2] for name in declared}


def test_seeded_calls_whose_prompts_are_computed_in_parts_draw_the_tokens_of_whole_ones(tmp_path):
    """Two prompts of 90 tokens, 32 at a time; vLLM alone ends with "CPU Generator does not use offset"."""
    model = str(build("qwen3", tmp_path / "model"))
    replies = {}
    for batched_tokens in (256, 32):
        done = ask(model, batched_tokens)
        assert done.returncode == 0, done.stderr[-3000:]
        replies[batched_tokens] = json.loads(done.stdout.splitlines()[-1])
    assert replies[32] == replies[256]
    assert replies[32][0] != replies[32][1]


@pytest.mark.parametrize("family", ["Qwen2VL", "Glm4v", "Glm46V", "PaddleOCRVL", "Phi4Multimodal"])
def test_a_size_that_a_real_image_processor_refuses_is_said_in_its_own_words(family):
    """All of transformers' processors that refuse a picture of 3 by 900; twelve others of served models take it."""
    own = type("Context", (InputProcessingContext,), {"get_merged_mm_kwargs": lambda _, given: dict(given)})
    refuse_unfit_images(own)
    processor = getattr(transformers, f"{family}ImageProcessor")()
    with pytest.raises(VLLMValidationError, match=r"^the model's image processor refuses an image: .*aspect ratio"):
        own.__new__(own).call_hf_processor(processor, {"images": [Image.new("RGB", (3, 900))]})


def test_an_adapter_that_would_be_applied_in_part_is_refused_by_the_names_of_the_rest(tmp_path):
    """One layer of four has a number that the model has not: vLLM alone takes the adapter and applies three."""
    model = build("qwen3", tmp_path / "model")
    change_at_random(str(model), PolicyKind.LORA, tmp_path / "whole", [1, 2], [1], "float32")
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    file = tmp_path / "part" / "adapter_model.safetensors"
    save_file({name.replace("layers.3.", "layers.7."): each for name, each in load_file(file).items()}, file)
    argv = [sys.executable, "-c", ADAPT, str(model), str(tmp_path / "whole"), str(tmp_path / "part")]
    done = subprocess.run(argv, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, part = done.stdout.splitlines()[-2:]
    assert whole == "taken"
    assert part.startswith(
        "refused: the adapter has factors of 7 of 28 modules that no layer of the served model takes"
    )
    assert "'model.layers.7.mlp.down_proj'" in part


def test_a_checkpoint_of_which_vllm_would_leave_out_tensors_is_refused_by_their_names(tmp_path):
    """With `attention_bias`, transformers' Qwen3 has a bias of the output projection, and vLLM's has none."""
    done = ask(str(build("qwen3", tmp_path / "model", attention_bias=True)), 256)
    assert done.returncode != 0
    assert "vLLM leaves out 4 tensors of " in done.stderr
    assert "'model.layers.0.self_attn.o_proj.bias'" in done.stderr
