"""A PostgreSQL connection with a client-side timeout.

The server enforces `statement_timeout`, and its kernel enforces TCP's timers; neither works if the server process is
stopped. This connection closes itself when a statement gets no answer within `answer_seconds`, and when it could not be
opened in time.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Self, TypeVar

import psycopg

RV = TypeVar("RV")


class DeadlineConnection(psycopg.Connection[Any]):
    """A psycopg connection with a deadline for each answer."""

    answer_seconds: float | None = None

    @classmethod
    def connect(cls, *args: Any, **kwargs: Any) -> Self:
        """Open a connection as psycopg does, and close one that fails.

        The error's traceback refers to psycopg's frame, and that to the connection and to the error. A cycle is closed
        by the next garbage collection only, and until then a server that was stopped has one place less for each
        attempt.

        Raises:
            psycopg.OperationalError: no connection could be opened in time.
        """
        try:
            return super().connect(*args, **kwargs)
        except psycopg.Error as error:
            raise error.with_traceback(None) from None

    def wait(self, gen: Generator[Any, Any, RV], *args: Any, **kwargs: Any) -> RV:
        """Wait for the server as psycopg does, until the deadline.

        Raises:
            psycopg.OperationalError: the server did not answer in time; the connection is closed.
        """
        if self.answer_seconds is not None:
            gen = self._until(gen, time.monotonic() + self.answer_seconds)
        return super().wait(gen, *args, **kwargs)

    def _until(self, gen: Generator[Any, Any, RV], deadline: float) -> Generator[Any, Any, RV]:
        """Run a generator until the deadline; psycopg resumes it at short intervals even if no data has arrived."""
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
