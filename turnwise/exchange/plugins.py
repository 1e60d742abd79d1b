"""Formats that other packages bring, found by entry points, and packages that stand in the way of ours.

An export is a module with `lines(session)`, under the entry point group `turnwise.exports`; an import is one with
`key_of(document)` and `drafts_of(document)`, under `turnwise.imports`. extras/formats shows both. A module is imported
when its format is asked for.

Turnwise's wheel has the top-level packages of `OWN_PACKAGES`, whose names other distributions and users' scripts have
too.
"""

from __future__ import annotations

import functools
import importlib.machinery
from importlib.metadata import EntryPoint, entry_points, packages_distributions
from pathlib import Path
from typing import Any

import turnwise
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


OWN_PACKAGES = ("proxy", "trainer", "migrations")


def other_package(name: str) -> str | None:
    """Return what is imported under the name of one of our packages, with its distribution; None if it is ours."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    place = None if spec is None or spec.origin is None else Path(spec.origin)
    if place is None or place.parent.parent == Path(turnwise.__file__).parent.parent:
        return None
    others = other_owners(name)
    return f"{str(place)!r}" + (f", of the distribution {', '.join(others)}" if others else "")


_distributions_of_packages = functools.cache(packages_distributions)


def other_owners(name: str) -> list[str]:
    """Return the distributions here that install a top-level package of the same name."""
    return sorted({*_distributions_of_packages().get(name, ())} - {"turnwise"})


class OwnPackages:
    """An importer for `sys.meta_path` that refuses another package under a name of ours, before its code runs."""

    def find_spec(self, name: str, path: object = None, _target: object = None) -> None:
        """Look at an import.

        Raises:
            SettingsError: another package has the name, such as the user's own `trainer.py`.
        """
        if path is None and name in OWN_PACKAGES and (other := other_package(name)) is not None:
            raise SettingsError(
                f"the package {name!r} of Turnwise cannot be imported: {other} stands in its way; start in another "
                "directory, or install Turnwise in an environment of its own"
            )
