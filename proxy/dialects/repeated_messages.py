"""The messages of a request that begins with the messages of an earlier one, which are decoded on their first use.

A call that extends a stored turn reads only what is new in its request, so a conversation in memory needs no decoded
messages. They are decoded from the bytes of the present request, which has all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import overload

import orjson

from turnwise.types import Json

DecodeMessages = Callable[[bytes], Awaitable[list[Json]]]
"""Decodes a JSON array of messages."""


class RepeatedMessages(Sequence[Json]):
    """A list of messages; items and slices of new messages decode nothing.

    Args:
        num_known: number of messages that an earlier request had.
        known_json: their JSON array, without the bracket that closes it.
        new: the messages after them.
        decode: decodes them without holding the event loop; None if that does not take long.
    """

    __slots__ = ("_all", "_decode", "_known_json", "_new", "_num_known")

    def __init__(
        self,
        num_known: int,
        known_json: memoryview,
        new: list[Json],
        decode: DecodeMessages | None = None,
    ) -> None:
        self._num_known = num_known
        self._known_json = known_json
        self._new = new
        self._decode = decode
        self._all: list[Json] | None = None

    def __len__(self) -> int:
        """Return the number of all messages."""
        return self._num_known + len(self._new)

    @overload
    def __getitem__(self, index: int) -> Json: ...

    @overload
    def __getitem__(self, index: slice) -> list[Json]: ...

    def __getitem__(self, index: int | slice) -> Json | list[Json]:
        """Return a message or a list of some."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and start >= self._num_known:
                return self._new[start - self._num_known : max(start, stop) - self._num_known]
            return self.decoded()[index]
        position = index if index >= 0 else index + len(self)
        return self._new[position - self._num_known] if position >= self._num_known else self.decoded()[index]

    def __iter__(self) -> Iterator[Json]:
        """Yield all messages."""
        return iter(self.decoded())

    def __eq__(self, other: object) -> bool:
        """Return whether the messages are equal to those of another list."""
        return self.decoded() == (other.decoded() if isinstance(other, RepeatedMessages) else other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    @property
    def is_decoded(self) -> bool:
        """Whether the known messages have been decoded."""
        return self._all is not None

    def decoded(self) -> list[Json]:
        """Return all messages as a list; decode the known ones on the first call."""
        if self._all is None:
            self._all = [*orjson.loads(self._array()), *self._new]
        return self._all

    async def load(self, first: int = 0) -> None:
        """Decode messages that would hold the event loop, for a caller that reads those from `first` on."""
        if first < self._num_known and self._all is None and self._decode is not None:
            self._all = [*await self._decode(self._array()), *self._new]

    def _array(self) -> bytes:
        """Return the JSON array of the known messages."""
        return b"".join((self._known_json, b"]"))


def are_messages(value: object) -> bool:
    """Return whether a value is a list of objects; known messages were found to be objects when they were new."""
    return set(map(type, value)) <= {dict} if isinstance(value, list) else isinstance(value, RepeatedMessages)


def message_list(messages: Sequence[Json]) -> list[Json]:
    """Return messages as a list, which can be encoded."""
    if isinstance(messages, list):
        return messages
    return messages.decoded() if isinstance(messages, RepeatedMessages) else list(messages)
