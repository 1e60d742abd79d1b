"""The proxy that agents are played through: a process that can be killed and started again on its port."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from support.proxies import RunningProxy, running_proxy


class ProxyProcess:
    """A proxy over one database; another process takes its place after `kill -9`; `ignored_ids` is its setting."""

    def __init__(self, engine_url: str, directory: Path, ignored_ids: Sequence[str] = ()) -> None:
        self._engine_url = engine_url
        self._environment = {"TURNWISE_PROXY_IGNORED_IDS": json.dumps(list(ignored_ids))}
        self._directory = directory
        self._database = f"sqlite:///{directory}/turnwise.db"
        self._open = contextlib.ExitStack()
        self._running: RunningProxy = self._start(None)

    @property
    def url(self) -> str:
        """Its base URL, without `/v1`; the same after a restart."""
        return self._running.url

    def kill_and_restart(self) -> None:
        self._running.kill()
        self._open.close()
        self._running = self._start(int(self.url.rpartition(":")[2]))

    def close(self) -> None:
        self._open.close()

    def _start(self, port: int | None) -> RunningProxy:
        return self._open.enter_context(
            running_proxy(self._engine_url, self._database, self._directory, port=port, environment=self._environment)
        )
