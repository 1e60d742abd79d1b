"""What each part imports: what its extra installs; a package of extras, the SDK and credit alone."""

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
    "PIL": "pillow",
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
def test_each_part_imports_only_what_its_extra_installs(part, extra):
    modules = {
        module.partition(".")[0] for path in (ROOT / part).rglob("*.py") for module in imported_at_once(path)
    } - OWN
    packages = {IN_PACKAGES.get(module, module) for module in modules - sys.stdlib_module_names}
    assert packages - declared(extra) == set()


EXTRAS = Path(__file__).parents[2] / "extras"
STAND_IN = "fake_engine"
"""The stand-in engine is installed with Turnwise: `turnwise fake-engine` starts it in a user's CI."""
MODULES = sorted(path for path in EXTRAS.glob("*/turnwise_*/**/*.py") if path.relative_to(EXTRAS).parts[0] != STAND_IN)
ALLOWED = (
    *("turnwise.client", "turnwise.errors", "turnwise.types", "turnwise.credit", "turnwise.workflows"),
    "turnwise.exchange.imports.values",
)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "turnwise":
            yield from (f"turnwise.{alias.name}" for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(EXTRAS)))
def test_an_extra_imports_the_sdk_and_the_credit_alone(path):
    own = path.relative_to(EXTRAS).parts[1]
    of_ours = [name for name in imported(path) if name.split(".")[0].startswith(("turnwise", "proxy", "trainer"))]
    foreign = [name for name in of_ours if name.split(".")[0] != own and not name.startswith(ALLOWED)]
    assert foreign == []


def test_no_package_of_turnwise_imports_an_extra_but_the_command_that_starts_the_stand_in():
    packages = [path for name in ("proxy", "trainer", "turnwise") for path in (EXTRAS.parent / name).rglob("*.py")]
    extras = {path.name for path in EXTRAS.glob("*/turnwise_*")}
    naming = [path for path in packages if any(name in path.read_text() for name in extras)]
    importing = {path.name for path in naming if extras & {name.split(".")[0] for name in imported(path)}}
    assert extras
    assert importing == {"engines.py"}, "the command alone starts the stand-in engine"
