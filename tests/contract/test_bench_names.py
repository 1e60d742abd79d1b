"""Benches, examples and extras use names, arguments and flags that exist: no test runs all of them.

mypy cannot read the benches together: two have the same name, and one is named as a package is.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from support.documented_commands import ROOT

from turnwise.commands.cli import main
from turnwise.settings import MODELS, Settings, settings_model

PACKAGES = {"proxy", "trainer", "turnwise"}
SCRIPTS = sorted(
    path
    for place in ("bench", "examples", "extras")
    for path in (ROOT / place).rglob("*.py")
    if "tests" not in path.parts
)
FLAG = re.compile(r"--([a-z][a-z0-9-]+)(?:=.*)?")
OTHERS = {"map-current-user", "net", "cache-dir", "constraint", "deps", "dest", "upgrade", "quiet", "error-summary"}
"""Flags of other programs."""


def parsed(path: Path) -> list[Any]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def missing(path: Path) -> Iterator[str]:
    """Yield what a script imports, reads of a module or gives to a function although it does not exist."""
    nodes, known = parsed(path), {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                try:
                    known[alias.asname or alias.name] = imported(path, node.module, alias.name)
                except ImportError:
                    yield f"{node.lineno}: {node.module} has no {alias.name}"
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known = {name: found for name, found in known.items() if name not in bound}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if isinstance(known.get(name), ModuleType):
                if not hasattr(known[name], attribute):
                    yield f"{node.lineno}: {name} has no {attribute}"
            case ast.Call(func=ast.Name(id=name)):
                yield from not_taken(node, known.get(name))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
                yield from not_taken(node, getattr(known.get(name), attribute, None))


def imported(path: Path, module: str, name: str) -> Any:
    """Return what a script imports from our packages; None from the script beside it, and from other packages.

    Raises:
        ImportError: it does not exist.
    """
    if (sibling := path.with_name(f"{module}.py")).exists():
        bound = rf"^(?:(?:async )?def |class )?{name}\b|^(?:from|import) .*\b{name}\b"
        if not re.search(bound, sibling.read_text(encoding="utf-8"), flags=re.MULTILINE):
            raise ImportError(name)
    elif module.partition(".")[0] in PACKAGES:
        found = importlib.import_module(module)
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
    return None


def not_taken(call: ast.Call, called: Any) -> Iterator[str]:
    """Yield the named arguments of a call that the function does not take."""
    if isinstance(called, type) and issubclass(called, Settings):
        taken = set(called.model_fields)
    elif inspect.isfunction(called) or (inspect.isclass(called) and not issubclass(called, Exception)):
        parameters = inspect.signature(called).parameters
        taken = set(parameters)
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return
    else:
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in taken:
            yield f"{call.lineno}: {ast.unparse(call.func)} takes no {keyword.arg}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_uses_what_exists(path):
    assert list(missing(path)) == []


def test_every_flag_in_a_script_is_one_of_a_command_or_of_a_script():
    """A bench that starts a proxy with a setting that is gone would end at once."""
    known = OTHERS | {name.replace("_", "-") for section in MODELS for name in settings_model(section).model_fields}
    commands: list[click.Command] = [main]
    while commands:
        command = commands.pop()
        commands += command.commands.values() if isinstance(command, click.Group) else []
        known |= {flag.removeprefix("--") for each in command.get_params(click.Context(command)) for flag in each.opts}
    used = {}
    for path in SCRIPTS:
        for node in parsed(path):
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument" | "option"), args=args):
                    known |= {flag.value.removeprefix("--") for flag in args if isinstance(flag, ast.Constant)}
                case ast.Constant(value=str(text)) if found := FLAG.fullmatch(text):
                    used[found[1].removeprefix("no-")] = f"{path.relative_to(ROOT)}:{node.lineno}"
    assert {flag: place for flag, place in used.items() if flag not in known} == {}
