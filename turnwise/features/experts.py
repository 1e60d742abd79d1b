"""The experts to which an engine routed a turn's tokens, as a part of a turn; a trainer follows them."""

from __future__ import annotations

import base64
import enum
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.chains import Experience
from turnwise.parts import Part, PartProblem
from turnwise.types import TOKEN_BYTES, Turn

EXPERTS = "experts"
DIMENSIONS = 3
Routing: TypeAlias = npt.NDArray[np.int16]
"""Experts of each token by layer, -1 where they are not known. [L, layers, experts a token]"""


class RoutingProblem(enum.StrEnum):
    """Why an engine's routing of a call cannot be stored."""

    NOT_BASE64 = "not_base64"
    NOT_AN_ARRAY = "not_an_array"
    WRONG_SHAPE = "wrong_shape"
    WRONG_LENGTH = "wrong_length"
    """It has another number of tokens than the call."""


class Experts(Part):
    """An .npy array of a turn's tokens: from the one before `prompt_delta` to the last but one of `token_ids`."""

    name = EXPERTS
    column = reply_field = "routed_experts"
    is_digested = False
    joined_fields: ClassVar = {
        "routed_experts": "Experts by layer to which the engine routed each token, -1 where they are not known; None "
        "if none is. [L, layers, experts a token]"
    }

    def pack(self, given: Any, row: Mapping[str, Any]) -> bytes:
        end = row["prompt_length"] + len(row["token_ids"]) // TOKEN_BYTES
        is_root = row["parent_turn_id"] is None
        start = 0 if is_root else row["prompt_length"] - len(row["prompt_delta"]) // TOKEN_BYTES
        packed = pack_routing(given, start, end)
        if isinstance(packed, RoutingProblem):
            raise PartProblem(packed.value, f"without the experts that the engine returned: {packed}")
        return packed

    def join(self, path: Sequence[Turn], trained: Collection[str], loaded: Any) -> Routing | None:
        length = sum(turn.prompt_delta.size + turn.token_ids.size for turn in path)
        routing: Routing | None = None
        place = 0
        for turn in path:
            if (packed := turn.parts.get(EXPERTS)) is not None:
                own = np.load(io.BytesIO(packed), allow_pickle=False)
                if routing is None:
                    routing = np.full((length, *own.shape[1:]), -1, np.int16)
                if own.shape[1:] == routing.shape[1:]:
                    start = max(place - 1, 0)
                    own = own[: length - start]
                    routing[start : start + len(own)] = own
            place += turn.prompt_delta.size + turn.token_ids.size
        return routing

    def as_root(self, path: Sequence[Turn]) -> bytes | None:
        routing = self.join(path, (), None)
        return None if routing is None else _saved(routing[:-1])


def experts_of(experience: Experience) -> Routing | None:
    """Return the experts of a chain's tokens; None if none is known."""
    found: Routing | None = experience.parts.get(EXPERTS)
    return found


def pack_routing(encoded: str | bytes, start: int, num_tokens: int) -> bytes | RoutingProblem:
    """Return the part of an engine's routing that a turn stores, or why it cannot be stored.

    The routing is an .npy array in base64, of all tokens of the call but the last, or of those that the turn stores.
    `start` is the place of the turn's first token that is not its parent's; `num_tokens` counts the call's prompt and
    sampled tokens.
    """
    try:
        array = base64.b64decode(encoded, validate=True)
    except ValueError:
        return RoutingProblem.NOT_BASE64
    try:
        found = np.lib.format.read_array(io.BytesIO(array), allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, EOFError, OSError, MemoryError):
        return RoutingProblem.NOT_AN_ARRAY
    if found.dtype.kind not in "iu":
        return RoutingProblem.NOT_AN_ARRAY
    if found.ndim != DIMENSIONS:
        return RoutingProblem.WRONG_SHAPE
    first = max(start - 1, 0)
    if len(found) not in (num_tokens - 1, num_tokens - 1 - first):
        return RoutingProblem.WRONG_LENGTH
    return _saved(found[len(found) - (num_tokens - 1 - first) :])


def _saved(array: npt.NDArray[Any]) -> bytes:
    with io.BytesIO() as stored:
        np.save(stored, array, allow_pickle=False)
        return stored.getvalue()
