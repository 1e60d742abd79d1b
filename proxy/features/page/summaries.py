"""What is stored, in a few words and numbers, for people: sessions in lists, and updates."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from turnwise.features.page import activity, search, updates
from turnwise.features.page.updates import list_updates
from turnwise.store.database import Connection
from turnwise.types import GroupStatus, Json, Session, UpdateRecord, text_of

MAX_CHARACTERS = 300
MAX_TASKS = 50
KINDS = ("groups", "singles")


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What was said in a session, in short; a text is null if there is none, or if it is too long to be read here."""

    first_message: str | None = None
    """The start of the user's message that the first turn answers; those before it may be examples of the agent's."""
    last_reply: str | None = None
    """The start of the last reply; of a reply without text, the names of the tools that it calls."""
    last_outcome: str | None = None
    """Outcome of the last turn; null without a turn."""
    num_sampled_tokens: int | None = None
    """Sampled tokens of all turns; null for a session with more than 1,000 turns."""


def summarise_sessions(conn: Connection, found: Sequence[Session]) -> list[Summary]:
    return [
        Summary(_first_message(each.first_prompt), _last_reply(each.last_reply), *each[2:])
        for each in search.ends_of(conn, found)
    ]


def _first_message(stored: str | None) -> str | None:
    messages = orjson.loads(stored) if stored else []
    said = [text for message in messages if message.get("role") == "user" and (text := _text(message.get("content")))]
    return _cut(said[-1]) if said else None


def _last_reply(stored: str | None) -> str | None:
    reply: Json = orjson.loads(stored) if stored else {}
    calls = (call.get("function") or {} for call in reply.get("tool_calls") or () if isinstance(call, dict))
    named = ", ".join(f"calls {call.get('name')}" for call in calls)
    return _cut(_text(reply.get("content")) or named) or None


def _text(content: Any) -> str:
    return " ".join(text_of(content).split())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """The mean of some sessions' rewards."""

    mean: float
    num_sessions: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSummary:
    """One update."""

    update_id: int
    trainer_id: str
    policy_version: int
    created_at: datetime.datetime
    num_tokens: int
    """Number of sampled tokens that carried loss."""
    metrics: Json
    dropped: Mapping[str, int]
    """Number of this tenant's dropped groups, by reason."""
    reward: Mean | None
    """Of this tenant's sessions in it, those of dropped groups included; None without a rewarded one."""
    by_kind: Mapping[str, Mean]
    """`groups` of the sessions of groups, `singles` of single sessions, as of live traffic: they have other tasks, and
    often other graders, so their rewards are no one curve."""
    by_task: Mapping[str, Mean]
    by_name: Mapping[str, Mean]
    """By the name of the reward; each is a part of the session's reward."""
    engine_idle_share: float | None
    """Share of the engines' serving seconds, since the trainer's update before, in which no call ran; None for the
    first update of the list, and where no proxy has recorded it."""


def summarise_updates(conn: Connection, tenant: str, *, limit: int = 100) -> list[UpdateSummary]:
    newest, _ = list_updates(conn, limit=limit, tenant=tenant)
    judged = {update.update_id: updates.judged_sessions(conn, tenant, update.update_id) for update in newest}
    sizes = Counter(each.task_id for of_update in judged.values() for each in of_update if each.task_id)
    tasks = sorted(sizes, key=lambda task: (-sizes[task], task))[:MAX_TASKS]
    in_update = updates.groups_of(conn, tenant, list(judged))
    idle = activity.idle_shares(conn, _periods(newest))
    return [
        UpdateSummary(
            update_id=update.update_id,
            trainer_id=update.trainer_id,
            policy_version=update.policy_version,
            created_at=update.created_at,
            num_tokens=update.num_tokens,
            metrics=update.metrics,
            dropped=dict(
                Counter(
                    group.reason or "no reason"
                    for group in in_update[update.update_id]
                    if group.status is GroupStatus.DROPPED
                )
            ),
            reward=_mean([each.credit.reward for each in judged[update.update_id]]),
            by_kind=_means((KINDS[each.is_single], each.credit.reward) for each in judged[update.update_id]),
            by_task=_means(
                (each.task_id, each.credit.reward) for each in judged[update.update_id] if each.task_id in tasks
            ),
            by_name=_means(named for each in judged[update.update_id] for named in each.credit.by_name.items()),
            engine_idle_share=idle.get(update.update_id),
        )
        for update in reversed(newest)
    ]


def _periods(newest: Sequence[UpdateRecord]) -> dict[int, activity.Period]:
    periods: dict[int, activity.Period] = {}
    last: dict[str, datetime.datetime] = {}
    for update in reversed(newest):
        if update.trainer_id in last:
            periods[update.update_id] = last[update.trainer_id], update.created_at
        last[update.trainer_id] = update.created_at
    return periods


def _mean(values: Sequence[float]) -> Mean | None:
    return Mean(statistics.fmean(values), len(values)) if values else None


def _means(named: Iterable[tuple[str, float]]) -> dict[str, Mean]:
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in named:
        values[name].append(value)
    return {name: Mean(statistics.fmean(each), len(each)) for name, each in sorted(values.items())}
