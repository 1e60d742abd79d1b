"""Checks before a start: what can never succeed is refused with one sentence, before any process runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands.place import opened
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.installed import install_command
from turnwise.processes import engine_command, served_model
from turnwise.processes.ports import check_port_is_free, free_port
from turnwise.processes.stack import TrainerNeeds
from turnwise.settings import load_settings
from turnwise.store import keys, versions
from turnwise.types import PolicyKind
from turnwise.version_directory import base_version, local_files, weight_files

if TYPE_CHECKING:
    from proxy.features import Settings as ProxySettings
    from trainer.features import Settings as TrainerSettings
    from turnwise.processes.stack import GpuPlan, UpSettings

HUB_SECONDS = 10.0


LARGE_MODEL = 1_500_000_000
"""Parameters from which an adapter is offered: weights, gradients and moments of all of them take 24 GB."""
ENGINE_MEMORY = 0.92
"""Share of a GPU's memory that vLLM takes by default."""


@dataclass(frozen=True)
class CheckedStack:
    """What the checks of `turnwise up` found out."""

    gpus: GpuPlan
    needs: TrainerNeeds
    lora_offer: str | None = None
    """Why an adapter suits this start better than all weights, which nobody chose; None if it does not."""
    length_note: str | None = None
    """What limits the length of texts, or what it costs."""


def check_up(settings: UpSettings, config: Path | None, vllm_flags: tuple[str, ...] = ()) -> CheckedStack:
    """Refuse a `turnwise up` that cannot succeed, and bring its tables up to date."""
    trainer = load_trainer(settings, config) if settings.trainer else None
    needs = TrainerNeeds() if trainer is None else needs_of(trainer)
    proxy = load_proxy(settings, config)
    check_port_is_free("the proxy", proxy.host, proxy.port)
    engine = load_engine(settings, config, needs)
    gpus = settings.gpu_plan(engine_command.num_gpus(), engine)
    engine_command.check_startable(engine, vllm_flags, is_trained=trainer is not None)
    if needs.engines_sleep and not engine_command.runs_on_gpu(engine):
        raise SettingsError(
            "engine_sleep_level in [trainer] needs engines on a GPU, and here they run on the CPU; set it to 0"
        )
    check_model(settings.model)
    check_memory(gpus, settings.model, trainer, vllm_flags)
    database = settings.database.get_secret_value()
    with opened(database, make_ready=False) as store:
        store.upgrade()
        with store.read() as conn:
            is_new = len(versions.list_versions(conn, limit=2)[0]) < 2  # version 0 is the model itself
    check_keys(database, settings.host)
    note = engine_command.length_note(engine, vllm_flags)
    if trainer is None or settings.model is None:
        return CheckedStack(gpus, needs, length_note=note)
    if served_model.whole_config(settings.model).get("model_type"):
        check_trained(trainer)
    return CheckedStack(gpus, needs, lora_offer(gpus, settings.model, trainer) if is_new else None, note)


def load_engine(settings: UpSettings, config: Path | None, needs: TrainerNeeds) -> engine_command.EngineSettings:
    overrides = {
        "model": settings.model or "demo",
        "port": settings.engine_port or free_port(),
        "lora": needs.lora_rank is not None,
    }
    return load_settings(engine_command.EngineSettings, config=config, section="engine", overrides=overrides)


def lora_offer(gpus: GpuPlan, model: str, trainer: TrainerSettings) -> str | None:
    """Return why an adapter suits better than the whole weights that are the default; None if a setting chose them."""
    if "kind" in trainer.model_fields_set or (not gpus.trainer and served_model.has_experts(model)):
        return None
    size = _num_parameters(model)
    if size >= LARGE_MODEL:
        return f"the model has {size / 1e9:.1f} billion parameters"
    shared = {*gpus.trainer} & {gpu for engine in gpus.engines for gpu in engine}
    return f"engine and trainer share GPU {min(shared)}" if shared else None


def _num_parameters(model: str) -> int:
    from trainer.settings import num_parameters

    directory = local_files(model)
    return 0 if directory is None else num_parameters(directory)


