"""Count the files that a feature is in besides its own: `python bench/removal.py images consent prices`.

In a copy of the packages the feature's own files are deleted, `*/features/NAME` and those that `OWN` names, with their
lines in the tuples. Files that mypy then finds at fault are printed: together with the tuples they are what a removal
must edit. Text and comments that speak of the feature are not counted.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("proxy", "trainer", "turnwise")
OWN = {"images": ("turnwise/engine_plugin/features/images.py",)}
"""Files of a feature that stand where another program loads them, by the feature."""


def own_files(tree: Path, feature: str) -> list[Path]:
    folders = [*(tree / package / "features" for package in PACKAGES), tree / "turnwise/commands/features"]
    found = [path for folder in folders for path in (folder / f"{feature}.py", folder / feature)]
    return [path for path in [*found, *(tree / name for name in OWN.get(feature, ()))] if path.exists()]


def module_of(tree: Path, path: Path) -> str:
    return ".".join(path.relative_to(tree).with_suffix("").parts)


def without(text: str, gone: set[str]) -> str:
    """Return the text of a tuple's file without the imports from modules that are gone, and the names they gave."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            if any(f"{each}.".startswith(f"{one}.") for one in gone for each in (node.module, module)):
                names.add(alias.asname or alias.name)
    for name in names:
        text = re.sub(rf"^\s*from [\w.]+ import {name}( as \w+)?( *#.*)?\n", "", text, flags=re.MULTILINE)
        text = re.sub(rf"\b{name}(\.\w+)?(\(\))?,\s*", "", text)
        text = re.sub(rf",\s*{name}\b", "", text)
        text = re.sub(rf"^\s*from [\w.]+ import {name}\n", "", text, flags=re.MULTILINE)
    for module in gone:
        text = re.sub(rf'^\s*"{re.escape(module)}(\.\w+)*",.*\n', "", text, flags=re.MULTILINE)
    return text


def remove(tree: Path, feature: str) -> list[str]:
    """Remove a feature from a tree; return the tuples' files that changed."""
    own = own_files(tree, feature)
    if not own:
        raise SystemExit(f"there is no feature {feature!r}: no */features/{feature}.py")
    gone = {module_of(tree, path) for path in own}
    for path in own:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    changed = []
    for path in [*tree.glob("*/features/__init__.py"), tree / "turnwise/commands/features/__init__.py"]:
        text = path.read_text(encoding="utf-8")
        if (left := without(text, gone)) != text:
            path.write_text(left, encoding="utf-8")
            changed.append(str(path.relative_to(tree)))
    return changed


def at_fault(tree: Path) -> dict[str, str]:
    """Return the first error that mypy finds in each file."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *(f"-p{package}" for package in PACKAGES), "--no-error-summary"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        path, _, said = line.partition(": error: ")
        if said:
            found.setdefault(path.partition(":")[0], said)
    if done.returncode and not found:
        raise SystemExit(f"mypy did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def main() -> None:
    for feature in sys.argv[1:] or ["images", "consent", "prices"]:
        with tempfile.TemporaryDirectory(prefix="removal-") as directory:
            tree = Path(directory)
            ignored = shutil.ignore_patterns("__pycache__", "*.js", "*.css")
            for package in PACKAGES:
                shutil.copytree(ROOT / package, tree / package, ignore=ignored)
            shutil.copytree(ROOT / "extras/fake_engine", tree / "extras/fake_engine", ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", tree)
            num_own = len(own_files(tree, feature))
            tuples = remove(tree, feature)
            faults = at_fault(tree)
            edited = sorted({*tuples, *faults})
            print(f"{feature}: {num_own} own files or folders; {len(edited)} others to edit, {len(tuples)} for a tuple")
            for path in edited:
                print(f"  {path}: {faults.get(path, 'its lines in the tuple')}")


if __name__ == "__main__":
    main()
