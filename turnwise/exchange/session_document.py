"""A stored session as one JSON object: what a format of whole sessions reads.

It has the fields that `GET /v1/sessions/{session_id}` shows, and with them `turns`, each with its whole prompt as
`GET /v1/turns/{turn_id}?prompt=whole` shows it, and `rewards`, the effective lines of the ledger. A format knows these
names and not the store, so a package of its own can be one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from turnwise.credit import latest_lines
from turnwise.features import records
from turnwise.parts import turn_fields
from turnwise.store.turns import TurnView
from turnwise.types import Json, Reward, Turn, values_of

OF_THE_STORE = frozenset(
    {
        *("prompt_delta", "history_digest", "messages_digest", "dialogue_digest"),
        *("request_key", "request_digest", "inferred_by", "parts", "digest", "reward_id", "policy_id"),
    }
)


def session_document(record: records.SessionRecord) -> Json:
    """Return a session with its turns in order of `seq`, and its effective rewards in order of arrival."""
    document: Json = values_of(record.session) | {"policy": record.policy} | values_of(record.columns)
    names = record.policies
    document["turns"] = [_turn(view) | {"policy": names.get(view.turn.policy_id)} for view in record.views()]
    document["rewards"] = _lines(latest_lines(record.rewards))
    return document


def _turn(view: TurnView) -> Json:
    return _public(view.turn) | {
        **turn_fields(view.turn.parts),
        "messages": view.messages,
        "tools": view.tools,
        "prompt_token_ids": view.prompt_token_ids.tolist(),
        "trained_in": values_of(view.trained_in),
        "rewards": _lines(view.rewards),
    }


def _lines(rewards: Iterable[Reward]) -> list[Json]:
    return [_public(line) for line in rewards]


def _public(record: Turn | Reward) -> Json:
    names = (field.name for field in dataclasses.fields(record) if field.name not in OF_THE_STORE)
    return {name: values_of(getattr(record, name)) for name in names}
