"""What a setting names by `module:name`: a function or a class of the user's own."""

from __future__ import annotations

import importlib
from typing import Any

from turnwise.errors import SettingsError


def load_object(target: str, setting: str) -> Any:
    """Import the object that `module:name` names.

    Args:
        target: The module and a name in it, or a dotted name of an attribute of it.
        setting: The setting that names it, for the error.

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
