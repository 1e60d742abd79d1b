"""Checks before a start: what can never succeed is refused with one sentence, before any process runs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.commands.place import opened
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.processes import engine_command, served_model
from turnwise.processes.ports import check_port_is_free, free_port
from turnwise.processes.stack import TrainerNeeds
from turnwise.settings import load_settings
from turnwise.store import keys, versions
from turnwise.types import PolicyKind
from turnwise.version_directory import base_version

if TYPE_CHECKING:
    from proxy.settings import ProxySettings
    from trainer.settings import TrainerSettings
    from turnwise.processes.stack import GpuPlan, UpSettings

HUB_SECONDS = 10.0


@dataclass(frozen=True)
class CheckedStack:
    """What the checks of `turnwise up` found out."""

    gpus: GpuPlan
    needs: TrainerNeeds


def check_up(settings: UpSettings, config: Path | None) -> CheckedStack:
    """Refuse a `turnwise up` that cannot succeed, and bring its tables up to date."""
    gpus = settings.gpu_plan(engine_command.num_gpus())
    needs = needs_of(load_trainer(settings, config)) if settings.trainer else TrainerNeeds()
    proxy = load_proxy(settings, config)
    check_port_is_free("the proxy", proxy.host, proxy.port)
    engine = load_settings(
        engine_command.EngineSettings,
        config=config,
        section="engine",
        overrides={
            "model": settings.model or "demo",
            "port": settings.engine_port or free_port(),
            "tensor_parallel": settings.tensor_parallel,
            "lora": needs.lora_rank is not None,
        },
    )
    engine_command.check_startable(engine)
    if needs.engines_sleep and not engine_command.runs_on_gpu(engine):
        raise SettingsError(
            "engine_sleep_level in [trainer] needs engines on a GPU, and here they run on the CPU; set it to 0"
        )
    check_model(settings.model)
    database = settings.database.get_secret_value()
    with opened(database, make_ready=False) as store:
        store.upgrade()
    check_keys(database, settings.host)
    if settings.trainer and settings.model is not None and served_model.whole_config(settings.model).get("model_type"):
        check_trained(load_trainer(settings, config))
    return CheckedStack(gpus, needs)


def load_proxy(settings: UpSettings, config: Path | None) -> ProxySettings:
    """Return the settings of the proxy under `turnwise up`."""
    from proxy.settings import ProxySettings

    overrides = {"host": settings.host, "port": settings.port}
    return load_settings(ProxySettings, config=config, section="proxy", overrides=overrides)


def load_trainer(settings: UpSettings, config: Path | None) -> TrainerSettings:
    """Return the settings of the trainer under `turnwise up`, once it is sure that it can start with them."""
    from trainer.main import check_startable
    from trainer.settings import TrainerSettings

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
    from turnwise.commands.certify import Certificate

    certificate = Certificate.read(trainer.model)
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
            raise SettingsError("building the demo's model needs torch: pip install '.[trainer]', or pass --model")
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
