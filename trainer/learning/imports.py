"""Functions of the user, named in the settings by `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from turnwise.errors import SettingsError


def import_function(path: str, setting: str) -> Callable[..., Any]:
    """Return the function behind `module:function`.

    Raises:
        SettingsError: There is no such module or function.
    """
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{setting}={path!r} cannot be imported: {error}; write it as module:function, and put the module's "
            "directory on PYTHONPATH"
        ) from error
    if not callable(function):
        raise SettingsError(f"{setting}={path!r} is not a function")
    found: Callable[..., Any] = function
    return found
