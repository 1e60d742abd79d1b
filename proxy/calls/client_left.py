"""Stop a call when its client closes the connection, so that the engine stops sampling too."""

from __future__ import annotations

import asyncio


class ClientLeft(Exception):
    """The client closed its connection before it had the whole reply."""


class cancelled_when_client_leaves:  # noqa: N801  used like a function
    """Cancel the block when the client closes its connection.

    Raises:
        ClientLeft: in place of the cancellation.
    """

    __slots__ = ("_is_inside", "_left", "_task")

    def __init__(self, left: asyncio.Future[None]) -> None:
        self._left = left

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._is_inside = True
        self._left.add_done_callback(self._cancel)

    def _cancel(self, _: asyncio.Future[None]) -> None:
        if self._is_inside and self._task is not None:
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_inside = False
        self._left.remove_done_callback(self._cancel)
        if kind is asyncio.CancelledError and self._task is not None and self._left.done():
            self._task.uncancel()
            raise ClientLeft from None