def check_memory(
    gpus: GpuPlan, model: str | None, trainer: TrainerSettings | None, vllm_flags: tuple[str, ...]
) -> dict[str, str]:
    """Return what engine and trainer need of their GPUs at least, where model and memory are known here.

    Raises:
        SettingsError: it is more than there is. Flags of vLLM may make the engine need less, so it is not refused then.
    """
    sizes, directory = engine_command.gpu_bytes(), None if model is None else local_files(model)
    if directory is None or not gpus.engines[0] or max(*gpus.engines[0], *gpus.trainer, 0) >= len(sizes):
        return {}
    share = gpus.engine_memory or ENGINE_MEMORY
    size = _num_parameters(str(directory))
    on_disk = sum(file.stat().st_size for file in weight_files(directory))
    weights = min(on_disk, 2 * size) / len(gpus.engines[0])  # vLLM rounds float32 to bfloat16
    notes = {
        "engine memory": _memory_note(
            "an engine", weights, share * sizes[gpus.engines[0][0]], may_need_less=bool(vllm_flags)
        )
    }
    if trainer is None:
        return notes
    from trainer.features.devices import least_bytes

    needed = least_bytes(trainer, size, len(gpus.trainer))
    is_shared = any(gpus.trainer[0] in engine for engine in gpus.engines) and not trainer.engine_sleep_level
    given = sizes[gpus.trainer[0]] * (1 - share * is_shared)
    return notes | {"trainer memory": _memory_note(f"the trainer (kind='{trainer.kind}')", needed, given)}


def _memory_note(who: str, needed: float, given: float, *, may_need_less: bool = False) -> str:
    note = f"{who} needs at least {needed / 1e9:.1f} GB of each of its GPUs, and has {given / 1e9:.1f} GB there"
    if needed > given and not may_need_less:
        raise SettingsError(
            f"{note}; set kind='lora', name more or other GPUs, or see what docs/gpu.md says about memory"
        )
    return note


def load_proxy(settings: UpSettings, config: Path | None) -> ProxySettings:
    """Return the settings of the proxy under `turnwise up`."""
    from proxy.features import Settings as ProxySettings

    overrides = {"host": settings.host, "port": settings.port}
    return load_settings(ProxySettings, config=config, section="proxy", overrides=overrides)


def load_trainer(settings: UpSettings, config: Path | None) -> TrainerSettings:
    """Return the settings of the trainer under `turnwise up`, once it is sure that it can start with them."""
    from trainer.features import Settings as TrainerSettings
    from trainer.main import check_startable

    overrides = {"model": settings.model or "demo", "kind": settings.kind}
    trainer = load_settings(
        TrainerSettings,
        config=settings.trainer_config or config,
        section="trainer",
        overrides=overrides,
    )
    check_startable(trainer)
    return trainer


def check_trained(trainer: TrainerSettings) -> dict[str, str]:
    """Refuse a model that could be served and not trained, and return what the trainer makes of it.

    Raises:
        BadCheckpoint: transformers does not know it.
        SettingsError: its versions would not be loaded by engines, or its certificate says that something went wrong.
    """
    from trainer.model.loading import described
    from turnwise.commands.features.certify.certificate import Certificate

    certificate, _ = Certificate.valid(trainer.model)
    if certificate is not None:
        certificate.check(trainer.kind)
    return described(trainer)


def needs_of(trainer: TrainerSettings) -> TrainerNeeds:
    return TrainerNeeds(
        lora_rank=trainer.lora_rank if trainer.kind is PolicyKind.LORA else None,
        engines_sleep=trainer.engine_sleep_level > 0,
    )


def check_model(model: str | None) -> None:
    """Refuse a model that is neither a complete directory nor a known id."""
    if model is None:
        if importlib.util.find_spec("torch") is None:
            raise SettingsError(f"building the demo's model needs torch: {install_command('trainer')}, or pass --model")
        return
    if engine_command.is_directory(model):
        served_model.check_model_directory(Path(model))
        return
    _check_hub_id(model)


def _check_hub_id(model: str) -> None:
    import httpx
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        model_info(model, timeout=HUB_SECONDS)
    except (HFValidationError, HfHubHTTPError) as error:
        raise BadCheckpoint(
            f"there is no model {model!r}: no such directory here, and no such id (or no access) on the hub"
        ) from error
    except (OSError, httpx.HTTPError) as error:
        raise BadCheckpoint(
            f"there is no model directory {model!r} here, and the id {model!r} is not in the local cache and cannot "
            f"be looked up ({type(error).__name__})"
        ) from error


def check_database_model(database: str, model: str) -> None:
    """Let a new database belong to a model; refuse a database of another one."""
    base = base_version(model)
    with opened(database) as store, store.write() as conn:
        versions.adopt_base(conn, base)


def check_keys(database: str, host: str) -> None:
    """Refuse to serve other machines without any API key."""
    if engine_command.is_loopback(host):
        return
    with opened(database) as store, store.read() as conn:
        has_keys = keys.any_keys(conn)
    if not has_keys:
        raise SettingsError(
            f"without API keys the proxy serves loopback only, not {host!r}; make a key with `turnwise keys create`"
        )
