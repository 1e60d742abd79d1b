"""The packages under extras/: what they may import of Turnwise, and that Turnwise imports none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EXTRAS = Path(__file__).parents[2] / "extras"
STAND_IN = "fake_engine"
"""The stand-in engine is installed with Turnwise: `turnwise fake-engine` starts it in a user's CI."""
MODULES = sorted(path for path in EXTRAS.glob("*/turnwise_*/**/*.py") if path.relative_to(EXTRAS).parts[0] != STAND_IN)
ALLOWED = ("turnwise.client", "turnwise.errors", "turnwise.types", "turnwise.credit")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "turnwise":
            yield from (f"turnwise.{alias.name}" for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(EXTRAS)))
def test_an_extra_imports_the_client_the_errors_the_types_and_the_credit_alone(path):
    own = path.relative_to(EXTRAS).parts[1]
    of_ours = [name for name in imported(path) if name.split(".")[0].startswith(("turnwise", "proxy", "trainer"))]
    foreign = [name for name in of_ours if name.split(".")[0] != own and not name.startswith(ALLOWED)]
    assert foreign == []


def test_no_package_of_turnwise_imports_an_extra_but_the_command_that_starts_the_stand_in():
    packages = [path for name in ("proxy", "trainer", "turnwise") for path in (EXTRAS.parent / name).rglob("*.py")]
    extras = {path.name for path in EXTRAS.glob("*/turnwise_*")}
    importing = {path.name for path in packages if extras & {name.split(".")[0] for name in imported(path)}}
    assert extras
    assert importing == {"one_process.py"}, "the command alone starts the stand-in engine"
