"""How the real vLLM is started: its command line, its environment, and why it cannot be started where it cannot.

The decision behind it: the engine is vLLM's own process, started by `exec`, so that signals reach it and nothing of it
is imported here. What capture and reload need is fixed; what a deployment may want otherwise is a setting, and any
other flag of vLLM goes through untouched.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import json
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from turnwise.errors import BadCheckpoint, EngineError, SettingsError
from turnwise.settings import Settings

_NO_MATCH_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that come along with the CPU build, need the same torch build, and are not used for text."""


class EngineSettings(Settings):
    """Settings of one engine process."""

    model: str = Field(min_length=1)
    """Directory in the Hugging Face layout, or a model's id."""
    served_model_name: str | None = None
    """Name that clients ask for; by default the model's own, which for a directory is its last part."""
    host: str = "127.0.0.1"
    """Address to listen on. The engine's control routes know no key: anything but loopback needs `allow_remote`."""
    port: int = Field(default=8000, ge=1, le=65535)
    allow_remote: bool = False
    """Listen on an address that other machines reach; only on a network where all of them may reload the weights."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What to run on; `auto` takes a GPU where there is one."""
    dtype: str | None = None
    """Number format of the weights; by default float32 on a CPU and the checkpoint's own on a GPU."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt and reply together, tokens; by default 2048 on a CPU and the model's own on a GPU."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """Behaviour logprobs are the processed ones; raw ones ignore the temperature, and the proxy refuses them."""
    max_logprobs: int = Field(default=20, ge=0)
    """Most alternatives that a call may ask for at each token."""
    tool_call_parser: str | None = "hermes"
    """vLLM's parser of the model's tool calls; empty for none."""
    reasoning_parser: str | None = None
    """vLLM's parser of the model's thinking."""
    lora: bool = False
    """Take LoRA adapters at run time."""
    max_lora_rank: int = Field(default=16, gt=0)
    max_loras: int = Field(default=2, gt=0)
    """Adapters that are sampled with at once: the served one, and the one before it or a canary; calls of a further
    one wait until those of another have ended."""
    kv_cache_bytes: int = Field(default=128 * 2**20, gt=0)
    """Memory for keys and values, on a CPU."""
    num_threads: int = Field(default=1, gt=0)
    """Threads of the engine, on a CPU."""


@dataclass(frozen=True)
class EngineCommand:
    """What is executed."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """Added to what the process inherits."""

    def shell(self) -> str:
        """Return the command as a shell takes it."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.argv])

    def execute(self) -> None:
        """Become the engine; returns never.

        Raises:
            EngineError: the program cannot be executed.
        """
        assignments = [f"{name}={value}" for name, value in self.environment.items()]
        try:
            os.execvp("env", ["env", *assignments, *self.argv])  # noqa: S606, S607  the command is ours, no shell
        except OSError as error:
            raise EngineError(f"cannot execute {self.argv[0]!r}: {error.strerror}") from error


def has_gpu() -> bool:
    """Tell whether there is an NVIDIA GPU, without loading torch."""
    return Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/gpus").is_dir()


def build_command(settings: EngineSettings, extra: tuple[str, ...] = (), *, gpu: bool | None = None) -> EngineCommand:
    """Return the command that starts vLLM.

    Args:
        settings: What was set.
        extra: Flags of vLLM that follow ours, and win over them.
        gpu: Whether there is a GPU; None looks.
    """
    if gpu is None:
        gpu = settings.device == "gpu" or (settings.device == "auto" and has_gpu())
    program = _gpu_program(settings) if gpu else _cpu_program(settings)
    flags = [*_shared_flags(settings), *([] if gpu else _cpu_flags(settings))]
    if gpu:
        flags += _optional("--dtype", settings.dtype) + _optional("--max-model-len", settings.max_model_len)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if settings.lora:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if _is_directory(settings.model):
        environment["HF_HUB_OFFLINE"] = "1"
    if not gpu:
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": str(settings.num_threads),
            "TORCHDYNAMO_DISABLE": "1",
        }
    return EngineCommand((*program, *flags, *extra), environment)


def _gpu_program(settings: EngineSettings) -> list[str]:
    beside = Path(sys.executable).with_name("vllm")
    return [str(beside) if beside.exists() else "vllm", "serve", settings.model]


