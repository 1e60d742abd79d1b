"""Models of the control plane's answers, for the OpenAPI document.

The models of records follow from the records in `turnwise.types`. They describe answers and do not filter them:
answers are encoded from our own records by one fast call, and a test holds every answer to its model. That costs
nothing in service, where a page may carry a million token ids.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterable
from typing import Any, Literal

import orjson
from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, create_model

from turnwise.store.keys import Key
from turnwise.store.lineage import TrainedTurn
from turnwise.store.summaries import Summary
from turnwise.store.trained import TrainedSession, UpdateGroup
from turnwise.types import Feedback, Json, Logprobs, PolicyVersion, Reward, Role, Session, TokenIds, Turn, UpdateRecord


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


class ChainRole(Answer):
    """The role of a chain, and its turns."""

    role: Role
    turn_ids: list[str]


HIDDEN: dict[type, frozenset[str]] = {
    Session: frozenset(),
    Reward: frozenset({"tenant", "digest"}),
    Feedback: frozenset({"tenant", "content"}),
    PolicyVersion: frozenset(),
    UpdateRecord: frozenset(),
    Key: frozenset(),
    Turn: frozenset(
        {
            "tenant",
            "prompt_delta",
            "history_digest",
            "messages_digest",
            "dialogue_digest",
            "request_key",
            "request_digest",
            "inferred_by",
            "routed_experts",
            "digest",
        }
    ),
}
"""Fields of each record that the API does not show."""


PUBLIC: dict[type, tuple[str, ...]] = {
    record: tuple(each.name for each in dataclasses.fields(record) if each.name not in hidden)
    for record, hidden in HIDDEN.items()
}
"""Fields of each record that the API shows."""


def answer_model(name: str, record: type, doc: str, **extra: Any) -> type[Answer]:
    """Return the model of a record's JSON: the record's public fields, with their docstrings as descriptions.

    Args:
        name: The model's name in the OpenAPI document.
        record: The record's dataclass.
        doc: What one of them is.
        extra: Further fields, or other types of the record's own, as `pydantic.create_model` takes them.
    """
    kinds, docs = typing.get_type_hints(record), field_docs(record)
    fields = {each: (_json_type(kinds[each]), Field(description=docs.get(each))) for each in PUBLIC[record]}
    return _create(name, Answer, doc, {**fields, **extra})


def page_model(name: str, row: type[Answer], doc: str, **extra: Any) -> type[Answer]:
    """Return the model of a page of these rows."""
    return _create(name, Page, doc, {"data": (list[row], ...), "has_more": (bool, ...), **extra})  # type: ignore[valid-type]


def _create(name: str, base: type[Answer], doc: str, fields: dict[str, Any]) -> type[Answer]:
    # Pydantic would search the source of each frame of the call stack for docstrings: 20 ms a model, and it has none.
    no_source = {"use_attribute_docstrings": False}
    return create_model(name, __base__=base, __doc__=doc, __cls_kwargs__=no_source, **fields)


def field_docs(record: type) -> dict[str, str]:
    """Return the docstring under each field of a class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    docs = {}
    for before, after in itertools.pairwise(typing.cast("ast.ClassDef", body).body):
        match before, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _json_type(kind: Any) -> Any:
    return {TokenIds: list[int], Logprobs: list[float]}.get(kind, kind)


