"""What vLLM's Python files say of a name, read from a release's wheel: no import, no torch, no GPU.

`python -m support.vllm_sources` writes the recorded table again, after somebody has read what changed.
"""

import ast
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from turnwise.engine_plugin import upstream

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "turnwise-vllm-wheels"
TABLE = ROOT / "tests" / "support" / "vllm_names.json"
RELEASES = tuple(f"0.{minor}.0" for minor in range(upstream.OLDEST[1], upstream.BELOW[1]))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def wheel_of(release: str) -> zipfile.ZipFile:
    """Return a release's wheel, which pip downloads once into a directory outside of the repository."""
    known = list(CACHE.glob(f"vllm-{release}-*.whl"))
    if not known:
        flags = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(CACHE)]
        subprocess.run([sys.executable, "-m", "pip", "download", *flags, f"vllm=={release}"], check=True)
        known = list(CACHE.glob(f"vllm-{release}-*.whl"))
    return zipfile.ZipFile(known[0])


class Sources:
    """The modules of one release."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self._wheel, self._files = wheel, frozenset(wheel.namelist())
        self._trees: dict[str, ast.Module | None] = {}

    def row(self, name: str) -> list[str] | None:
        """Return signature, or annotation, and digest of what `module:name` or `POST /path` names; None if nothing."""
        found = self._route(name) if " " in name else self._find(*name.split(":"))
        return None if found is None else [_signature(found), _digest(found)]

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            base = module.replace(".", "/")
            file = next((each for each in (f"{base}.py", f"{base}/__init__.py") if each in self._files), None)
            self._trees[module] = None if file is None else ast.parse(self._wheel.read(file))
        return self._trees[module]

    def _find(self, module: str, path: str) -> Definition | None:
        tree = self._tree(module)
        first, *others = path.split(".")
        if tree is None:
            return None
        found = dict(_defined(tree.body)).get(first)
        if found is None:
            source = self._import_of(module, tree, first)
            return None if source is None else self._find(source[0], ".".join([source[1], *others]))
        for name in others:
            if not isinstance(found, ast.ClassDef):
                return None
            inner = dict(_defined(found.body)).get(name)
            found = inner if inner is not None else self._inherited(module, found, name)
        return found

    def _inherited(self, module: str, of: ast.ClassDef, name: str) -> Definition | None:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in of.bases]
        named = [self._find(module, f"{base.id}.{name}") for base in bases if isinstance(base, ast.Name)]
        return next((each for each in named if each is not None), None)

    def _import_of(self, module: str, tree: ast.Module, name: str) -> tuple[str, str] | None:
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._files
        for each in ast.walk(tree):
            for alias in each.names if isinstance(each, ast.ImportFrom) else ():
                if (alias.asname or alias.name) == name and each.module is not None:
                    parts = module.split(".")[: None if is_package else -1]
                    place = parts[: len(parts) - each.level + 1] if each.level else []
                    return ".".join([*place, each.module]), alias.name
        return None

    def _route(self, name: str) -> Definition | None:
        method, path = name.split(" ")
        for file in sorted(self._files):
            if not (file.startswith("vllm/entrypoints/") and file.endswith(".py")):
                continue
            text = self._wheel.read(file)
            if f'"{path}"'.encode() not in text:
                continue
            for each in ast.walk(ast.parse(text)):
                for decorator in getattr(each, "decorator_list", ()):
                    if _decorates(decorator, method.lower(), path):
                        return each
        return None


def _decorates(decorator: ast.expr, method: str, path: str) -> bool:
    if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.args):
        return False
    is_router = isinstance(decorator.func.value, ast.Name) and decorator.func.value.id == "router"
    return is_router and decorator.func.attr == method and getattr(decorator.args[0], "value", None) == path


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    for each in body:
        match each:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield each.name, each
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, each
            case ast.If() | ast.Try():
                yield from _defined([*each.body, *each.orelse])


def _signature(found: Definition) -> str:
    match found:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return f"{'async ' if isinstance(found, ast.AsyncFunctionDef) else ''}({ast.unparse(found.args)})"
        case ast.ClassDef():
            return f"class({', '.join(map(ast.unparse, found.bases))})"
        case ast.AnnAssign():
            return ast.unparse(found.annotation)
    return ast.unparse(found)


def _digest(found: Definition) -> str:
    """Return a digest of the code without its docstrings and comments."""
    for each in ast.walk(found):
        is_documented = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_documented and len(each.body) > 1 and ast.get_docstring(each) is not None:
            del each.body[0]
    return hashlib.blake2b(ast.unparse(found).encode(), digest_size=5).hexdigest()


def recorded() -> dict[str, list[list[str] | None]]:
    """Return the row of each name, a list of one for each release, or of the one that is the same in all of them."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def rows(names: list[str]) -> dict[str, list[list[str] | None]]:
    """Return the same as `recorded` from the releases themselves."""
    sources = [Sources(wheel_of(release)) for release in RELEASES]
    found = {name: [each.row(name) for each in sources] for name in sorted(names)}
    return {name: each[:1] if all(one == each[0] for one in each) else each for name, each in found.items()}


def write() -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows(list(recorded())).items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
