"""The records of the system, shared by proxy, trainer, SDK and tables; columns and JSON follow from their fields.

Token arrays are numpy, never lists, so a token id takes 4 bytes in memory and on disk; JSON is made at the edges.
Legend of shapes: P prompt tokens of a turn, R sampled tokens of a turn, L tokens of a
whole experience.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
"""A decoded JSON object."""
TokenIds = npt.NDArray[np.int32]
"""Token ids, one dimension."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities, one dimension."""
GroupKey = tuple[str, str]
"""A group's tenant and id: ids are unique only within a tenant."""
SessionKey = tuple[str, str]
"""A session's tenant and id."""


def utc_now() -> datetime.datetime:
    """Return this instant, aware, in UTC."""
    return datetime.datetime.now(datetime.UTC)


class SessionStatus(enum.StrEnum):
    """Life of a session: open → ended, or open → expired after idling."""

    OPEN = "open"
    ENDED = "ended"
    EXPIRED = "expired"


class Split(enum.StrEnum):
    """What a session is for. Eval sessions are never trained on."""

    TRAIN = "train"
    EVAL = "eval"


class Credit(enum.StrEnum):
    """How rewards reach the turns of a session."""

    STEP_WISE = "step_wise"
    """Each turn gets the reward of its own step; a session's reward belongs to its last step."""
    PROPAGATE = "propagate"
    """Every turn gets the reward of the whole session."""


class Outcome(enum.StrEnum):
    """How a call ended. Each call has exactly one."""

    EXACT = "exact"
    """The prompt is the stored tokens of the turn it extends, or the root of a chain; the echo proved it."""
    RETOKENISED = "retokenised"
    """Captured whole, but the history was tokenised afresh, so this turn opens a new chain; `reason` says why."""
    ABORTED = "aborted"
    """The client left, or the stream broke; what was sampled until then is stored."""
    ERROR = "error"
    """No completion came: the engine refused, failed or could not be reached."""
    UNTRAINABLE = "untrainable"
    """Served and stored, but not fit for training; `reason` says why."""


class Role(enum.StrEnum):
    """What a chain is for in its session."""

    MAIN = "main"
    """The agent that the session is a run of."""
    SUB_AGENT = "sub_agent"
    """An agent that another agent started."""
    SIDE = "side"
    """A call of the harness: a title, a summary, a compaction prompt, a probe."""
    RETRY = "retry"
    """An attempt that was discarded: the same prompt was sampled again."""


TRAINED_ROLES = frozenset({Role.MAIN, Role.SUB_AGENT})
"""Roles that are trained by default."""