SessionAnswer = answer_model("SessionAnswer", Session, "One run of an agent.")
ListedSession = answer_model(
    "ListedSession",
    Session,
    "One run of an agent in a list.",
    summary=(Summary | None, Field(default=None, description="What was said in it, with `summary=true`.")),
)
EndedSessionAnswer = answer_model(
    "EndedSessionAnswer",
    Session,
    "A session that is over.",
    training_note=(str, Field(description="What it waits for until it is trained, or why it is not trained.")),
)
NewSessionAnswer = answer_model(
    "NewSessionAnswer",
    Session,
    "A session, with what its agent needs to call the model in it.",
    base_url=(str, Field(description="What an OpenAI client takes as `base_url`.")),
    api_key=(str, Field(description="A key for this session alone.")),
)
RewardAnswer = answer_model("RewardAnswer", Reward, "One line of the reward ledger.")
FeedbackAnswer = answer_model(
    "FeedbackAnswer",
    Feedback,
    "What a person said about a session or a turn.",
    turn_id=(str | None, Field(description="The turn that it is about; null for the whole session.")),
    value=(bool | float | str | None, Field(description="The thumb, rating, text or edited reply; null for a choice.")),
    scale=(list[float] | None, Field(description="The lowest and the highest rating; null without a scale.")),
    over=(list[str], Field(description="The turns that a demonstration was preferred to.")),
)
ReadSession = answer_model(
    "ReadSession",
    Session,
    "One run of an agent, with its own rewards.",
    rewards=(
        list[RewardAnswer],  # type: ignore[valid-type]
        Field(description="The reward lines for the whole session, in order of arrival."),
    ),
)
TurnAnswer = answer_model(
    "TurnAnswer",
    Turn,
    "One model call. `messages`, `tools`, `prompt_token_ids` are what it adds; with `prompt=whole` the whole prompt.",
    messages=(
        list[Json],
        Field(
            description="Messages after the reply of its parent, at the root all of them; or those of the whole prompt."
        ),
    ),
    tools=(
        list[Json] | None,
        Field(description="Tool schemas, at the root of a chain; with the whole prompt for every turn."),
    ),
    prompt_token_ids=(
        list[int],
        Field(
            description="Prompt tokens after the last one of its parent, at the root all of them; or the whole prompt."
        ),
    ),
    trained_in=(list[TrainedTurn], Field(description="The updates that trained it, oldest first.")),
    rewards=(
        list[RewardAnswer],  # type: ignore[valid-type]
        Field(description="Its own reward lines and those of its step, in order of arrival."),
    ),
)
PolicyAnswer = answer_model(
    "PolicyAnswer",
    PolicyVersion,
    "A version of the served model.",
    on_disk=(
        bool | None,
        Field(
            description="Whether its files exist, as far as the proxy sees; null for the name of a public model, "
            "and where the file system does not answer."
        ),
    ),
)
ActivationAnswer = _create(
    "ActivationAnswer",
    PolicyAnswer,
    "A version that was chosen to be served.",
    {
        "is_served": (bool, Field(description="Whether engines serve it already; else they load it now.")),
        "pinned_version": (
            int | None,
            Field(description="The version that stays served whatever is published; or null."),
        ),
    },
)
UpdateAnswer = answer_model(
    "UpdateAnswer",
    UpdateRecord,
    "What the trainer did with one batch.",
    groups=(list[UpdateGroup], Field(description="This tenant's groups in it, the dropped ones included.")),
    sessions=(list[TrainedSession], Field(description="This tenant's sessions that it trained.")),
)


class ReachedAnswer(Answer):
    """What a reward line reached."""

    turns: int
    """How many turns it is for."""
    trained_in: int | None
    """The last update that trained its session before this reward came; null if none did. What was trained is not
    trained again, unless `retrain_revised` is set."""


class DeletedAnswer(Answer):
    """What a deletion removed."""

    num_sessions: int
    num_turns: int
    policy_versions: list[int]
    """The versions that were trained on it, oldest first; every later version descends from them."""


class Page(Answer):
    """Base of all lists."""

    object: Literal["list"]


class RewardsAnswer(Page):
    """What became of each reward line."""

    data: list[ReachedAnswer]


FeedbackPage = page_model("FeedbackPage", FeedbackAnswer, "The feedback of a session.")
SessionPage = page_model(
    "SessionPage",
    ListedSession,
    "Some sessions.",
    next_after=(str | None, Field(description="The `after` of the next page; null if there are no more sessions.")),
    num_searched=(int, Field(description="Number of sessions that were looked at for this page.")),
)
TurnPage = page_model("TurnPage", TurnAnswer, "Some turns.")
UpdatePage = page_model("UpdatePage", UpdateAnswer, "Some updates.")
PolicyPage = page_model(
    "PolicyPage",
    PolicyAnswer,
    "Some policy versions.",
    pinned_version=(int | None, Field(description="The version that a person pinned; null follows the newest.")),
)


def describe_answer(model: type[Answer]) -> dict[int | str, dict[str, Any]]:
    """Return the argument `responses` of a route's decorator, which documents its answer."""
    return {200: {"model": model}}


def encode_page(rows: Iterable[Json], *, has_more: bool) -> bytes:
    """Return the JSON of a page; each row is encoded by itself, so that in a thread it does not hold the event loop."""
    encoded = b",".join([orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows])
    return b"".join((b'{"object":"list","data":[', encoded, b'],"has_more":', orjson.dumps(has_more), b"}"))


def answer(content: Json) -> Response:
    """Encode an answer."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
