"""What is public, as lines of names; `python docs/public_names.py` writes those of this release to docs/public.txt.

A line that ends with `required` names an argument that a caller must give. Once a release is out, its file is written
again only by the next release; tests/unit/test_public.py compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from proxy import features
from proxy.app import create_app
from proxy.routes.openapi import describe
from turnwise import errors
from turnwise.client import AsyncClient, AsyncSessionHandle, Client, SessionHandle, wire
from turnwise.commands.cli import main
from turnwise.commands.export import CORE_FORMATS
from turnwise.commands.flags import SettingsCommand
from turnwise.exchange import parquet, plugins
from turnwise.settings import MODELS, settings_model

RECORDED = Path(__file__).with_name("public.txt")
DEPTH = 4
"""How deep fields of requests and answers are named."""


def names() -> list[str]:
    return sorted({*_routes(), *_client(), *_settings(), *_commands(main, "turnwise"), *_exchange()})


def _routes() -> Iterator[str]:
    document = describe(create_app(routes=features.ROUTES, dialects=features.DIALECTS))
    for path, methods in document["paths"].items():
        for method, action in methods.items():
            route = f"{method.upper()} {path}"
            yield route
            for each in action.get("parameters", ()):
                yield f"{route} {each['in']} {each['name']}{_required(is_so=each.get('required', False))}"
            for schema in _schemas(action.get("requestBody", {})):
                yield from _fields(document, schema, f"{route} takes ", is_given=True)
            for schema in _schemas(action["responses"].get("200", {})):
                yield from _fields(document, schema, f"{route} answers ")


def _schemas(content: Any) -> Iterator[Any]:
    return (each["schema"] for each in content.get("content", {}).values() if "schema" in each)


def _fields(document: Any, schema: Any, prefix: str, depth: int = DEPTH, *, is_given: bool = False) -> Iterator[str]:
    """Yield the fields of a schema below a prefix, with those of the objects in them."""
    if depth == 0:
        return
    if (reference := schema.get("$ref")) is not None:
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    for name, field in schema.get("properties", {}).items():
        yield f"{prefix}{name}{_required(is_so=is_given and name in schema.get('required', ()))}"
        yield from _fields(document, field, f"{prefix}{name}.", depth - 1, is_given=is_given)
    for part in (schema.get("items"), *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if part:
            yield from _fields(document, part, prefix, depth, is_given=is_given)


def _required(*, is_so: bool) -> str:
    return " required" if is_so else ""


def _client() -> Iterator[str]:
    for owner in (Client, AsyncClient, SessionHandle, AsyncSessionHandle):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name.startswith("_") and (name != "__init__" or owner in (SessionHandle, AsyncSessionHandle)):
                continue
            yield f"{owner.__name__}.{name}"
            for each in list(inspect.signature(method).parameters.values())[1:]:
                is_needed = each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
                yield f"{owner.__name__}.{name} argument {each.name}{_required(is_so=is_needed)}"
    for fields in (wire.SessionFields, wire.RewardFields):
        yield from (f"{fields.__name__} {name}" for name in fields.__annotations__)
    yield from (f"turnwise.errors.{name}" for name, _ in inspect.getmembers(errors, inspect.isclass))


def _settings() -> Iterator[str]:
    yield from (f"[{section}] {name}" for section in MODELS for name in settings_model(section).model_fields)


def _commands(command: click.Command, path: str) -> Iterator[str]:
    """Yield a command with its own options, and those below it; flags of settings are the settings."""
    yield path
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _commands(below, f"{path} {name}")
    is_run = not isinstance(command, click.Group) or command.invoke_without_command
    if is_run and not isinstance(command, SettingsCommand):
        for each in command.params:
            yield f"{path} {max(each.opts, key=len)}{_required(is_so=each.required)}"


def _exchange() -> Iterator[str]:
    yield from (f"turnwise export --format {name}" for name in CORE_FORMATS)
    yield from (f"column {name} of --format parquet" for name in parquet._columns())  # noqa: SLF001  pyarrow's types
    yield from (f"entry points {group}" for group in (plugins.EXPORTS, plugins.IMPORTS, plugins.COMMANDS))


if __name__ == "__main__":
    RECORDED.write_text("\n".join(names()) + "\n", encoding="utf-8")
    print(f"wrote {RECORDED}")  # noqa: T201  a command prints
