"""The `turnwise` command: which subcommands there are, which package one lacks, and the exit status of an error.

A command loads what it needs when it runs, so the SDK alone has a command line too, and a missing package is reported
with the extra that installs it. An expected error is one sentence on stderr. The exit status is 2 for errors that last
until somebody changes settings, files or packages, and 1 for the rest.
"""

from __future__ import annotations

import errno
import importlib.util
import sys
from typing import Any

import click

from turnwise.commands.db import db
from turnwise.commands.export import export
from turnwise.commands.features import COMMANDS
from turnwise.commands.imports import imports
from turnwise.commands.init import init
from turnwise.commands.keys import keys
from turnwise.commands.one_process import proxy, train
from turnwise.commands.output import print_error
from turnwise.commands.policies import policies, updates
from turnwise.commands.recipe import recipe
from turnwise.commands.run import run
from turnwise.commands.sessions import forget, prune, sessions
from turnwise.commands.up import up
from turnwise.errors import BadCheckpoint, ClientError, SchemaMismatch, SettingsError, TurnwiseError
from turnwise.exchange import plugins
from turnwise.installed import extra_of, install_command, missing_from

_EXTRAS_OF_UP = ("store", "proxy", "trainer")
_PERMANENT = (ClientError, SettingsError, SchemaMismatch, BadCheckpoint)
"""Errors that come back until somebody changes something: exit status 2. `turnwise up` does not retry them."""
_OPERATORS_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR}
)
"""Errors of files that an operator repairs: a full disk, a read-only or wrong place."""


def _missing_extras(command: str | None, extra: str) -> list[str]:
    """Return the extras that a command lacks: all at once for `up`, which starts every process."""
    if command != "up":
        return [extra]
    has_engine = importlib.util.find_spec("vllm") is not None
    lacking = [each for each in _EXTRAS_OF_UP if each == extra or missing_from(each)]
    return lacking if has_engine else [*lacking, "engine-cpu"]


class _Commands(click.Group):
    """Turns expected errors into a sentence and an exit status, and finds the commands of installed packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *plugins.installed(plugins.COMMANDS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = super().get_command(ctx, cmd_name)
        group = plugins.COMMANDS
        if known is not None or cmd_name not in {*plugins.PACKAGE_OF[group], *plugins.installed(group)}:
            return known
        found: click.Command = plugins.load(group, cmd_name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        if not any(isinstance(each, plugins.OwnPackages) for each in sys.meta_path):
            sys.meta_path.insert(0, plugins.OwnPackages())
        try:
            return super().invoke(ctx)
        except TurnwiseError as error:
            print_error(str(error))
            ctx.exit(2 if isinstance(error, _PERMANENT) else 1)
        except OSError as error:
            if error.errno not in _OPERATORS_ERRORS:
                raise
            name = f" {str(error.filename)!r}" if error.filename is not None else ""
            print_error(f"cannot read or write{name}: {error.strerror}; free the disk, or name another place")
            ctx.exit(1)
        except ModuleNotFoundError as error:
            extra = extra_of((error.name or "").partition(".")[0])
            if extra is None:
                raise
            command = install_command(*_missing_extras(ctx.invoked_subcommand, extra))
            print_error(f"this command needs {error.name!r}, which is not installed: {command}")
            ctx.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="turnwise")
def main() -> None:
    """Serve a model through a proxy that captures every sampled token, and train it from rewards."""


for _command in (
    *(up, proxy, train, run, recipe),
    *(init, db, keys, sessions, prune, forget, policies, updates, export, imports),
):
    main.add_command(_command)
for _group, _command in COMMANDS:
    {None: main, "sessions": sessions, "policies": policies}[_group].add_command(_command)


if __name__ == "__main__":
    main()
