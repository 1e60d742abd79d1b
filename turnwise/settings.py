"""Settings of every process: defaults < `turnwise.toml` < environment < flags; unknown names are refused.

A process has one flat model of settings, and a source may set only names that the model declares. An unknown name from
any source is an error that stops the start, so that a misspelt setting is never ignored. No other module reads the
environment.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import itertools
import json
import logging
import os
import re
import stat
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as UnreadableVariable

from turnwise.errors import SettingsError

log = logging.getLogger(__name__)

SECTIONS = ("proxy", "trainer", "engine", "up", "demo", "run", "reward")
"""Tables of `turnwise.toml`, one for each process."""
MODELS = {
    "proxy": "proxy.features:Settings",
    "trainer": "trainer.features:Settings",
    "engine": "turnwise.processes.engine_command:EngineSettings",
    "up": "turnwise.processes.stack:UpSettings",
    "run": "turnwise.rollouts.settings:RunSettings",
    "reward": "turnwise.rewards.settings:RewardSettings",
}
"""Where the settings of each section are declared; a model is imported when its section is read."""

READABLE = "other users of this machine can read %s, which may hold secrets and what users wrote: chmod 600 %s"
DEFAULT_FILE = Path("turnwise.toml")

ENVIRONMENT_PREFIX = "TURNWISE_"
MASK = "**********"
_CREDENTIALS = re.compile(r"(://)[^/@\s'\"]*@")


class Settings(BaseSettings):
    """Base class of each process's settings. Direct construction uses only the arguments."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  pydantic-settings passes all of these by name
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


SettingsT = TypeVar("SettingsT", bound=Settings)


def settings_model(section: str) -> type[Settings]:
    """Return the settings model of a section.

    Raises:
        ValueError: There is no such section.
    """
    if section not in MODELS:
        raise ValueError(f"no section {section!r}: there are {', '.join(MODELS)}")
    module, _, name = MODELS[section].partition(":")
    model: type[Settings] = getattr(importlib.import_module(module), name)
    return model


def field_docs(record: type, root: type | None = None) -> dict[str, str]:
    """Return the docstring under each field of a class, and of its bases below and including `root`.

    Pydantic could read them, but it would do that at each start, and take 0.1 s for a proxy's settings.
    """
    docs = {}
    for base in reversed(record.__mro__):
        if base is not record and not (root and issubclass(base, root)):
            continue
        found: Any = ast.parse(inspect.getsource(sys.modules[base.__module__]))
        for name in base.__qualname__.replace(".<locals>", "").split("."):
            found = next(each for each in found.body if getattr(each, "name", None) == name)
        for before, after in itertools.pairwise(found.body):
            match before, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def load_settings(
    model_cls: type[SettingsT], *, config: Path | None, section: str, overrides: Mapping[str, Any]
) -> SettingsT:
    """Return the settings of one process, which is a section of `SECTIONS`, resolved from all sources.

    `config` is a TOML file with `[section]` tables, or one without tables, which belongs to this section; None reads
    `turnwise.toml` in the working directory if it exists. A flag that was not given is None in `overrides`.

    Raises:
        SettingsError: an undeclared key, an invalid value, or a file that cannot be read.
    """
    sources = {
        f"file {config or DEFAULT_FILE}": _read_file(config, section, model_cls),
        "environment": _read_environment(model_cls, section),
        "flag": {key: value for key, value in overrides.items() if value is not None},
    }
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in sources.items():
        merged |= values
        origins |= dict.fromkeys(values, origin)
    try:
        settings = model_cls(**merged)
    except pydantic.ValidationError as error:
        raise SettingsError(explain(error, model_cls, section, origins)) from error
    path, (from_file, *_) = config or DEFAULT_FILE, sources.values()
    has_secret = any(isinstance(getattr(settings, name), pydantic.SecretStr) for name in from_file)
    if has_secret and is_readable_by_others(path):
        log.warning(READABLE, path, path)
    return settings


def is_readable_by_others(path: Path) -> bool:
    """Return whether users who are neither a file's owner nor of its group can read it."""
    try:
        found = path.resolve()
        in_reach = all(parent.stat().st_mode & stat.S_IXOTH for parent in found.parents)
        return in_reach and bool(found.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def describe(settings: Settings, section: str) -> str:
    """Return the resolved settings as a TOML table with masked secrets; `--dry-run` prints it."""
    lines = [f"[{section}]"]
    for name, dumped in settings.model_dump(mode="json").items():
        secret = getattr(settings, name)
        value = describe_secret(secret) if isinstance(secret, pydantic.SecretStr) else dumped
        lines.append(f"# {name} is not set" if value is None else f"{name} = {mask_credentials(toml_value(value))}")
    return "\n".join(lines)


def variable_name(section: str, name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{section}_{name}".upper()


def shared_variables(names: Mapping[str, str]) -> dict[str, str]:
    return {name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)}


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **added}


def has_sections(config: Path) -> bool:
    """Return whether a settings file has a table for each process; otherwise all of it belongs to one process.

    Raises:
        SettingsError: the file cannot be read.
    """
    return _is_sectioned(_parse(config))


