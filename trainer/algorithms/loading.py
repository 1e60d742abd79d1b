"""From the setting `algorithm` to an algorithm: by the name of one that comes with Turnwise, or by `module:Class`."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic

import trainer.algorithms
from trainer.algorithms.algorithm import Algorithm
from turnwise.errors import SettingsError
from turnwise.settings import explain, load_object, parsed_json

DEFAULT = "grpo"


def load(given: Any) -> Algorithm:
    """Return the algorithm of a name, or of a table of `name` and settings, which may be JSON.

    Raises:
        SettingsError: There is no such algorithm, or a setting does not fit it.
    """
    if isinstance(given, Algorithm):
        return given
    if isinstance(given, str):
        given = parsed_json(given) if given.lstrip().startswith("{") else {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name", DEFAULT), str):
        raise SettingsError(f"algorithm={given!r} is neither a name nor a table with one: write it as {DEFAULT!r}")
    name = given.get("name", DEFAULT)
    kind = class_of(name)
    table = {str(key): value for key, value in given.items() if key != "name"}
    try:
        settings = kind.Settings(**table)
    except pydantic.ValidationError as error:
        origins = dict.fromkeys(table, f"algorithm {name!r}")
        raise SettingsError(explain(error, kind.Settings, "trainer.algorithm", origins)) from error
    return kind(settings)


def class_of(name: str) -> type[Algorithm]:
    """Return the class of an algorithm.

    Raises:
        SettingsError: There is none of this name, or it is no algorithm.
    """
    if ":" in name:
        found = load_object(name, "algorithm")
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise SettingsError(f"algorithm={name!r} is no class that derives from {Algorithm.__module__}:Algorithm")
        return found
    known = provided()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}, and module:Class of your own"
        raise SettingsError(f"there is no algorithm {name!r}; {hint}")
    return known[name]


@functools.cache
def provided() -> dict[str, type[Algorithm]]:
    """Return the algorithms that come with Turnwise, by name: the classes of this folder that have one."""
    found: dict[str, type[Algorithm]] = {}
    for each in pkgutil.iter_modules(trainer.algorithms.__path__):
        module = importlib.import_module(f"{trainer.algorithms.__name__}.{each.name}")
        own = (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)
        found |= {kind.name: kind for kind in own if issubclass(kind, Algorithm) and vars(kind).get("name")}
    return dict(sorted(found.items()))


ByName = Annotated[
    pydantic.InstanceOf[Algorithm], pydantic.BeforeValidator(load), pydantic.PlainSerializer(Algorithm.table)
]
