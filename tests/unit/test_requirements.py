"""Each extra names the packages that its part imports, so that a part works where it is installed alone."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = frozenset({"proxy", "trainer", "turnwise", "migrations"})
IN_PACKAGES = {
    "pydantic_settings": "pydantic-settings",
    "prometheus_client": "prometheus-client",
    "starlette": "fastapi",
}
"""Packages whose name is not that of the module, and what brings those that no extra names."""


def declared(extra: str | None) -> set[str]:
    """Return the packages of an extra, with those of the extras that it contains; None for the SDK alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    names = set() if extra is None else declared(None)
    for requirement in given:
        if own := re.match(r"turnwise\[(.+)\]", requirement):
            names |= set().union(*map(declared, own[1].split(",")))
        else:
            names.add(re.split(r"[\[<>=!;]", requirement)[0])
    return names


def imported_at_once(path: Path) -> Iterator[str]:
    """Yield the modules that importing a file imports; not those of functions and of `TYPE_CHECKING`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)


@pytest.mark.parametrize(
    ("part", "extra"),
    [("turnwise/client", None), ("turnwise/store", "store"), ("proxy", "proxy"), ("trainer", "trainer")],
)
def test_each_part_imports_only_what_its_extra_installs(part: str, extra: str | None) -> None:
    modules = {
        module.partition(".")[0] for path in (ROOT / part).rglob("*.py") for module in imported_at_once(path)
    } - OWN
    packages = {IN_PACKAGES.get(module, module) for module in modules - sys.stdlib_module_names}
    assert packages - declared(extra) == set()
