"""Where the data of a command is: a database, a proxy over HTTP, or the `turnwise up` of this directory.

A flag comes first, then a setting of the proxy from file or environment, then the `turnwise up` that runs in this
directory, then `[up]` of the settings file, then the default. A developer has the address and a key of the proxy, an
operator has the database: `--url`, or `TURNWISE_URL`, names the proxy, and `--database` on the command line goes before
the variable. A key reads its own tenant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from pydantic import SecretStr

from turnwise.client import Client
from turnwise.errors import SettingsError
from turnwise.files import is_locked
from turnwise.settings import Settings, load_settings, settings_model, shared_variables

if TYPE_CHECKING:
    from turnwise.store.database import Database

RunningSettings = TypeVar("RunningSettings", bound=Settings)

URL_VARIABLE, KEY_VARIABLE = "TURNWISE_URL", "TURNWISE_API_KEY"
database_option = click.option(
    "--database", metavar="URL", help="SQLAlchemy URL [default: that of the running `turnwise up`, or the proxy's]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
STATE_FILE = Path(".turnwise-up.json")
"""State of a running `turnwise up`, in its directory; readable to its owner alone, since it may hold a password. `up`
locks it, and the kernel releases the lock with the process, so a file that a killed process left is recognised."""


KEY_FILE = Path(".turnwise-key")
"""The admin key that `turnwise up` makes for the commands of its directory, readable to its owner alone; it stays."""


@dataclasses.dataclass(frozen=True)
class DataPlace:
    """The place of a command's data, as its options say."""

    url: str | None
    api_key: str | None
    database: str | None

    @property
    def database_url(self) -> str:
        return database_url(self.database)

    @contextlib.contextmanager
    def client(self) -> Iterator[Client | None]:
        """Yield a client of the proxy that the options name; None where they mean the database.

        Raises:
            SettingsError: `--url` and `--database` are both on the command line.
        """
        if self.url is None or self.database is not None:
            source = click.get_current_context().get_parameter_source("url")
            if self.url is not None and source is click.core.ParameterSource.COMMANDLINE:
                raise SettingsError("give --url or --database, not both")
            yield None
            return
        with Client(self.url, self.api_key or own_key(self.url)) as client:
            yield client

    def store(self, *, creates: bool = False) -> contextlib.AbstractContextManager[Database]:
        return opened(self.database_url, creates=creates)


def takes_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--url`, `--api-key` and `--database` to a command, which takes them as one `Place`."""

    @functools.wraps(command)
    def with_place(*arguments: Any, url: str | None, api_key: str | None, database: str | None, **options: Any) -> Any:
        return command(*arguments, place=DataPlace(url, api_key, database), **options)

    with_place = database_option(with_place)
    with_place = click.option(
        "--url", envvar=URL_VARIABLE, help=f"Use this proxy over HTTP [default: ${URL_VARIABLE}]."
    )(with_place)
    return click.option("--api-key", envvar=KEY_VARIABLE, help=f"Key for --url [default: ${KEY_VARIABLE}].")(with_place)


@contextlib.contextmanager
def opened(url: str, *, make_ready: bool = True, creates: bool = True) -> Iterator[Database]:
    """Open a database for one command, and bring the tables of an SQLite file up to date first.

    Raises:
        SettingsError: the SQLite file does not exist, and the command does not create it.
        SchemaMismatch: its tables are not those of this release.
        StoreUnavailable: it cannot be reached.
    """
    import turnwise.features  # noqa: F401  the store calls them from here on
    from turnwise.store.database import Database, missing_file

    missing = None if creates else missing_file(url)
    if missing is not None:
        raise SettingsError(
            f"there is no database at {str(missing)!r}: run this where `turnwise up` runs, or name one with --database"
        )
    database = Database(url)
    try:
        if make_ready:
            database.prepare()
        yield database
    finally:
        database.close()


def database_url(given: str | None) -> str:
    if given is not None:
        return given
    proxy = load_section("proxy")
    running = find_running_stack()
    if running is not None and "database" not in proxy.model_fields_set:
        return running.database
    if "database" not in proxy.model_fields_set:
        proxy = load_section("up")
    url: str = proxy.database.get_secret_value()  # type: ignore[attr-defined]  # both declare it
    return url


def engine_client_options() -> dict[str, Any]:
    """Return the options with which an `httpx2.Client` calls engines as the proxy does.

    Raises:
        SettingsError: a TLS file of the proxy's settings cannot be used.
    """
    options: dict[str, Any] = load_section("proxy").engine_client_options()  # type: ignore[attr-defined]  # the proxy declares it
    return options


def at_running_proxy(settings: RunningSettings) -> RunningSettings:
    """Return the settings with address and key of the proxy that the command means.

    What the settings name themselves comes first, then `TURNWISE_URL` and `TURNWISE_API_KEY`, then the running
    `turnwise up`, whose key goes to its own proxy alone.
    """
    found: dict[str, Any] = dict(shared_variables({"url": URL_VARIABLE, "api_key": KEY_VARIABLE}))
    if "api_key" in found:
        found["api_key"] = SecretStr(found["api_key"])
    running = find_running_stack()
    if running is not None:
        found.setdefault("url", running.proxy)
    chosen = settings.model_copy(
        update={name: value for name, value in found.items() if name not in settings.model_fields_set}
    )
    key = own_key(str(vars(chosen)["url"])) if vars(chosen)["api_key"] is None else None
    return chosen if key is None else chosen.model_copy(update={"api_key": SecretStr(key)})


def own_key(url: str) -> str | None:
    """Return the key of the `turnwise up` that runs in this directory, for its own proxy; None for every other one."""
    running = find_running_stack()
    if running is None or url.rstrip("/").removesuffix("/v1").rstrip("/") != running.proxy:
        return None
    return stored_key()


def stored_key() -> str | None:
    """Return the key in the file of this directory; None without one."""
    try:
        return KEY_FILE.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the key in {str(KEY_FILE)!r} cannot be read: {error}; delete the file") from error


def load_section(section: str) -> Settings:
    return load_settings(settings_model(section), config=None, section=section, overrides={})


def refuse_tenant(tenant: str | None) -> None:
    """Refuse the option `--tenant` over HTTP."""
    if tenant is not None:
        raise SettingsError("--tenant needs the database: over HTTP a key reads its own tenant")


@dataclasses.dataclass(frozen=True)
class RunningStack:
    """Where the parts of a running `turnwise up` are."""

    pid: int
    database: str
    proxy: str
    engines: list[str]


def find_running_stack() -> RunningStack | None:
    """Return the `turnwise up` that runs in this directory; None where there is none."""
    try:
        if not is_locked(STATE_FILE):
            return None
        return RunningStack(**json.loads(STATE_FILE.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None  # no file, or one that is being written
