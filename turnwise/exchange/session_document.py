"""A stored session as one JSON object: what a format of whole sessions reads.

It has the fields that `GET /v1/sessions/{session_id}` shows, and with them `turns`, each with its whole prompt as
`GET /v1/turns/{turn_id}?prompt=whole` shows it, and `rewards`, the effective lines of the ledger. A format knows these
names and not the store, so a package of its own can be one.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from collections.abc import Iterable
from typing import Any

import numpy as np

from turnwise.credit import latest_lines
from turnwise.store import search
from turnwise.store.turns import TurnView
from turnwise.support import support_json
from turnwise.types import Json, Reward, Turn

OF_THE_STORE = frozenset(
    {
        *("prompt_delta", "history_digest", "messages_digest", "dialogue_digest"),
        *("request_key", "request_digest", "inferred_by", "routed_experts", "digest", "reward_id", "policy_id"),
    }
)


def session_document(record: search.SessionRecord) -> Json:
    """Return a session with its turns in order of `seq`, and its effective rewards in order of arrival."""
    document: Json = as_json(record.session) | {"policy": record.policy}
    own, names = record.session.policy_id, record.policies
    document["turns"] = [_turn(view) | {"policy": names.get(view.turn.policy_or(own))} for view in record.views()]
    document["rewards"] = _lines(latest_lines(record.rewards))
    return document


def _turn(view: TurnView) -> Json:
    return _public(view.turn) | {
        "support": support_json(view.turn.support),
        "messages": view.messages,
        "tools": view.tools,
        "prompt_token_ids": view.prompt_token_ids.tolist(),
        "trained_in": as_json(view.trained_in),
        "rewards": _lines(view.rewards),
    }


def _lines(rewards: Iterable[Reward]) -> list[Json]:
    return [_public(line) for line in rewards]


def _public(record: Turn | Reward) -> Json:
    names = (field.name for field in dataclasses.fields(record) if field.name not in OF_THE_STORE)
    return {name: as_json(getattr(record, name)) for name in names}


def as_json(value: Any) -> Any:
    """Return a record as JSON values, without the store's number of its policy."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value) if field.name != "policy_id")
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return value