def _is_sectioned(document: Mapping[str, Any]) -> bool:
    return any(isinstance(document.get(name), dict) for name in SECTIONS)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {str(path)!r} is not TOML: {error}") from error


def _read_file(config: Path | None, section: str, model_cls: type[Settings]) -> dict[str, Any]:
    if config is None and not DEFAULT_FILE.is_file():
        return {}
    path = config or DEFAULT_FILE
    document = _parse(path)
    _check_sections(path, document, model_cls)
    if not _is_sectioned(document):
        return document
    unknown = [key for key in document if key not in SECTIONS]
    if unknown:
        raise SettingsError(
            f"{str(path)!r} has {unknown[0]!r} outside of its sections; put it into one of "
            + ", ".join(f"[{name}]" for name in SECTIONS)
        )
    table: dict[str, Any] = document.get(section, {})
    return table


def _check_sections(path: Path, document: Mapping[str, Any], model_cls: type[Settings]) -> None:
    """Refuse a table with a misspelt name, which would be ignored or taken for a setting."""
    for name, value in document.items():
        if not isinstance(value, dict) or name in SECTIONS or name in model_cls.model_fields:
            continue
        close = difflib.get_close_matches(name, SECTIONS, n=1)
        if close or _is_sectioned(document):
            hint = f"did you mean [{close[0]}]?" if close else "sections are " + ", ".join(f"[{s}]" for s in SECTIONS)
            raise SettingsError(f"{str(path)!r} has the section [{name}], which no process reads; {hint}")


def _read_environment(model_cls: type[Settings], section: str) -> dict[str, Any]:
    prefix = f"{ENVIRONMENT_PREFIX}{section.upper()}_"
    try:
        values = dict(EnvSettingsSource(model_cls, env_prefix=prefix)())
    except UnreadableVariable as error:
        raise SettingsError(f"{error}; a list or a table in the environment is written as JSON") from error
    for name, value in os.environ.items():
        if name.upper().startswith(prefix):
            values.setdefault(name[len(prefix) :].lower(), value)
    return values


def explain(
    error: pydantic.ValidationError, model_cls: type[Settings], section: str, origins: Mapping[str, str]
) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"])) or "settings"
        head = str(problem["loc"][0]) if problem["loc"] else ""
        origin = origins.get(head, "default")
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(head, model_cls.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see --help for all names"
            hint = _place_elsewhere(head, model_cls) or hint
            lines.append(f"[{section}] has no setting {name!r} (from {origin}); {hint}")
        elif problem["type"] == "missing":
            lines.append(
                f"[{section}] needs {name!r}: set it in the file, as {variable_name(section, name)}, or by its flag"
            )
        else:
            shown = MASK if _is_secret(model_cls, head) else mask_credentials(repr(problem["input"]))
            lines.append(f"[{section}] {name}={shown} (from {origin}) does not fit: {problem['msg']}")
    return "\n".join(lines)


def _place_elsewhere(name: str, model_cls: type[Settings]) -> str | None:
    """Return in which other sections a setting is, also by its name with the section before it; None if in none."""
    found = []
    for section in MODELS:
        with contextlib.suppress(ImportError, OSError):  # its package is not installed, or a library of it
            own, model = name.removeprefix(f"{section}_"), settings_model(section)
            if own in model.model_fields and not issubclass(model_cls, model):
                found.append(f"{own!r} of [{section}]")
    return f"it is {' or '.join(found)}" if found else None


def _is_secret(model_cls: type[Settings], name: str) -> bool:
    field = model_cls.model_fields.get(name)
    return field is not None and "Secret" in str(field.annotation)


def describe_secret(secret: pydantic.SecretStr) -> str:
    """Return a masked secret; of a URL, only its user, password and query are masked."""
    url = secret.get_secret_value()
    if "://" not in url:
        return str(secret)
    return re.sub(r"\?.*", f"?{MASK}", re.sub(r"(?<=://).*@", f"{MASK}@", url))


def mask_credentials(text: str) -> str:
    return _CREDENTIALS.sub(rf"\1{MASK}@", text)


def parsed_json(value: Any) -> Any:
    """Return a list or a table that a flag or a variable gives as JSON; other values as they are."""
    return json.loads(value) if isinstance(value, str) else value


FromJson = pydantic.BeforeValidator(parsed_json)
"""Marks a setting that is a list or a table: `Annotated[dict[str, float], FromJson]`."""


def toml_value(value: object) -> str:
    """Return a value as TOML: scalars and arrays are as in JSON, only tables differ."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value)


__all__ = [
    "SECTIONS",
    "Settings",
    "child_environment",
    "describe",
    "has_sections",
    "load_settings",
    "mask_credentials",
    "settings_model",
    "toml_value",
    "variable_name",
]


def load_object(target: str, setting: str) -> Any:
    """Import the function or class that a setting names by `module:name`, or by a module and dotted names in it.

    Raises:
        SettingsError: there is no such module or name, or it cannot be called.
    """
    module, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{setting}={target!r} cannot be imported: {error}; write it as module:name, and put the module's "
            "directory on PYTHONPATH"
        ) from error
    if not callable(found):
        raise SettingsError(f"{setting}={target!r} is neither a function nor a class")
    return found
