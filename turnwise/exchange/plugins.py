"""Formats that other packages bring, found by entry points.

An export is a module with `lines(session)`, under the entry point group `turnwise.exports`; an import is one with
`key_of(document)` and `drafts_of(document)`, under `turnwise.imports`. extras/formats shows both. A module is imported
when its format is asked for.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from turnwise.errors import SettingsError

EXPORTS, IMPORTS, COMMANDS = "turnwise.exports", "turnwise.imports", "turnwise.commands"
PACKAGE_OF = {
    EXPORTS: {"atif": "extras/formats", "otlp": "extras/formats", "replay": "extras/replay"},
    IMPORTS: {"atif": "extras/formats", "langfuse": "extras/formats", "litellm": "extras/formats"},
    COMMANDS: {"replay": "extras/replay", "send-traces": "extras/formats"},
}
"""Where the packages of known names are, in Turnwise's repository."""


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def load(group: str, name: str, core: tuple[str, ...] = ()) -> Any:
    """Import what an installed package brings under a name; `core` are the names that need none, for the error.

    Raises:
        SettingsError: no installed package has the name.
    """
    point = installed(group).get(name)
    if point is not None:
        return point.load()
    kind = group.removeprefix("turnwise.").removesuffix("s")
    if (package := PACKAGE_OF[group].get(name)) is not None:
        raise SettingsError(
            f"the {kind} {name!r} comes with a package that is not installed; in a checkout of Turnwise: "
            f"pip install ./{package}"
        )
    known = [*core, *sorted(installed(group))]
    raise SettingsError(f"there is no {kind} {name!r}; installed are {', '.join(known)}")