class GroupStatus(enum.StrEnum):
    """Life of a group: open → ready → claimed → trained | dropped; a lease that runs out makes it ready again."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


class PolicyStatus(enum.StrEnum):
    """Life of a policy version: published → (canary →) active → retired; or failed: not taken, or withdrawn."""

    PUBLISHED = "published"
    CANARY = "canary"
    """A share of the sessions tries it."""
    ACTIVE = "active"
    RETIRED = "retired"
    FAILED = "failed"


class PolicyKind(enum.StrEnum):
    """What a policy's directory holds."""

    FULL = "full"
    """All weights, safetensors in the Hugging Face layout."""
    LORA = "lora"
    """A PEFT adapter for the base model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedIn:
    """An update that trained something."""

    update_id: int
    policy_version: int
    """The version that came out of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of an agent."""

    session_id: str
    tenant: str = "default"
    task_id: str | None = None
    run: int = 0
    """Which rollout of the task this is, from 0."""
    group_id: str | None = None
    """The rollouts that are centred together; without one the session is a group of its own."""
    group_size: int | None = None
    """How many sessions complete the group."""
    split: Split = Split.TRAIN
    credit: Credit = Credit.PROPAGATE
    gamma: float = 0.0
    """Discount of the return over steps; 0 leaves step rewards as they are."""
    sampling: Json = dataclasses.field(default_factory=dict)
    """Sampling parameters that this session's calls are pinned to, whatever they ask for."""
    metadata: Json = dataclasses.field(default_factory=dict)
    opened_by: str | None = None
    """`api` for a session that was created by `POST /v1/sessions`, `call` for one that its first call opened."""
    continues: str | None = None
    """The session that this one continues: its application kept its id after that session was over."""
    status: SessionStatus = SessionStatus.OPEN
    termination_reason: str | None = None
    reward: float | None = None
    """The session's reward as credit sees it; None before any reward came."""
    trained_in: tuple[TrainedIn, ...] = ()
    """The updates that trained it, oldest first; more than one where a group was trained again."""
    num_turns: int = 0
    num_chains: int = 0
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    last_active_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    ended_at: datetime.datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, one sampled choice, as it is stored: only what came after its parent."""

    turn_id: str
    """The completion's id that the client got; with n > 1, `…#1`, `…#2` for the later choices."""
    session_id: str
    tenant: str = "default"
    parent_turn_id: str | None = None
    """The turn whose tokens this one's prompt extends; None at the root of a chain."""
    chain_id: str
    """The turn that started this chain; given by the store. The first child of a turn continues its chain."""
    seq: int = -1
    """Order of commit within the session, from 0; given by the store."""
    step: int | None = None
    """Iteration of the agent's loop; None lets the store take the turn's `seq`."""
    dialect: str = "chat"
    """Wire format the client spoke: chat, completions, responses, messages."""
    model: str = ""
    messages: list[Json] = dataclasses.field(default_factory=list)
    """Messages after the parent's reply; at the root all of them."""
    tools: list[Json] | None = None
    """Tool schemas, at the root only: along a chain they never change."""
    sampling: Json = dataclasses.field(default_factory=dict)
    """The call's other parameters, as they were asked for."""
    response: Json = dataclasses.field(default_factory=dict)
    """The assistant's message."""
    prompt_delta: TokenIds = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt tokens after the parent's last sampled one; at the root the whole prompt. [P - parent's P + R]"""
    prompt_length: int = 0
    """P, tokens of the whole prompt."""
    token_ids: TokenIds = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Sampled tokens, end-of-turn included. [R]"""
    logprobs: Logprobs = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))
    """Behaviour logprobs of `token_ids`. [R]"""
    finish_reason: str | None = None
    outcome: Outcome = Outcome.EXACT
    reason: str | None = None
    """Why the outcome is not `exact`, or why an exact root left the chain it seemed to extend."""
    role: Role | None = None
    """The role of its chain; None on turns of older releases counts as `main`."""
    role_reason: str | None = None
    """How the role was found, or `corrected`."""
    policy_version_first: int = 0
    """Policy version that sampled the first token."""
    policy_version_last: int = 0
    """Policy version that sampled the last token; differs from the first when a reload came in between."""
    history_digest: bytes = b""
    """Digest of tools, template arguments, messages and reply: what a request must repeat to extend this turn."""
    messages_digest: bytes = b""
    """The same without tools and template arguments; tells `tools_changed`."""
    dialogue_digest: bytes = b""
    """The same without system messages as well; tells `system_changed`."""
    request_key: str | None = None
    """Idempotency key of the call and choice; a retried call finds its turn by it."""
    request_digest: bytes | None = None
    """Digest of the request under the idempotency key: another request under the same key is refused."""
    inferred_by: str | None = None
    """API key whose calls find this turn by the conversation that they repeat; None where they name their session."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    ttft_seconds: float | None = None
    """From the call to the first token; None when no token came, or none was seen apart from the others."""
    duration_seconds: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values alone, as plain as can be: each turn goes to the process that stores it."""
        arrays = (
            np.asarray(self.prompt_delta, np.int32).tobytes(),
            np.asarray(self.token_ids, np.int32).tobytes(),
            np.asarray(self.logprobs, np.float32).tobytes(),
        )
        return _turn_of, (*arrays, self.created_at.timestamp(), self.outcome.value, *_plain_values(self))


_PLAIN_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(Turn)
    if field.name not in ("prompt_delta", "token_ids", "logprobs", "created_at", "outcome")
)
_plain_values = operator.attrgetter(*_PLAIN_FIELDS)


