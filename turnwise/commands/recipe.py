"""`turnwise recipe`: let a model learn a known task, with the settings that it is known to learn with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.flags import SettingsCommand
from turnwise.errors import SettingsError
from turnwise.settings import Settings

if TYPE_CHECKING:
    from turnwise.demo.recipe import RecipeSettings


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
        from turnwise.demo.recipe import find_recipe, recipes
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
    from turnwise.demo.recipe import RecipeSettings

    return RecipeSettings


def _run(settings: RecipeSettings) -> None:
    """Run the recipe with output on the terminal."""
    import sys

    from turnwise.demo.driver import main, terminal
    from turnwise.demo.recipe import RecipeDemo

    say = terminal()
    sys.exit(main(RecipeDemo(settings, say), settings, say))


recipe = RecipeCommand(
    "recipe",
    section="demo",
    settings=_settings,
    run=_run,
    help="Let a model learn a known task; without a name, list the recipes.",
)
