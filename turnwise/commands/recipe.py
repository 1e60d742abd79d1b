"""`turnwise recipe`: let a model learn a known task, with the settings that it is known to learn with.

The recipes and the program that runs them are in `examples/` of a checkout, not in the installed package.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.errors import SettingsError
from turnwise.settings import Settings

EXAMPLES = Path(__file__).parents[2] / "examples"


def recipes() -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(EXAMPLES.glob("recipes/*/recipe.py"))}


def find_recipe(name: str) -> Path:
    """Return the directory of a recipe."""
    known = recipes()
    if name not in known:
        names = ", ".join(known) or "none; recipes are in a checkout of Turnwise, not in the package"
        raise SettingsError(f"there is no recipe {name!r}; the recipes are: {names}")
    return known[name]


class RecipeCommand(SettingsCommand):
    """Takes the settings file of a recipe by the recipe's name."""

    def _flags(self) -> list[click.Parameter]:
        hidden = {"agent", "trainer_config", "options", "config"}
        small = "Run the twin for a CPU, on SmolLM2-135M-Instruct."
        return [
            click.Argument(["name"], required=False),
            click.Option(["--small"], is_flag=True, help=small),
            *[flag for flag in super()._flags() if flag.name not in hidden],
        ]

    def _invoke(self, **values: Any) -> None:
        from turnwise.processes.engine_command import has_gpu

        name, small = values.pop("name"), values.pop("small")
        if name is None:
            for each, directory in recipes().items():
                click.echo(f"{each:16s} {(directory / 'README.md').read_text(encoding='utf-8').splitlines()[2]}")
            return
        file = find_recipe(name) / ("small.toml" if small else "recipe.toml")
        if not (small or values["dry_run"] or has_gpu()):
            raise SettingsError(f"the recipe {name!r} needs a GPU; add --small for its twin on a CPU")
        values["out"] = values["out"] or f"runs/{name}{'-small' if small else ''}"
        given = {"config": file, "trainer_config": str(file), "agent": str(file.with_name("recipe.py"))}
        super()._invoke(options=None, **given, **values)


def _settings() -> type[Settings]:
    """Return the settings of a recipe; outside a checkout, where nothing can be run, those that all commands have."""
    if not recipes():
        return Settings
    settings: type[Settings] = importlib.import_module("examples.demos.recipe").RecipeSettings
    return settings


def _run(settings: Settings) -> None:
    sys.exit(importlib.import_module("examples.demos.recipe").run(settings))


recipe = RecipeCommand(
    "recipe",
    section="demo",
    settings=_settings,
    run=_run,
    help="Let a model learn a known task; without a name, list the recipes.",
)