def _turn_of(
    prompt_delta: bytes, token_ids: bytes, logprobs: bytes, created_at: float, outcome: str, *values: Any
) -> Turn:
    return Turn(
        prompt_delta=np.frombuffer(prompt_delta, np.int32),
        token_ids=np.frombuffer(token_ids, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        created_at=datetime.datetime.fromtimestamp(created_at, datetime.UTC),
        outcome=Outcome(outcome),
        **dict(zip(_PLAIN_FIELDS, values, strict=True)),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One line of the ledger. Append-only: a later line with the same target and name revises an earlier one."""

    session_id: str
    tenant: str = "default"
    turn_id: str | None = None
    """The one turn it is for; None with a step or for the whole session."""
    step: int | None = None
    """The step it is for; None with a turn or for the whole session."""
    value: float
    name: str = "reward"
    """Rewards of different names on one target add up."""
    source: str | None = None
    """Who judged: a verifier, a person, a model; free text."""
    written_by: str | None = None
    """The key that wrote it; filled in by the proxy."""
    reward_id: int | None = None
    """Order of arrival; given by the store."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A version of the served model."""

    version: int
    path: str
    """Directory with the weights, as the engine sees it."""
    kind: PolicyKind = PolicyKind.FULL
    status: PolicyStatus = PolicyStatus.PUBLISHED
    update_id: int | None = None
    """The trainer's update that made it; None for version 0 and for what was published by hand."""
    metrics: Json = dataclasses.field(default_factory=dict)
    error: str | None = None
    """Why engines would not take it, or why a canary was rolled back."""
    reload_seconds: float | None = None
    """How long engines were paused for it."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    activated_at: datetime.datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EID:
    """Identity of an experience, as in Trinity-RFT."""

    batch: str = ""
    task: str = ""
    run: int = 0
    step: int = 0
    suffix: str = ""

    @property
    def uid(self) -> str:
        """All of it: `batch/task/run/step/suffix`."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The stored, trainable unit: one turn, or one chain of turns merged into one sequence."""

    eid: EID
    session_id: str
    group_id: str
    tenant: str = "default"
    turn_ids: tuple[str, ...]
    """The turns whose sampled tokens are trained here, in order. [K]"""
    turn_steps: tuple[int, ...]
    """Step of each turn. [K]"""
    tokens: TokenIds
    """Prompt and sampled tokens, the prompt tokens between turns included. [L]"""
    prompt_length: int
    """Tokens before the first sampled one."""
    loss_mask: npt.NDArray[np.bool_]
    """True where a token was sampled and is trained. [L]"""
    turn_index: TokenIds
    """Which of `turn_ids` sampled the token; -1 where none did. [L]"""
    logprobs: Logprobs
    """Behaviour logprobs; 0 where `loss_mask` is False. [L]"""
    turn_rewards: npt.NDArray[np.float64]
    """Reward of each turn after credit assignment. [K]"""
    turn_returns: npt.NDArray[np.float64]
    """Return of each turn: `turn_rewards` after bonus and discount. [K]"""
    reward: float
    """Reward of the whole session."""
    policy_version_first: int
    """Oldest policy version among the turns."""
    policy_version_last: int
    """Newest policy version among the turns."""
    split: Split = Split.TRAIN
    trained_in: tuple[TrainedIn, ...] = ()
    """The updates that trained one of its turns, oldest first."""
    metrics: Json = dataclasses.field(default_factory=dict)
    info: Json = dataclasses.field(default_factory=dict)

    @property
    def group_key(self) -> GroupKey:
        """The group that it is centred in."""
        return self.tenant, self.group_id

    @property
    def session_key(self) -> SessionKey:
        """The session that it is of."""
        return self.tenant, self.session_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update: what the trainer did with one batch, committed together with the acks of the groups it used.

    An update takes one or more optimizer steps and makes one policy version, or none if nothing could be trained on.
    """

    update_id: int
    """Count of batches, from 1. A repeated commit of the same update is recognised by it."""
    trainer_id: str
    policy_version: int
    """The version that came out of it."""
    num_groups: int
    num_sessions: int
    num_tokens: int
    """Sampled tokens that carried loss."""
    metrics: Json = dataclasses.field(default_factory=dict)
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
