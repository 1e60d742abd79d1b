"""The annotated `turnwise.toml` that `turnwise init` writes: every setting of every process, with its default.

The file is made from the settings models, so it has the settings of this release. All settings are commented out: the
file changes nothing by itself, and does not freeze a default that a later release improves.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from turnwise.commands.flags import DESCRIPTIONS
from turnwise.errors import SettingsError
from turnwise.files import write_whole
from turnwise.installed import extra_of, install_command
from turnwise.settings import DEFAULT_FILE, Settings, field_docs, settings_model, toml_value

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
#   learning_rate = 1e-5
"""


SHORT_HEAD = """\
# Settings of Turnwise: those that most people change. `turnwise init --all` writes every setting.
# Remove the comment sign of a setting to change it; the values shown are the defaults, "..." has none.
"""
SHORT = {
    "up": ("model", "port", "database", "kind"),
    "trainer": ("learning_rate", "groups_per_batch", "total_batches"),
    "engine": ("max_model_len", "tool_call_parser", "gpu_memory"),
    "run": ("tasks", "group_size", "reward_command"),
}


def short_settings_file() -> str:
    sections = []
    for section, names in SHORT.items():
        fields = _fields(section)
        lines = [f"[{section}]", *(_assignment(name, fields[name]) for name in names)] if fields else _left_out(section)
        sections.append("\n".join(lines))
    return "\n".join([SHORT_HEAD, "\n\n".join(sections)]) + "\n"


def settings_file() -> str:
    """Return the text of an annotated settings file."""
    return "\n".join([HEAD, *(_section(name) for name in DESCRIPTIONS)])


def algorithm_table(name: str) -> str:
    """Return the table of an algorithm with its settings."""
    from trainer.algorithms.loading import class_of

    lines = ["", "[trainer.algorithm]", f"name = {toml_value(name)}"]
    settings = class_of(name).Settings
    docs = field_docs(settings, Settings)
    for each, field in settings.model_fields.items():
        lines += ["", *_comment(_described(docs.get(each, ""), field)), _assignment(each, field)]
    return "\n".join(lines) + "\n"


def _fields(section: str) -> dict[str, FieldInfo]:
    """Return the fields of a section; none where its program is not installed."""
    try:
        return settings_model(section).model_fields
    except ModuleNotFoundError as error:
        if extra_of((error.name or "").partition(".")[0]) is None:
            raise
        return {}


def _left_out(section: str) -> list[str]:
    return _comment(f"[{section}] is left out, because its program is not installed here: {install_command(section)}")


def _section(section: str) -> str:
    if not _fields(section):
        return "\n".join(["", *_left_out(section)]) + "\n"
    lines = ["", *_comment(DESCRIPTIONS[section]), f"[{section}]"]
    settings = settings_model(section)
    docs = field_docs(settings, Settings)
    for name, field in settings.model_fields.items():
        lines += ["", *_comment(_described(docs.get(name, ""), field)), _assignment(name, field)]
    return "\n".join(lines) + "\n"


def _described(text: str, field: FieldInfo) -> str:
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


@click.command("init")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=DEFAULT_FILE,
    show_default=True,
    help="File to write; - is stdout.",
)
@click.option("--all", "has_all", is_flag=True, help="Every setting of every process, with its description.")
@click.option("--algorithm", help="Add the table of this algorithm, with all its settings.")
def init(output: Path, *, has_all: bool, algorithm: str | None) -> None:
    """Write a settings file with the defaults; never over an existing file."""
    text = settings_file() if has_all else short_settings_file()
    if algorithm is not None:
        text += algorithm_table(algorithm)
    if str(output) == "-":
        click.echo(text)
        return
    if output.exists():
        raise SettingsError(f"{str(output)!r} exists; name another file with --output, or remove it")
    try:
        write_whole(output, text)
    except OSError as error:
        raise SettingsError(f"cannot write {str(output)!r}: {error.strerror}; name another file") from error
    click.echo(f"Wrote {output}. Every setting is a comment; remove the comment sign of those that you change.")
