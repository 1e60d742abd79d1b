"""The records that proxy, trainer, SDK and tables share; columns and JSON are derived from their fields.

Token arrays are numpy arrays, never lists, so a token id takes 4 bytes in memory and on disk; only the API converts
them to JSON. Shapes: P prompt tokens of a turn, R sampled tokens of a turn.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import hashlib
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
TokenIds = npt.NDArray[np.int32]
TOKEN_BYTES = 4
"""Of one token id, in memory and in the store."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities, one dimension."""
Parts = dict[str, bytes]
"""The parts of a turn by name; see `turnwise.parts`."""


GroupKey = tuple[str, str]
"""A group's tenant and id: ids are unique only within a tenant."""
SessionKey = tuple[str, str]


def name_digest(key: SessionKey | GroupKey) -> str:
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]


IMPORT = "import"
"""`Session.opened_by` of an imported session."""
DEFAULT_POLICY = 0
"""`policy_id` of the default policy: the served model, which all keys use that are bound to no other."""
DEFAULT_POLICY_NAME = "default"
LOCAL_KEY_NAME = "turnwise up"
"""Name of the key that `turnwise up` makes, beside which callers without a key may call the model and nothing more."""


def text_of(content: Any) -> str:
    """Return the text of a message's content: of a list of parts the texts, by lines."""
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, dict) else part for part in content)
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


utc_now = functools.partial(datetime.datetime.now, datetime.UTC)


class SessionStatus(enum.StrEnum):
    """States of a session: open → ended, or open → expired after a time without activity."""

    OPEN = "open"
    ENDED = "ended"
    EXPIRED = "expired"


class Split(enum.StrEnum):
    """Purpose of a session. Eval sessions are never trained."""

    TRAIN = "train"
    EVAL = "eval"


class Credit(enum.StrEnum):
    """How rewards are assigned to the turns of a session."""

    STEP_WISE = "step_wise"
    """Each turn gets the reward of its own step; a reward for the session counts for its last step."""
    PROPAGATE = "propagate"
    """Every turn gets the reward of the whole session."""


class Outcome(enum.StrEnum):
    """How a call ended. Each call has exactly one."""

    EXACT = "exact"
    """The prompt is the stored tokens of the turn it extends, or the root of a chain; the engine's echo confirms it."""
    RETOKENISED = "retokenised"
    """Captured completely, but the history was tokenised again, so the turn starts a new chain; `reason` says why."""
    ABORTED = "aborted"
    """The client disconnected or the stream broke; the tokens sampled until then are stored."""
    ERROR = "error"
    """The engine returned no completion: it rejected the call, failed or could not be reached."""
    UNTRAINABLE = "untrainable"
    """Served and stored, but not suitable for training; `reason` says why."""


class Role(enum.StrEnum):
    """Purpose of a chain in its session."""

    MAIN = "main"
    """The session's own agent."""
    SUB_AGENT = "sub_agent"
    """An agent that another agent started."""
    SUMMARY = "summary"
    """A turn that sums up a conversation, which its harness then goes on without: its credit is what follows."""
    SIDE = "side"
    """A call of the harness: a title, a topic, a probe."""
    RETRY = "retry"
    """A discarded attempt: the same prompt was sampled again."""


MAX_REWARD = 1e6
"""Largest absolute value of one reward line, so that sums of lines and their squares stay finite in float32."""
TRAINED_ROLES = frozenset({Role.MAIN, Role.SUB_AGENT, Role.SUMMARY})
"""Roles that are trained by default."""


