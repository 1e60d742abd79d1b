"""What a restart under other settings means: most take effect and are logged, a few are refused.

A checkpoint holds the settings that it was trained under. The learning rate and the other optimizer settings are taken
from the current settings, never from the optimizer's saved state.
"""

from __future__ import annotations

import logging
from typing import Any

from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.types import Json, PolicyKind

log = logging.getLogger(__name__)

SECRETS = {"database"}
FIXED = ("kind",)
FIXED_FOR_LORA = ("model", "lora_rank", "lora_alpha", "lora_targets")
"""What the shape or the meaning of an adapter depends on."""


def saved_settings(settings: TrainerSettings) -> Json:
    """Return the settings that go into a checkpoint, as plain values without secrets."""
    return settings.model_dump(mode="json", exclude=SECRETS)


def check_resumable(saved: Json, settings: TrainerSettings) -> None:
    """Check that the weights of a checkpoint can be trained on under these settings.

    Raises:
        SettingsError: A setting changed that the weights depend on.
    """
    fixed = FIXED + (FIXED_FOR_LORA if settings.kind is PolicyKind.LORA else ())
    for name, before, now in _changes(saved, settings):
        if name in fixed:
            raise SettingsError(
                f"{name} was {before!r} and is {now!r} now, but a run cannot change it: set it back to {before!r}, or "
                "start a new run with another database and policies_dir"
            )


def log_changes(saved: Json, settings: TrainerSettings) -> None:
    """Log each setting that changed since the checkpoint was written."""
    for name, before, now in _changes(saved, settings):
        log.info("setting %s changed from %r to %r and takes effect now", name, before, now)


def _changes(saved: Json, settings: TrainerSettings) -> list[tuple[str, Any, Any]]:
    now = saved_settings(settings)
    return [(name, before, now[name]) for name, before in saved.items() if name in now and now[name] != before]
