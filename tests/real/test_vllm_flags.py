"""The engine's flags, for a GPU too, are parsed by vLLM's own parser: a renamed flag is found without a GPU."""

from __future__ import annotations

import shlex
import warnings

import pytest
from compose import compose_file

from turnwise.processes.engine_command import EngineSettings, build_command

pytestmark = pytest.mark.engine


def _parsed_by_vllm(*argvs: list[str]) -> list[dict[str, object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that vLLM imports
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    return [vars(make_arg_parser(FlexibleArgumentParser()).parse_args(argv)) for argv in argvs]


def test_vllm_accepts_the_flags_of_turnwise_engine_and_of_the_compose_file() -> None:
    settings = EngineSettings(
        model="owner/name",
        gpus=[0, 1],
        tensor_parallel=2,
        gpu_memory=0.4,
        lora=True,
        reasoning_parser="qwen3",
        dtype="bfloat16",
        max_lora_rank=12,
        max_model_len=4096,
    )
    command = build_command(settings, gpu=True)
    variables = {"ENGINE_FLAGS": "--enable-lora --max-lora-rank 16 --max-loras 2", "ENGINE_TENSOR_PARALLEL": "2"}
    gpu = compose_file.services("gpu", variables)["engine"]
    cpu = compose_file.services("cpu", {})["engine-cpu"]
    built, composed, composed_for_cpu = _parsed_by_vllm(
        list(command.argv[2:]), shlex.split(gpu["command"]), shlex.split(cpu["command"])
    )
    assert (composed_for_cpu["max_model_len"], composed_for_cpu["dtype"]) == (2048, "float32")
    assert built["tensor_parallel_size"] == composed["tensor_parallel_size"] == 2
    assert built["gpu_memory_utilization"] == composed["gpu_memory_utilization"] == 0.4
    assert built["enable_lora"] is composed["enable_lora"] is True
    assert (built["max_model_len"], built["dtype"], built["max_lora_rank"]) == (4096, "bfloat16", 16)
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
