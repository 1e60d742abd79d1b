"""A PostgreSQL connection that gives up on a silent server.

`statement_timeout` is enforced by the server, and TCP's timers by its kernel: neither helps against a server process
that is stopped. This connection closes itself when one statement has had no answer for `answer_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

RV = TypeVar("RV")


class DeadlineConnection(psycopg.Connection[Any]):
    """A psycopg connection with a deadline for each answer."""

    answer_seconds: float | None = None
    """Longest wait for the server's answer; None for no limit."""

    def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        """Wait for the server, as psycopg does, but not beyond the deadline.

        Raises:
            psycopg.OperationalError: the server did not answer in time; the connection is closed.
        """
        if self.answer_seconds is not None:
            gen = self._until(gen, time.monotonic() + self.answer_seconds)
        return super().wait(gen, *args, **kwargs)

    def _until(self, gen: Generator[Any, Any, RV], deadline: float) -> Generator[Any, Any, RV]:
        """Pass a generator through; psycopg resumes it at short intervals also when nothing has arrived."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server has not answered for {self.answer_seconds:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            result: RV = done.value
            return result
