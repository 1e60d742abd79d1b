"""How the flags of a command are made from the fields of its settings.

A flag is not written twice: its name is the name of the setting, its help the docstring of the setting, and its default
is left to the model, so that file and environment come between. A model is imported when its command runs, which keeps
`turnwise --help` quick, and the SDK alone needs no package of an extra.
"""

from __future__ import annotations

import enum
import functools
import json
import shlex
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from turnwise.settings import Settings, describe, field_docs, load_settings, settings_model

DESCRIPTIONS = {
    "up": "`turnwise up`: the whole stack on this machine. It sets model, addresses, database of the other sections.",
    "proxy": "`turnwise proxy`: the API for agents, sessions, rewards and policies.",
    "trainer": "`turnwise train`: claims experiences, updates, publishes.",
    "engine": "`turnwise engine`: vLLM with the right flags.",
    "run": "`turnwise run`: any agent as rollouts.",
    "reward": "`turnwise reward`: rewards from a separate process.",
}
_NOT_SETTINGS = ("config", "dry_run", "as_json")


class SettingsCommand(click.Command):
    """Resolves settings from file, environment and flags, then prints or runs them."""

    def __init__(
        self,
        name: str,
        *,
        section: str,
        settings: Callable[[], type[Settings]] | None = None,
        run: Callable[..., None],
        show: Callable[..., dict[str, Any]] | None = None,
        takes_extra: str | None = None,
        takes_config: bool = False,
        prints_json: bool = False,
        help: str,  # noqa: A002  click's own name
    ) -> None:
        """Declare the command.

        `settings` returns the model of the settings, by default that of the section. `run` gets the resolved
        settings, the arguments after `--` where `takes_extra` names them, and as `takes_config` and `prints_json` say
        the path of the settings file and `as_json`. `show` returns what `--dry-run` prints in addition: by `shell` a
        line for a shell, by `notes` texts by name.
        """
        super().__init__(name, help=help, callback=self._invoke)
        self._settings = settings or functools.partial(settings_model, section)
        self._section = section
        self._run = run
        self._show = show
        self._takes_extra = takes_extra
        self._takes_config = takes_config
        self._prints_json = prints_json

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not self.params:
            self.params = self._flags()
        return super().get_params(ctx)

    def _flags(self) -> list[click.Parameter]:
        docs = field_docs(self._settings(), Settings)
        flags: list[click.Parameter] = [
            _option(name, field, docs.get(name, "")) for name, field in self._settings().model_fields.items()
        ]
        flags += [
            click.Option(["--config"], type=click.Path(path_type=Path), help="Settings file [default: turnwise.toml]."),
            click.Option(["--dry-run"], is_flag=True, help="Print the resolved settings and do nothing."),
            click.Option(["--json", "as_json"], is_flag=True, help="Print them as JSON."),
        ]
        if self._takes_extra:
            flags.append(click.Argument(["extra"], nargs=-1, type=click.UNPROCESSED, metavar=self._takes_extra))
        return flags

    def _invoke(self, **values: Any) -> None:
        config, dry_run, as_json = (values.pop(name) for name in _NOT_SETTINGS)
        extra: tuple[Any, ...] = (tuple(values.pop("extra")),) if self._takes_extra else ()
        if self._takes_config:
            extra = (*extra, config)
        given = {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value != ()
        }
        settings = load_settings(self._settings(), config=config, section=self._section, overrides=given)
        if not dry_run:
            self._run(settings, *extra, **({"as_json": as_json} if self._prints_json else {}))
            return
        besides = self._show(settings, *extra) if self._show else {}
        if as_json:
            click.echo(json.dumps({"settings": settings.model_dump(mode="json"), **besides}, indent=2))
            return
        click.echo(describe(settings, self._section))
        for name, note in besides.get("notes", {}).items():
            click.echo(f"\n# {name}: {note}")
        if "shell" in besides:
            click.echo(f"\n{besides['shell']}")
        for name, argv in besides.get("commands", {}).items():
            gpus = besides.get("gpus", {}).get(name)
            click.echo(f"\n# {name}" + (f", on GPU {gpus}" if gpus else "") + f"\n{shlex.join(argv)}")


def _option(name: str, field: FieldInfo, text: str) -> click.Option:
    """Return a setting's flag. Values stay text: the model converts them and reports those that do not fit."""
    flag = "--" + name.replace("_", "-")
    annotation = _without_none(field.annotation)
    if not field.is_required() and field.get_default(call_default_factory=True) is not None:
        text += f" [default: {field.get_default(call_default_factory=True)}]"
    if annotation is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=text)
    many = typing.get_origin(annotation) in {list, tuple}
    if typing.get_origin(annotation) is typing.Literal:
        return click.Option([flag], type=click.Choice([str(each) for each in typing.get_args(annotation)]), help=text)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return click.Option([flag], type=click.Choice([str(each.value) for each in annotation]), help=text)
    metavar = {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(annotation, "TEXT")
    return click.Option([flag], multiple=many, metavar=metavar, help=text)


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        kept = [each for each in typing.get_args(annotation) if each is not type(None)]
        return kept[0] if len(kept) == 1 else str
    return annotation
