"""Models of the control plane's answers, for the OpenAPI document, which alone imports them.

The models of records follow from the records in `turnwise.types`. They describe answers and do not filter them:
answers are encoded from our own records by one fast call, and a test holds every answer to its model. That costs
nothing in service, where a page may carry a million token ids, and nothing at the start: pydantic needs 0.3 s for them.
"""

from __future__ import annotations

import datetime
import functools
import typing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from proxy.routes.serialise import PUBLIC
from turnwise.installation import Finding
from turnwise.settings import field_docs
from turnwise.store.keys import Key
from turnwise.store.lineage import TrainedTurn
from turnwise.store.policy_summaries import PolicySummary
from turnwise.store.queries import Counts
from turnwise.store.summaries import Summary
from turnwise.store.trained import TrainedSession, UpdateGroup, UpdateSummary
from turnwise.store.trainer_status import TrainerState
from turnwise.types import (
    Feedback,
    Json,
    Logprobs,
    Policy,
    PolicyVersion,
    Reward,
    Role,
    Session,
    TokenIds,
    Turn,
    UpdateRecord,
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


class ChainRole(Answer):
    """The role of a chain, and its turns."""

    role: Role
    turn_ids: list[str]


def answer_model(name: str, record: type, doc: str, **extra: Any) -> type[Answer]:
    """Return the model of a record's JSON: the record's public fields, with their docstrings as descriptions.

    Args:
        name: The model's name in the OpenAPI document.
        record: The record's dataclass.
        doc: What one of them is.
        extra: Further fields, or other types of the record's own, as `pydantic.create_model` takes them.
    """
    kinds, docs = typing.get_type_hints(record), field_docs(record)
    fields = {each: (_json_type(kinds[each]), Field(description=docs.get(each))) for each in PUBLIC.get(record, kinds)}
    return _create(name, Answer, doc, {**fields, **extra})


def page_model(name: str, row: type[Answer], doc: str, **extra: Any) -> type[Answer]:
    """Return the model of a page of these rows."""
    return _create(name, Page, doc, {"data": (list[row], ...), "has_more": (bool, ...), **extra})  # type: ignore[valid-type]


def _create(name: str, base: type[Answer], doc: str, fields: dict[str, Any]) -> type[Answer]:
    # Pydantic would search the source of each frame of the call stack for docstrings: 20 ms a model, and it has none.
    no_source = {"use_attribute_docstrings": False}
    return create_model(name, __base__=base, __doc__=doc, __cls_kwargs__=no_source, **fields)


def _field(kind: Any, description: str) -> Any:
    """Return a required field, as `pydantic.create_model` takes it."""
    return kind, Field(description=description)


def _json_type(kind: Any) -> Any:
    return {TokenIds: list[int], Logprobs: list[float]}.get(kind, kind)


session_model = functools.partial(
    answer_model, record=Session, policy=_field(str | None, "The name of the policy that it samples with.")
)
SessionAnswer = session_model("SessionAnswer", doc="One run of an agent.")
ListedSession = session_model(
    "ListedSession",
    doc="One run of an agent in a list.",
    summary=(Summary | None, Field(default=None, description="What was said in it, with `summary=true`.")),
)
EndedSessionAnswer = session_model(
    "EndedSessionAnswer",
    doc="A session that is over.",
    training_note=_field(str, "What it waits for until it is trained, or why it is not trained."),
)
NewSessionAnswer = session_model(
    "NewSessionAnswer",
    doc="A session, with what its agent needs to call the model in it.",
    base_url=_field(str, "What an OpenAI client takes as `base_url`."),
    api_key=_field(str, "A key for this session alone."),
)
RewardAnswer = answer_model("RewardAnswer", Reward, "One line of the reward ledger.")
FeedbackAnswer = answer_model(
    "FeedbackAnswer",
    Feedback,
    "What a person said about a session or a turn.",
    turn_id=_field(str | None, "The turn that it is about; null for the whole session."),
    value=_field(bool | float | str | None, "The thumb, rating, text or edited reply; null for a choice."),
    scale=_field(list[float] | None, "The lowest and the highest rating; null without a scale."),
    over=_field(list[str], "The turns that a demonstration was preferred to."),
)
ReadSession = session_model(
    "ReadSession",
    doc="One run of an agent, with its own rewards.",
    rewards=_field(
        list[RewardAnswer],  # type: ignore[valid-type]
        "The reward lines for the whole session, in order of arrival.",
    ),
)
TurnAnswer = answer_model(
    "TurnAnswer",
    Turn,
    "One model call. `messages`, `tools`, `prompt_token_ids` are what it adds; with `prompt=whole` the whole prompt.",
    messages=_field(
        list[Json], "Messages after the reply of its parent, at the root all of them; or those of the whole prompt."
    ),
    tools=_field(list[Json] | None, "Tool schemas, at the root of a chain; with the whole prompt for every turn."),
    prompt_token_ids=_field(
        list[int], "Prompt tokens after the last one of its parent, at the root all of them; or the whole prompt."
    ),
    trained_in=_field(list[TrainedTurn], "The updates that trained it, oldest first."),
    rewards=_field(
        list[RewardAnswer],  # type: ignore[valid-type]
        "Its own reward lines and those of its step, in order of arrival.",
    ),
)
PolicyAnswer = answer_model(
    "PolicyAnswer",
    PolicyVersion,
    "A version of a policy.",
    policy=_field(str, "The name of its policy."),
    path=_field(
        str | None,
        "The directory of its files, or the name of a public model; null for a version of the default policy where the "
        "caller's tenant may not publish a directory.",
    ),
    on_disk=_field(
        bool | None,
        "Whether its files exist, as far as the proxy sees; null for the name of a public model, "
        "and where the file system does not answer.",
    ),
)
NamedPolicy = answer_model("NamedPolicy", Policy, "A policy: the default one, or one that a tenant created.")
ListedPolicy = answer_model(
    "ListedPolicy",
    Policy,
    "A policy in a list.",
    summary=(PolicySummary | None, Field(default=None, description="What it holds, with `summary=true`.")),
)
ActivationAnswer = _create(
    "ActivationAnswer",
    PolicyAnswer,
    "A version that was chosen to be served.",
    {
        "is_served": _field(bool, "Whether engines serve it already; else they load it now."),
        "pinned_version": _field(int | None, "The version that stays served whatever is published; or null."),
    },
)
UpdateAnswer = answer_model(
    "UpdateAnswer",
    UpdateRecord,
    "What the trainer did with one batch.",
    groups=_field(list[UpdateGroup], "This tenant's groups in it, the dropped ones included."),
    sessions=_field(list[TrainedSession], "This tenant's sessions that it trained."),
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
    """The versions that were trained on it, oldest first; every later version of their policy descends from them."""
    cloned_versions: list[int]
    """Versions since the first of those from which other policies were created."""
    num_policies: int
    """Policies of the tenant that were deleted with it."""
    deleted_versions: list[int]
    """The versions of those policies."""
    directories_left: list[str]
    """Directories of those versions that were not removed: they are on another machine, or no trainer wrote them.
    Those that a version of another policy has too are left out."""


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
    next_after=_field(str | None, "The `after` of the next page; null if there are no more sessions."),
    num_searched=_field(int, "Number of sessions that were looked at for this page."),
)
TurnPage = page_model("TurnPage", TurnAnswer, "Some turns.")
UpdatePage = page_model("UpdatePage", UpdateAnswer, "Some updates.")
PolicyPage = page_model(
    "PolicyPage",
    PolicyAnswer,
    "Some policy versions.",
    pinned_version=_field(int | None, "The version that a person pinned the policy to; null follows the newest."),
    key_policy=_field(str, "The policy that new sessions of the caller's key sample with."),
    policies=_field(
        list[ListedPolicy],  # type: ignore[valid-type]
        "The default policy and the tenant's own ones.",
    ),
)


class Segment(Answer):
    """Tokens that one turn added: text of its messages, what the chat template put around it, or what it sampled."""

    kind: Literal["prompt", "scaffold", "sampled"]
    """`prompt` also stands for all of the prompt without a tokenizer."""
    turn_id: str
    seq: int
    start: int
    """Position of its first token."""
    end: int
    """Position after its last token."""
    policy_version_first: int
    policy_version_last: int
    role: Role
    is_trainable: bool
    """Whether the tokens may carry loss: they are sampled, and neither the turn's outcome nor its role prevents it."""
    reward: float | None
    """The turn's reward under the session's credit policy; null without a reward, and for a prompt."""
    turn_return: float | None
    """The turn's reward after discount."""
    advantage: float | None
    """The turn's advantage in the last update that trained it; null if none did."""


class Characters(Answer):
    """Neighbouring tokens whose bytes are characters only together."""

    start: int
    """Position of the first token."""
    end: int
    """Position after the last token."""
    text: str


class TokensAnswer(Answer):
    """The sequence of a turn: its whole prompt and what it sampled, as the model saw them."""

    turn_id: str
    token_ids: list[int]
    logprobs: list[float | None]
    """Logprob of each token; null for a token that was not sampled."""
    segments: list[Segment]
    """In order, without gaps."""
    pieces: dict[str, str]
    """Text of each token id on its own, with U+FFFD for a part of a character; empty without a tokenizer."""
    characters: list[Characters]
    """Characters that span several tokens, in order."""
    special_ids: list[int]
    """Ids of tokens that mark structure."""


class RecomputedAnswer(Answer):
    """The logprobs of a turn's sampled tokens when they were sampled, and now."""

    turn_id: str
    policy_version_first: int
    """The version that sampled the first token."""
    policy_version_last: int
    policy_version: int
    """The version that is served now."""
    before: list[float]
    """As stored: one for each sampled token."""
    after: list[float | None]
    """Under the served version, with the turn's temperature, top-p, top-k and min-p, for the first 2048 tokens; null
    for a token that it cannot sample under these."""


TOKENS_USED = _field(int, "Prompt and sampled tokens in the period of the budgets; 0 without budgets.")
ListedKey = answer_model("ListedKey", Key, "An API key, without its secret.", tokens_used=TOKENS_USED)
KeyAnswer = answer_model("KeyAnswer", Key, "An API key, without its secret.")
NewKeyAnswer = answer_model(
    "NewKeyAnswer",
    Key,
    "A new API key.",
    key=_field(str, "The whole key. Only this answer has it."),
)


class KeyList(Answer):
    """All keys of the tenant."""

    object: str
    data: list[ListedKey]  # type: ignore[valid-type]


class EngineReport(Answer):
    """The proxy's state of one engine."""

    url: str | None
    """None for callers without a key."""
    ready: bool
    model: str
    policy_version: int
    error: str | None
    """Why it gets no calls, as the last check found; null while it serves, and for callers without a key."""


CountsAnswer = answer_model(
    "CountsAnswer",
    Counts,
    "Counts of a tenant's rows in the store.",
    counted_at=_field(
        datetime.datetime,
        "When everything but the trainers' reports was counted. For a tenant with more than 10,000 sessions and groups "
        "that is up to one second ago for every 10,000 of them.",
    ),
)


class Spending(Answer):
    """The tokens of one budget."""

    token_budget: int | None
    """Prompt and sampled tokens; null for no budget."""
    tokens_used: int
    """Counted while any budget is set."""


class BudgetAnswer(Answer):
    """The token budgets that the caller's calls are charged to."""

    key: Spending
    tenant: Spending
    days: int | None
    """Period of both budgets in UTC days, today included; null for budgets that are never renewed."""


class UpdateSummaries(Page):
    """Some updates in a few numbers."""

    data: list[UpdateSummary]
    has_more: bool


class DoctorAnswer(Page):
    """The findings about this installation."""

    data: list[Finding]
    has_more: bool


class TrainerSummary(Answer):
    """Whether a trainer trains."""

    trainer_id: str
    state: TrainerState
    text: str | None
    """Its last report; null for callers without a key."""


class ReadyAnswer(Answer):
    """Whether the proxy can serve calls."""

    ready: bool
    """Calls are served without a trainer too, so a dead one does not change this."""
    engines: list[EngineReport]
    store: str
    """`ok`, or the error."""
    policy_version: int | None
    exact_continuation: bool
    reload_error: str | None
    trainers: list[TrainerSummary]


def schemas() -> Json:
    """Return the JSON schemas of all models, and of the types in them, by name."""
    models = {each for each in globals().values() if isinstance(each, type) and issubclass(each, Answer)}
    wanted: list[tuple[type[Answer], JsonSchemaMode]] = [(each, "serialization") for each in models - {Answer, Page}]
    return dict(models_json_schema(wanted, ref_template="#/components/schemas/{model}")[1]["$defs"])
