"""The options that choose sessions, the same for every command that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from turnwise.store.selection import SessionFilter

NAMES = ("tenant", "task_id", "group_id", "session_id", "split", "status", "user_id", "label", "policy", "metadata")
"""The options, by the name of the filter."""


def filter_options(command: Any) -> Any:
    """Add the options that filter sessions."""
    for option in (
        click.option("--tenant", help="Only this tenant's."),
        click.option("--task-id", help="Only of this task."),
        click.option("--group-id", help="Only of this group."),
        click.option("--session-id", help="Only this session."),
        click.option("--split", type=click.Choice(["train", "eval"])),
        click.option("--status", type=click.Choice(["open", "ended", "expired"])),
        click.option("--user-id", help="Only of this end user."),
        click.option("--metadata", metavar="KEY=VALUE", help="Only with this pair in the metadata."),
        click.option("--label", help="Only with this label."),
        click.option("--policy", help="Only of the policy of this name."),
    ):
        command = option(command)
    return command


def filter_of(given: dict[str, Any]) -> SessionFilter:
    """Return the filter of a command's options, and remove them from `given`."""
    from turnwise.store.selection import SessionFilter
    from turnwise.types import SessionStatus, Split

    kinds: dict[str, Callable[[str], Any]] = {"split": Split, "status": SessionStatus}
    chosen = {name: given.pop(name) for name in NAMES}
    found: dict[str, Any] = {name: kinds.get(name, str)(value) for name, value in chosen.items() if value is not None}
    return SessionFilter(**found)
