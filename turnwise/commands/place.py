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
from turnwise.client.conversations import with_images
from turnwise.errors import SettingsError
from turnwise.files import is_locked, lock, write_whole
from turnwise.settings import Settings, load_settings, settings_model, shared_variables
from turnwise.types import Json

if TYPE_CHECKING:
    from turnwise.store.database import Database
    from turnwise.store.selection import SessionFilter

RunningSettings = TypeVar("RunningSettings", bound=Settings)

URL_VARIABLE, KEY_VARIABLE = "TURNWISE_URL", "TURNWISE_API_KEY"
database_option = click.option(
    "--database", metavar="URL", help="SQLAlchemy URL [default: that of the running `turnwise up`, or the proxy's]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
FILTERS = ("tenant", "task_id", "group_id", "session_id", "split", "status", "user_id", "label", "policy", "metadata")
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
    proxy = _load("proxy")
    running = find_running_stack()
    if running is not None and "database" not in proxy.model_fields_set:
        return running.database
    if "database" not in proxy.model_fields_set:
        proxy = _load("up")
    url: str = proxy.database.get_secret_value()  # type: ignore[attr-defined]  # both declare it
    return url


def engine_urls(given: tuple[str, ...]) -> list[str]:
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


def make_key(database: str) -> str:
    """Return the key of this directory for a database's proxy, and store it in both where one has it not."""
    from turnwise.store import keys

    given = stored_key()
    with opened(database) as store, store.write() as conn:
        key = keys.local_key(conn, given)
    if key != given:
        write_whole(KEY_FILE, f"{key}\n")
    KEY_FILE.chmod(0o600)
    return key


def _load(section: str) -> Settings:
    return load_settings(settings_model(section), config=None, section=section, overrides={})


def filter_options(command: Any) -> Any:
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
    chosen = {name: given.pop(name) for name in FILTERS}
    found: dict[str, Any] = {name: kinds.get(name, str)(value) for name, value in chosen.items() if value is not None}
    return SessionFilter(**found)


def api_filters(chosen: dict[str, Any]) -> Json:
    """Return the filters of the API for a command's options, and remove them from `chosen`."""
    found = {name: chosen.pop(name) for name in FILTERS}
    refuse_tenant(found.pop("tenant"))
    return {name: value for name, value in found.items() if value is not None}


def refuse_tenant(tenant: str | None) -> None:
    """Refuse the option `--tenant` over HTTP."""
    if tenant is not None:
        raise SettingsError("--tenant needs the database: over HTTP a key reads its own tenant")


def sessions_of(client: Client, filters: Json) -> Iterator[Json]:
    session_id = filters.get("session_id")
    if session_id is None:
        yield from client.sessions(**filters)
        return
    session = client.session(session_id)
    if all(session.get(name) == value for name, value in filters.items() if name not in ("label", "metadata")):
        yield session


def session_document(client: Client, session: Json) -> Json:
    turns = [turn | client.turn(turn["turn_id"], prompt="whole") for turn in client.turns(session["session_id"])]
    whole = client.session(session["session_id"])["rewards"]
    given = {line["reward_id"]: line for line in (*whole, *(line for turn in turns for line in turn["rewards"]))}
    # The latest line of each target and name is in force; the lines of a step are with each of its turns.
    latest = {(line["turn_id"], line["step"], line["name"]): line for _, line in sorted(given.items())}
    lines = sorted(latest.values(), key=lambda line: int(line["reward_id"]))
    return with_images({**session, "turns": turns, "rewards": lines}, client.image)


@dataclasses.dataclass(frozen=True)
class RunningStack:
    """Where the parts of a running `turnwise up` are."""

    pid: int
    database: str
    proxy: str
    engines: list[str]


@contextlib.contextmanager
def announced(stack: RunningStack) -> Iterator[None]:
    """Keep the state file while the block runs.

    Raises:
        SettingsError: another `turnwise up` runs in this directory.
    """
    STATE_FILE.touch(mode=0o600)
    try:
        locked = lock(STATE_FILE)
    except BlockingIOError as error:
        raise SettingsError(_already_runs()) from error
    with locked as file:
        file.truncate(0)
        json.dump(dataclasses.asdict(stack), file)
        file.flush()
        try:
            yield
        finally:
            STATE_FILE.unlink(missing_ok=True)


def check_none_runs() -> None:
    """Refuse a second `turnwise up` in one directory."""
    if find_running_stack() is not None:
        raise SettingsError(_already_runs())


def find_running_stack() -> RunningStack | None:
    """Return the `turnwise up` that runs in this directory; None where there is none."""
    try:
        if not is_locked(STATE_FILE):
            return None
        return RunningStack(**json.loads(STATE_FILE.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None  # no file, or one that is being written


def _already_runs() -> str:
    return (
        "`turnwise up` runs in this directory already; stop it first, or start this one in another directory: "
        "both would use one database and one trainer"
    )
