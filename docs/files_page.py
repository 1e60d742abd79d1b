"""Writes docs/files.md: each file with the first line of its docstring, floor by floor."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files() -> str:
    """Return the whole page."""
    parts = ["# Every file", "", "The first line of each file, collected by `make docs`."]
    for package in (*floors(), "migrations", "extras", "examples"):
        parts += ["", f"## {package}", "", *(f"- `{path}`: {line}" for path, line in lines_of(package))]
    return "\n".join(parts) + "\n"


def floors() -> dict[str, list[str]]:
    """Return the rooms of each package, from the uppermost floor down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {contract["containers"][0]: contract["layers"] for contract in contracts if contract["type"] == "layers"}
    return {
        package: [room for layer in of for room in re.split(r" [|:] ", layer) if room != "__main__"]
        for package, of in layers.items()
    }


def lines_of(package: str) -> Iterator[tuple[Path, str]]:
    """Yield each file that holds code, with its first line; a docstring alone is no code, and tests name themselves."""
    rooms = floors().get(package, [])
    paths = {path.relative_to(ROOT) for end in ("py", "js") for path in (ROOT / package).rglob(f"*.{end}")}

    def place(path: Path) -> tuple[int, Path]:
        room = path.parts[1].removesuffix(".py")
        return (rooms.index(room) if room in rooms else -1, path)

    for path in sorted(paths, key=place):
        text = (ROOT / path).read_text()
        if {"tests", "vendor"} & set(path.parts):
            continue
        if path.suffix == ".js":
            yield path, text.partition("\n")[0].removeprefix("// ")
        elif path.name != "__init__.py" or len(ast.parse(text).body) > 1:
            yield path, (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
