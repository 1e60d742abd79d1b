"""Which database, engines and proxy a command means.

A flag comes first, then a setting of the proxy from file or environment, then the `turnwise up` that runs in this
directory, then `[up]` of the settings file, then the default.
"""

from __future__ import annotations

from typing import Any, TypeVar

import click
from pydantic import SecretStr

from turnwise.commands.running_stack import find_running_stack
from turnwise.commands.settings_models import settings_model
from turnwise.settings import Settings, load_settings, shared_variables

RunningSettings = TypeVar("RunningSettings", bound=Settings)

URL_VARIABLE, KEY_VARIABLE = "TURNWISE_URL", "TURNWISE_API_KEY"
"""Address and key of the proxy, for every command that calls it."""
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
    proxy = _load("proxy")
    running = find_running_stack()
    if running is not None and "database" not in proxy.model_fields_set:
        return running.database
    if "database" not in proxy.model_fields_set:
        proxy = _load("up")
    url: str = proxy.database.get_secret_value()  # type: ignore[attr-defined]  # both declare it
    return url


def engine_urls(given: tuple[str, ...]) -> list[str]:
    """Return the URLs of the engines that a command means.

    Args:
        given: The command's flags.
    """
    if given:
        return list(given)
    proxy = _load("proxy")
    running = find_running_stack()
    if running is not None and "engine" not in proxy.model_fields_set:
        return running.engines
    urls: list[str] = proxy.engine  # type: ignore[attr-defined]  # the proxy declares it
    return urls


def engine_client_options() -> dict[str, Any]:
    """Return the options with which an `httpx2.Client` calls engines as the proxy does.

    Raises:
        SettingsError: a TLS file of the proxy's settings cannot be used.
    """
    options: dict[str, Any] = _load("proxy").engine_client_options()  # type: ignore[attr-defined]  # the proxy declares it
    return options


def at_running_proxy(settings: RunningSettings) -> RunningSettings:
    """Return the settings with address and key of the proxy that the command means.

    What the settings name themselves comes first, then `TURNWISE_URL` and `TURNWISE_API_KEY`, then the running
    `turnwise up`.
    """
    found: dict[str, Any] = dict(shared_variables({"url": URL_VARIABLE, "api_key": KEY_VARIABLE}))
    if "api_key" in found:
        found["api_key"] = SecretStr(found["api_key"])
    running = find_running_stack()
    if running is not None:
        found.setdefault("url", running.proxy)
    return settings.model_copy(
        update={name: value for name, value in found.items() if name not in settings.model_fields_set}
    )


def _load(section: str) -> Settings:
    return load_settings(settings_model(section), config=None, section=section, overrides={})