def _cpu_program(settings: EngineSettings) -> list[str]:
    # The `vllm` command looks up a distribution called vllm, which the CPU build is not.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model]


def _shared_flags(settings: EngineSettings) -> list[str]:
    """Return the flags for any device."""
    flags = ["--served-model-name", settings.served_model_name or Path(settings.model).name]
    flags += ["--host", settings.host, "--port", str(settings.port)]
    flags += ["--logprobs-mode", settings.logprobs_mode, "--max-logprobs", str(settings.max_logprobs)]
    if settings.tool_call_parser:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser]
    if settings.lora:
        flags += ["--enable-lora", "--max-lora-rank", str(settings.max_lora_rank)]
        flags += ["--max-loras", str(settings.max_loras)]
    return flags + _optional("--reasoning-parser", settings.reasoning_parser)


def _cpu_flags(settings: EngineSettings) -> list[str]:
    """Return the flags that make vLLM behave on few cores; its default executor spins on all of them."""
    return [
        *("--dtype", settings.dtype or "float32"),
        *("--max-model-len", str(settings.max_model_len or 2048)),
        "--enforce-eager",
        *("--distributed-executor-backend", "uni"),
        *("--kv-cache-memory-bytes", str(settings.kv_cache_bytes)),
    ]


def _optional(flag: str, value: object) -> list[str]:
    return [] if value is None or value == "" else [flag, str(value)]


def check_startable(settings: EngineSettings, *, gpu: bool | None = None) -> None:
    """Refuse, with a sentence, what would fail later with a traceback or be open to strangers.

    Raises:
        EngineError: vLLM is missing, or its packages do not fit together.
        BadCheckpoint: the model directory is incomplete.
        SettingsError: the address must not or cannot be listened on.
    """
    if not is_loopback(settings.host) and not settings.allow_remote:
        raise SettingsError(
            f"the engine would listen on {settings.host!r}, where anyone can reload its weights: its control routes "
            "know no key. Listen on 127.0.0.1, or pass --allow-remote on a private network"
        )
    if problem := packages_problem():
        raise EngineError(problem)
    if settings.device == "gpu" and not (has_gpu() if gpu is None else gpu):
        raise EngineError("device='gpu', but this machine shows no NVIDIA GPU; pass --device cpu")
    if _is_directory(settings.model):
        check_model_directory(Path(settings.model))
    _check_port_is_free(settings.host, settings.port)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def packages_problem() -> str | None:
    """Return why vLLM cannot run with the packages that are installed; None where it can."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed in this environment; pip install 'turnwise[engine-cpu]' for a CPU, "
            "or vllm itself on a machine with a GPU"
        )
    torch_build = installed_version("torch")
    if torch_build is None:
        return "torch is not installed in this environment; install vLLM anew, it pins the torch that it needs"
    wrong = [name for name in _NO_MATCH_NEEDED if _build_differs(installed_version(name), torch_build)]
    if wrong:
        return (
            f"{', '.join(wrong)} was built for another torch than {torch_build}, and vLLM dies when it imports it; "
            f"pip uninstall -y {' '.join(wrong)} (text needs none of them)"
        )
    return None


def installed_version(distribution: str) -> str | None:
    """Return a distribution's version; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_differs(version: str | None, torch_version: str) -> bool:
    """Tell whether the local part of a version (cpu, cu130) is not torch's."""
    return version is not None and version.partition("+")[2] != torch_version.partition("+")[2]


def check_model_directory(directory: Path) -> None:
    """Refuse a directory that holds no whole model.

    Raises:
        BadCheckpoint: a file is missing, with its name.
    """
    if not directory.is_dir():
        raise BadCheckpoint(f"there is no model directory {str(directory)!r}; name one, or a model's id")
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (directory / name).is_file()]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        missing += sorted(shard for shard in shards if not (directory / shard).is_file())
    elif not any(directory.glob("*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise BadCheckpoint(
            f"the model directory {str(directory)!r} is incomplete: no {', '.join(missing)}; "
            "copy it whole, or build it anew"
        )


def _is_directory(model: str) -> bool:
    """Tell a directory from an id: an id is `name` or `owner/name`, and no such path exists."""
    return Path(model).exists() or model.startswith((".", "/", "~")) or model.count("/") > 1


def _check_port_is_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingsError(
                f"the engine cannot listen on {host}:{port}: {error.strerror}; stop what does, or pass another --port"
            ) from error
