"""`turnwise proxy`: the API for agents, sessions, rewards and policies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from turnwise.commands.flags import SettingsCommand

if TYPE_CHECKING:
    from proxy.settings import ProxySettings


def _run(settings: ProxySettings) -> None:
    """Run the proxy until it is told to stop."""
    from turnwise.commands.preflight import check_keys
    from turnwise.commands.store import prepare
    from turnwise.processes.ports import check_port_is_free

    if settings.workers > 1:
        from proxy.workers.parent import run
    else:
        from proxy.main import run
    check_port_is_free("the proxy", settings.host, settings.port)
    database = settings.database.get_secret_value()
    prepare(database)
    check_keys(database, settings.host)
    sys.exit(run(settings))


proxy = SettingsCommand(
    "proxy",
    section="proxy",
    run=_run,
    help="Run the proxy: the API for agents, sessions, rewards and policies.",
)
