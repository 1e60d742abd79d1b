"""The annotated `turnwise.toml` that `turnwise init` writes: every setting of every process, with its default.

The file is made from the settings models, so it has the settings of this release. All settings are commented out: the
file changes nothing by itself, and does not freeze a default that a later release improves.
"""

from __future__ import annotations

import importlib
import textwrap

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from turnwise.settings import Settings, toml_value

HEAD = """\
# Settings of Turnwise. Remove the comment sign of a setting to change it; the values shown are the defaults.
# Precedence: defaults < this file < environment (TURNWISE_<SECTION>_<SETTING>) < flags. Unknown names are errors.
# `turnwise up` and the separate commands read `turnwise.toml` in the directory where they start.
#
# A LoRA adapter instead of all weights, with everything under `turnwise up`:
#
#   [up]
#   model = "path/to/model"
#   kind = "lora"              # the engine is started for adapters of the trainer's rank
#
#   [trainer]
#   lora_rank = 16
#   lora_alpha = 32
#   learning_rate = 1e-5
"""

MODELS = {
    "up": (
        "turnwise.processes.stack:UpSettings",
        "`turnwise up`: the whole stack on this machine. It sets model, addresses, database of the other sections.",
    ),
    "proxy": ("proxy.settings:ProxySettings", "`turnwise proxy`: the API for agents, sessions, rewards and policies."),
    "trainer": ("trainer.settings:TrainerSettings", "`turnwise train`: claims experiences, updates, publishes."),
    "engine": ("turnwise.processes.engine_command:EngineSettings", "`turnwise engine`: vLLM with the right flags."),
    "run": ("turnwise.rollouts.settings:RunSettings", "`turnwise run`: any agent as rollouts."),
    "reward": ("turnwise.rewards.settings:RewardSettings", "`turnwise reward`: rewards from a separate process."),
}
"""Settings model and description of each section."""


def settings_file() -> str:
    """Return the text of an annotated settings file.

    Raises:
        ModuleNotFoundError: an extra with a process's settings is not installed.
    """
    return "\n".join([HEAD, *(_section(name) for name in MODELS)])


def settings_model(section: str) -> type[Settings]:
    """Return the settings model of a section."""
    module, _, name = MODELS[section][0].partition(":")
    model: type[Settings] = getattr(importlib.import_module(module), name)
    return model


def _section(section: str) -> str:
    lines = ["", *_comment(MODELS[section][1]), f"[{section}]"]
    for name, field in settings_model(section).model_fields.items():
        lines += ["", *_comment(_described(field)), _assignment(name, field)]
    return "\n".join(lines) + "\n"


def _described(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if _default(field) is None:
        return f"{text} Not set by default.".strip()
    return text


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 116)]


def _assignment(name: str, field: FieldInfo) -> str:
    default = _default(field)
    return f'#{name} = "..."' if default is None else f"#{name} = {toml_value(default)}"


def _default(field: FieldInfo) -> object:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return None
    if isinstance(default, SecretStr):
        return default.get_secret_value()
    if isinstance(default, tuple):
        return list(default)
    return default if default is None or isinstance(default, bool | int | float | list | dict) else str(default)
