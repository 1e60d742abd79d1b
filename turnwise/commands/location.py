"""Which database, engines and proxy a command means.

A flag comes first, then a setting of the proxy from file or environment, then the `turnwise up` that runs in this
directory, then `[up]` of the settings file, then the default.
"""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

import click

from turnwise.commands.running_stack import find_running_stack
from turnwise.settings import Settings, load_settings

RunningSettings = TypeVar("RunningSettings", bound=Settings)

database_option = click.option(
    "--database", metavar="URL", help="SQLAlchemy URL [default: that of the running `turnwise up`, or the proxy's]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def database_url(given: str | None) -> str:
    """Return the URL of the database that a command means.

    Args:
        given: The command's flag.
    """
    if given is not None:
        return given
    proxy = _load("proxy.settings:ProxySettings", "proxy")
    running = find_running_stack()
    if running is not None and "database" not in proxy.model_fields_set:
        return running.database
    if "database" not in proxy.model_fields_set:
        proxy = _load("turnwise.processes.stack:UpSettings", "up")
    url: str = proxy.database.get_secret_value()  # type: ignore[attr-defined]  # both declare it
    return url


def engine_urls(given: tuple[str, ...]) -> list[str]:
    """Return the URLs of the engines that a command means.

    Args:
        given: The command's flags.
    """
    if given:
        return list(given)
    proxy = _load("proxy.settings:ProxySettings", "proxy")
    running = find_running_stack()
    if running is not None and "engine" not in proxy.model_fields_set:
        return running.engines
    urls: list[str] = proxy.engine  # type: ignore[attr-defined]  # the proxy declares it
    return urls


def at_running_proxy(settings: RunningSettings) -> RunningSettings:
    """Return the settings with the address of the running `turnwise up`, unless they name a proxy themselves."""
    running = find_running_stack()
    if running is None or "proxy" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"proxy": running.proxy})


def _load(model: str, section: str) -> Settings:
    module, _, name = model.partition(":")
    settings_cls: type[Settings] = getattr(import_module(module), name)
    return load_settings(settings_cls, config=None, section=section, overrides={})
