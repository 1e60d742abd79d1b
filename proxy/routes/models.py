"""Models of the control plane's answers, for the OpenAPI document, which alone imports them.

An answer is a record that a route returns, and its model follows from it: the record's public fields, with their
docstrings. The models describe answers and do not filter them: answers are encoded from the records by one fast call,
and a test holds every answer to its model. That costs nothing in service, where a page may carry a million token ids,
and nothing at the start: pydantic needs 0.3 s for them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from proxy.routes import operations, rewards
from proxy.routes.control import PUBLIC
from turnwise import parts
from turnwise.settings import field_docs
from turnwise.store import extensions, keys
from turnwise.store import turns as stored_turns
from turnwise.types import (
    Json,
    Logprobs,
    Reward,
    Session,
    TokenIds,
    Turn,
)


class Answer(BaseModel):
    """Base of all: nothing is in an answer that its model does not name."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Problem(Answer):
    """What went wrong."""

    message: str
    """A sentence that says what to do."""
    type: str | int
    param: str | None
    """The field of the request that it is about."""
    code: str | int | None
    """A stable word for programs."""


class ErrorAnswer(Answer):
    """OpenAI's error object."""

    error: Problem


class Page(Answer):
    """Base of all lists."""

    object: Literal["list"]


def answer_model(
    name: str, record: type, doc: str | None = None, *, only: Sequence[str] | None = None, **extra: Any
) -> type[Answer]:
    """Return the model of a record's JSON: its public fields, or `only` these, with docstrings as descriptions.

    `extra` has further fields, or other types of the record's own, as `pydantic.create_model` takes them.
    """
    kinds, docs = typing.get_type_hints(record), field_docs(record)
    names: Iterable[str] = only or PUBLIC.get(record, tuple(kinds))
    fields = {each: (_json_type(kinds[each]), Field(description=docs.get(each))) for each in names}
    return create(name, Answer, doc or record.__doc__, {**fields, **extra})


def page_model(name: str, row: type, doc: str, **extra: Any) -> type[Answer]:
    return create(name, Page, doc, {"data": (list[_json_type(row)], ...), "has_more": (bool, ...), **extra})  # type: ignore[misc]


def create(name: str, base: type[Answer], doc: str | None, fields: dict[str, Any]) -> type[Answer]:
    # Pydantic would search the source of each frame of the call stack for docstrings: 20 ms a model, and it has none.
    no_source = {"use_attribute_docstrings": False}
    return create_model(name, __base__=base, __doc__=doc, __cls_kwargs__=no_source, **fields)


def field(kind: Any, description: str, **options: Any) -> Any:
    return _json_type(kind), Field(description=description, **options)


def _json_type(kind: Any) -> Any:
    if kind in (TokenIds, Logprobs):
        return list[int] if kind == TokenIds else list[float]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return model_of(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return functools.reduce(operator.or_, map(_json_type, arguments))
    return kind if origin in (None, Literal) else origin[tuple(map(_json_type, arguments))]


@functools.cache
def model_of(record: type) -> type[Answer]:
    return answer_model(record.__name__, record)


def columns(of: str) -> dict[str, Any]:
    """Return the fields that features add to rows of sessions, keys, policies or updates."""
    return {
        each.name: (
            _json_type(each.kind),
            Field(description=each.description, **({} if each.is_always_on else {"default": each.empty})),
        )
        for each in extensions.columns
        if of in each.of
    }


def session_model(name: str, doc: str, **extra: Any) -> type[Answer]:
    policy = field(str | None, "The name of its own policy, which samples the calls that name no other.")
    return answer_model(name, Session, doc, policy=policy, **columns("session"), **extra)


SessionAnswer = session_model("SessionAnswer", doc="One run of an agent.")
EndedSessionAnswer = session_model(
    "EndedSessionAnswer",
    doc="A session that is over.",
    training_note=field(str, "What it waits for until it is trained, or why it is not trained."),
)
NewSessionAnswer = session_model(
    "NewSessionAnswer",
    doc="A session, with what its agent needs to call the model in it.",
    base_url=field(str, "What an OpenAI client takes as `base_url`."),
    api_key=field(str, "A key for this session alone."),
)
RewardAnswer = answer_model("RewardAnswer", Reward, "One line of the reward ledger.")
ReadSession = session_model(
    "ReadSession",
    doc="One run of an agent, with its own rewards.",
    rewards=field(
        list[RewardAnswer],  # type: ignore[valid-type]
        "The reward lines for the whole session, in order of arrival.",
    ),
)
TurnAnswer = answer_model(
    "TurnAnswer",
    Turn,
    "One model call. `messages`, `tools`, `prompt_token_ids` are what it adds; with `prompt=whole` the whole prompt.",
    **{name: field(*declared) for part in parts.known.values() for name, declared in part.fields.items()},
    messages=field(
        list[Json], "Messages after the reply of its parent, at the root all of them; or those of the whole prompt."
    ),
    tools=field(list[Json] | None, "Tool schemas, at the root of a chain; with the whole prompt for every turn."),
    prompt_token_ids=field(
        list[int], "Prompt tokens after the last one of its parent, at the root all of them; or the whole prompt."
    ),
    policy=field(str | None, "The name of the policy that sampled it."),
    not_trained=field(
        str | None,
        "The sampling parameter for which its tokens carry no loss, such as `temperature 0`; null where there is none, "
        "and of a turn whose outcome already rules training out.",
    ),
    trained_in=field(list[stored_turns.TrainedTurn], "The updates that trained it, oldest first."),
    rewards=field(
        list[RewardAnswer],  # type: ignore[valid-type]
        "Its own reward lines and those of its step, in order of arrival.",
    ),
)
ReadyAnswer = answer_model("ReadyAnswer", operations.Readiness)
RewardsAnswer = page_model(
    "RewardsAnswer", answer_model("ReachedAnswer", rewards.Reached), "What became of each reward line."
)
TurnPage = page_model("TurnPage", TurnAnswer, "Some turns.")

ListedKey = answer_model("ListedKey", keys.Key, "An API key, without its secret.", **columns("key"))
KeyAnswer = answer_model("KeyAnswer", keys.Key, "An API key, without its secret.")
NewKeyAnswer = answer_model(
    "NewKeyAnswer",
    keys.Key,
    "A new API key.",
    key=field(str, "The whole key. Only this answer has it."),
)

KeyList = page_model("KeyList", ListedKey, "All keys of the tenant.")


def schemas(of_features: Iterable[Callable[[], Iterable[type[Answer]]]] = ()) -> Json:
    models = {each for each in globals().values() if isinstance(each, type) and issubclass(each, Answer)}
    models |= {each for answers in of_features for each in answers()}
    wanted: list[tuple[type[Answer], JsonSchemaMode]] = [(each, "serialization") for each in models - {Answer, Page}]
    return dict(models_json_schema(wanted, ref_template="#/components/schemas/{model}")[1]["$defs"])