class GroupStatus(enum.StrEnum):
    """States of a group: open → ready → claimed → trained | dropped; a claimed group with an expired lease is ready."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


class PolicyStatus(enum.StrEnum):
    """States of a policy version: published → (canary →) active → (holdout →) retired; or failed."""

    PUBLISHED = "published"
    CANARY = "canary"
    """A share of the sessions samples with it, to find out whether it may be served to all."""
    ACTIVE = "active"
    HOLDOUT = "holdout"
    """A share of the sessions still samples with it, to measure what later versions gain."""
    RETIRED = "retired"
    FAILED = "failed"


class PolicyKind(enum.StrEnum):
    """Content of a policy's directory."""

    FULL = "full"
    """All weights, safetensors in the Hugging Face layout."""
    LORA = "lora"
    """A PEFT adapter for the base model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedIn:
    """An update that trained a session, turn or experience."""

    update_id: int
    policy_version: int
    """The version that the update made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of an agent."""

    session_id: str
    tenant: str = "default"
    task_id: str | None = None
    run: int = 0
    """Which rollout of the task this is, from 0."""
    group_id: str | None = None
    """The group of rollouts whose rewards are compared; without one the session is its own group."""
    group_size: int | None = None
    """Number of sessions that complete the group."""
    split: Split = Split.TRAIN
    credit: Credit = Credit.PROPAGATE
    gamma: float = 0.0
    """Discount of the return over steps; 0 disables it."""
    sampling: Json = dataclasses.field(default_factory=dict)
    """Sampling parameters that override those of the session's calls."""
    explores: float | None = None
    """Temperature at which its greedy calls are sampled, because the exploration share takes it; None: as asked."""
    metadata: Json = dataclasses.field(default_factory=dict)
    user_id: str | None = None
    """The person or account that the agent serves, as the application names it: a filter, also of deletions."""
    key_id: str | None = None
    """The API key that opened it, or that made the session key that did; None for sessions of imports and feedback."""
    train: bool = True
    """False: nothing of it is trained, exported, judged or replayed. It does not become true again."""
    record: bool = True
    """False: its calls are served, and nothing that was said in them is stored; `train` is false too."""
    opened_by: str | None = None
    """`api` for a session created by `POST /v1/sessions`, `call` for one created by its first call, `import` for an
    imported one."""
    agent: str | None = None
    """The product that the `User-Agent` of the call that created it names first; None for other sessions."""
    continues: str | None = None
    """The session that this one continues: the application used the same id after that session was over."""
    policy_id: int = DEFAULT_POLICY
    """Its own policy, which samples the calls that name no other: its key's, `DEFAULT_POLICY` for a key without one. It
    never changes."""
    arm: int | None = None
    """The version whose arm, a canary or the hold-out, takes this session; set by the store at its creation. None: it
    samples with the served version."""
    status: SessionStatus = SessionStatus.OPEN
    termination_reason: str | None = None
    reward: float | None = None
    """The session's reward under its credit policy; None before its first reward."""
    trained_in: tuple[TrainedIn, ...] = ()
    """The updates that trained it, oldest first; more than one if its group was trained again."""
    num_turns: int = 0
    num_chains: int = 0
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    last_active_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    ended_at: datetime.datetime | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the values, because each new session is sent to the process that stores it and back."""
        return _session_of, _session_values(self)


_SESSION_FIELDS = tuple(field.name for field in dataclasses.fields(Session))
_session_values = operator.attrgetter(*_SESSION_FIELDS)


def _session_of(*values: Any) -> Session:
    return Session(**dict(zip(_SESSION_FIELDS, values, strict=True)))


@dataclasses.dataclass(slots=True, kw_only=True)
class Turn:
    """One model call with one sampled choice; it stores only the tokens and messages after its parent.

    It is not frozen only because every call makes one, and a frozen dataclass takes five times as long to initialise.
    """

    turn_id: str
    """The id of the completion that the client received; with n > 1, `…#1`, `…#2` for the later choices."""
    session_id: str
    tenant: str = "default"
    parent_turn_id: str | None = None
    """The turn whose tokens this one's prompt extends; None at the root of a chain."""
    chain_id: str
    """The turn that started this chain; set by the store. The first child of a turn continues its chain."""
    seq: int = -1
    """Order of commit within the session, from 0; set by the store."""
    step: int | None = None
    """Iteration of the agent's loop; for None the store sets the turn's `seq`."""
    dialect: str = "chat"
    """Wire format of the call: chat, completions, responses, messages or gemini."""
    model: str = ""
    policy_id: int = DEFAULT_POLICY
    """The policy that sampled it, as all turns of its chain."""
    messages: list[Json] = dataclasses.field(default_factory=list)
    """Messages after the parent's reply; at the root, all messages."""
    tools: list[Json] | None = None
    """Tool schemas, at the root only: they do not change within a chain."""
    sampling: Json = dataclasses.field(default_factory=dict)
    """The call's other parameters, as requested."""
    response: Json = dataclasses.field(default_factory=dict)
    """The assistant's message."""
    prompt_delta: TokenIds = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt tokens after the parent's last sampled token; at the root, the whole prompt. [P - parent's P + R]"""
    prompt_length: int = 0
    """P, the number of tokens of the whole prompt."""
    token_ids: TokenIds = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """Sampled tokens, including the end-of-turn token. [R]"""
    logprobs: Logprobs = dataclasses.field(default_factory=lambda: np.empty(0, np.float32))
    """Behaviour logprobs of `token_ids`. [R]"""
    finish_reason: str | None = None
    outcome: Outcome = Outcome.EXACT
    reason: str | None = None
    """Why the outcome is not `exact`, or why an exact root did not continue an existing chain."""
    role: Role | None = None
    """The role of its chain; None counts as `main`."""
    role_reason: str | None = None
    """How the role was determined, or `corrected`."""
    policy_version_first: int = 0
    """Policy version that sampled the first token; -1 for an imported reply, which no policy sampled. A whole reply
    does not show when its first token was sampled: this is the version that was served when its engine got the call."""
    policy_version_last: int = 0
    """Policy version that sampled the last token; differs from the first if a reload happened during the call."""
    history_digest: bytes = b""
    """Digest of tools, template arguments, messages and reply, all of which a call must repeat to extend this turn."""
    messages_digest: bytes = b""
    """The same without tools and template arguments; used to detect `tools_changed`."""
    dialogue_digest: bytes = b""
    """The same without tools, template arguments and system messages; used to detect `system_changed`."""
    request_key: str | None = None
    """Idempotency key of the call and choice; a retry finds its turn by this key."""
    request_digest: bytes | None = None
    """Digest of the request with the idempotency key: another request with the same key is rejected."""
    inferred_by: str | None = None
    """API key whose calls find this turn by its conversation; None if the call named its session."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    ttft_seconds: float | None = None
    """Time from the call to the first token; None without a token, or if the first token's time is unknown."""
    duration_seconds: float = 0.0
    parts: Parts = dataclasses.field(default_factory=dict)
    """What features keep of it, by the feature's name for it, as `turnwise.parts` packs them."""
    digest: bytes | None = None
    """Digest of the stored turn; set by the store. None before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One line of the ledger. Append-only: a later line with the same target and name replaces an earlier one."""

    session_id: str
    tenant: str = "default"
    turn_id: str | None = None
    """The turn that it is for; None for a step or for the whole session."""
    step: int | None = None
    """The step that it is for; None for a turn or for the whole session."""
    value: float
    name: str = "reward"
    """Name of the reward; rewards with different names on one target are added."""
    source: str | None = None
    """Source of the reward, such as a verifier, a person or a model; free text."""
    written_by: str | None = None
    """The API key that wrote it; set by the proxy."""
    reward_id: int | None = None
    """Order of arrival; set by the store."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    digest: bytes | None = None
    """Digest of the stored line; set by the store. None before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A named policy of a tenant: an adapter with its own versions, pin, arms and trainer state."""

    policy_id: int
    """Its number within the store; outside it is known by tenant and name."""
    tenant: str
    """Its owner; empty for the default policy, which all tenants share."""
    name: str
    base_version: int | None = None
    """The version that it samples with, and starts training from, before it has versions; None: the engine's model."""
    pinned_version: int | None = None
    """The version to serve although there are newer ones; None to follow the newest."""
    pinned_until: int | None = None
    """The pin ends when a version above this one is published; None keeps it."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    archived_at: datetime.datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A published state of a policy."""

    version: int
    """Unique over all policies, so that a turn's version names its weights."""
    policy_id: int = DEFAULT_POLICY
    """The policy that it is a version of."""
    path: str
    """Path of the directory with the weights, on the engine's machine."""
    kind: PolicyKind = PolicyKind.FULL
    status: PolicyStatus = PolicyStatus.PUBLISHED
    update_id: int | None = None
    """The update that made it; None for version 0 and for versions published by hand."""
    metrics: Json = dataclasses.field(default_factory=dict)
    error: str | None = None
    """Why engines could not load it, why its canary was rolled back, or why the publishing gate refused it."""
    reload_seconds: float | None = None
    """How long engines were paused to load it."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    activated_at: datetime.datetime | None = None
    weights_digest: str | None = None
    """Digest of its weights files, in hexadecimal; None for versions published by hand, and for a trainer's version
    until its files are complete."""
    model_digest: str | None = None
    """Digest of tokenizer and weights of version 0, in hexadecimal: all sessions and versions of a database belong to
    this one model. None for later versions, and for a model whose files are not on this machine."""
    arms: Json | None = None
    """Its sessions beside those of an older version, as last compared: `canary`, its own, and `control`, those of the
    version before it during its canary and of the hold-out while it is served. Each has `version`, `num_sessions`,
    `num_turns`, `broken_share` and `mean_reward`. `lift` has by the name of each reward, and for the whole as `reward`,
    the `mean` difference with the interval from `low` to `high`. None without an arm."""
    arm_share: float | None = None
    """The share of new sessions that its arm takes or took, as a canary or as the hold-out; None without one."""
    alarm: str | None = None
    """The sentinel that was beyond its bound while it was served, with its numbers; None without one."""

    @property
    def is_written(self) -> bool:
        """Whether its files are complete: a trainer offers a version from memory before it has written it."""
        return self.update_id is None or self.weights_digest is not None


def gauges(metrics: Json) -> Json:
    """Return what every tenant may read of a trainer's metrics: numbers, and why a batch was refused."""
    return {
        name: value for name, value in metrics.items() if isinstance(value, int | float | None) or name == "refused"
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One update: the training of one batch, committed together with the acks of its groups.

    An update takes one or more optimizer steps and makes one policy version, or none if no turn was trained.
    """

    update_id: int
    """Number of the batch, from 1, unique over all policies. A repeated commit of the same update has the same id."""
    policy_id: int = DEFAULT_POLICY
    """The policy that it trained."""
    trainer_id: str
    policy_version: int
    """The version that the update made."""
    num_groups: int
    num_sessions: int
    num_tokens: int
    """Number of sampled tokens that carried loss."""
    metrics: Json = dataclasses.field(default_factory=dict)
    """The gauges of the batch; of others than `gauges` returns, nothing is stored."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    batch_digest: str | None = None
    """Digest of the turns that it trained and of their advantages, in hexadecimal; set by the store."""


def values_of(value: Any) -> Any:
    """Return a record as JSON values, without the store's number of its policy."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value) if field.name != "policy_id")
        return {name: values_of(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [values_of(item) for item in value]
    if isinstance(value, dict):
        return {name: values_of(item) for name, item in value.items()}
    return value
