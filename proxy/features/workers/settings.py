"""The settings of a proxy of several serving processes, and how its limits are divided among them."""

from __future__ import annotations

import math
from typing import ClassVar, Self

from pydantic import Field

from proxy.settings import ProxySettings


class WorkerSettings(ProxySettings):
    """How many processes serve, and which connections each gets."""

    DIVIDED: ClassVar[tuple[str, ...]] = ("max_concurrent_calls", "cache_bytes")
    """Settings of the whole proxy that each worker gets a share of; another feature's are a tuple of its own, or of
    `DIVIDED_ON_SQLITE` if workers share them through PostgreSQL."""

    workers: int = Field(default=1, ge=1, le=256)
    """Serving processes behind the port, each with a process that writes and one that reads versions' files.
    `max_concurrent_calls` and the bytes kept in memory are divided by it, and on SQLite limits of keys and tenants."""
    session_affinity: bool = True
    """With several workers, hand a connection to the worker of the session that its next request names, so that one
    worker has the conversation in memory. Off, and over HTTPS, connections stay where the kernel puts them."""

    def divided(self) -> Self:
        """Return the settings of one worker: its share of what is a limit of the whole proxy, rounded up."""
        is_on_sqlite = self.database.get_secret_value().startswith("sqlite")
        tuples = ("DIVIDED", "DIVIDED_ON_SQLITE") if is_on_sqlite else ("DIVIDED",)
        names = {name for each in type(self).__mro__ for of in tuples for name in vars(each).get(of, ())}
        limits = {name: value for name in names if (value := getattr(self, name)) is not None}
        return self.model_copy(update={name: math.ceil(value / self.workers) for name, value in limits.items()})
