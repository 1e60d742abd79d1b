"""A call, its captured reply and the interface of a dialect: the rest of the proxy sees only these types.

Of a reply the logprobs and the prompt's ids, most of its bytes, stay JSON, which the writer decodes.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

from turnwise.json_text import dumps
from turnwise.types import DEFAULT_POLICY, Json, PolicyVersion, Turn

OPENAI_ERROR_SCHEMA: Json = {"$ref": "#/components/schemas/ErrorAnswer"}

TEMPLATE_FIELDS = ("chat_template", "documents")
"""Request fields besides `chat_template_kwargs` that are arguments of the chat template."""
ENDED = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of a reply that the model itself has ended."""
SAMPLED_ENDS = ENDED | {"length"}
SYSTEM_ROLES = ("system", "developer")
NOT_SAMPLING = frozenset({"messages", "tools", "metadata", "model", "stream", "stream_options"})


class Encoder(Protocol):
    """Writes the events of one streamed reply."""

    content_type: str
    keep_alive: bytes
    """What every client ignores between two events."""

    def chunks(self, chunks: list[bytes]) -> bytes: ...

    def done(self) -> bytes: ...

    def error(self, body: bytes, status: int | None = None) -> bytes: ...


DONE = b"[DONE]"
EVENT_STREAM = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
"""Every client of server-sent events ignores it."""


def event(data: bytes) -> bytes:
    """Return a server-sent event as vLLM sends them: `data: …` and an empty line."""
    return b"data: %b\n\n" % data


END = event(DONE)


class Verbatim:
    """Writes the engine's own events."""

    __slots__ = ()
    content_type = EVENT_STREAM
    keep_alive = COMMENT

    def chunks(self, chunks: list[bytes]) -> bytes:
        return b"data: %b\n\n" % b"\n\ndata: ".join(chunks) if chunks else b""

    def done(self) -> bytes:
        return END

    def error(self, body: bytes, status: int | None = None) -> bytes:  # noqa: ARG002
        return event(body)


def template_arguments(fields: Json) -> Json:
    """Return the arguments of the chat template besides messages and tools, as vLLM derives them from a request."""
    arguments = dict(fields.get("chat_template_kwargs") or {})
    effort = fields.get("reasoning_effort")
    if effort is not None:
        arguments["reasoning_effort"] = effort
        arguments.setdefault("enable_thinking", effort != "none")
    arguments.update({field: fields[field] for field in TEMPLATE_FIELDS if fields.get(field) is not None})
    return arguments


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """One request for a sampled reply, in canonical form."""

    dialect: Dialect
    body: Json
    messages: list[Json]
    """The conversation; empty for a bare text prompt."""
    model: str
    """The name that the call asks for; empty without one."""
    stream: bool
    num_choices: int
    wants_logprobs: bool
    wants_token_ids: bool
    engine_fields: Json = dataclasses.field(default_factory=dict)
    """Fields that features add to the engine's request, beside what capture needs."""
    hides: dict[str, re.Pattern[bytes]] = dataclasses.field(default_factory=dict)
    """The texts of a reply that features have asked for and the client does not get, by names of their own."""
    hides_thinking: bool = False
    """Whether the client asked for no reasoning; it then gets no token ids and logprobs either, as from vLLM."""
    session_id: str | None = None
    """The session that the call names, or whose key it has; None if it names none."""
    session_source: str | None = None
    """Where the request names it: `path`, `x-session-id`, `metadata`, or the name of a native id."""
    agent_id: str | None = None
    agent: str | None = None
    train: bool = True
    """False: the call, or its key, denies that its session is trained."""
    record: bool = True
    """False: it denies that anything of its session is stored, too."""
    step: int | None = None
    idempotency_key: str | None = None
    is_retry: bool = False
    make_encoder: Callable[[], Encoder] = Verbatim
    encoder: Encoder = dataclasses.field(default_factory=Verbatim)
    original: Json = dataclasses.field(default_factory=dict)
    previous_turn_id: str | None = None
    """The stored turn that the call continues without repeating its messages."""
    messages_json: bytes = b""
    """The JSON array of the messages for the engine; empty until the messages have been read."""
    policy_id: int = DEFAULT_POLICY
    names_policy: bool = False
    """Whether the call names that policy as its model; otherwise it is its key's."""
    policy_version: PolicyVersion | None = None
    """The version that the call names as its model, as `NAME@VERSION`; None where it names none."""
    images: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The files that its messages name, by their digests."""
    media: Any = None
    """What brings its content that is not text to the engine (`proxy.features.images.MediaOfCall`), or None."""
    notes: Json = dataclasses.field(default_factory=dict)
    """Facts that are stored with the sampling parameters, because the dialect needs them to resume from the turn."""

    def encode_with(self, make_encoder: Callable[[], Encoder]) -> None:
        self.make_encoder, self.encoder = make_encoder, make_encoder()

    @property
    def tools(self) -> list[Json] | None:
        return self.body.get("tools") or None

    @property
    def sampling(self) -> Json:
        return {key: value for key, value in self.body.items() if key not in NOT_SAMPLING} | self.notes


SENT = b"-0"
"""Stands for the ids of the prompt that was sent, where the engine returns these; no engine writes an id so."""


CallKey: TypeAlias = tuple[int, int]
"""The index of a tool call in a stream, and its number among the calls of that index; keys sort as the calls do."""
NO_INDEX = 2**31


def call_key(index: Any, call_id: str, name: str, ids: dict[int, list[str]]) -> CallKey:
    """Return the call that a part of a stream belongs to.

    Some engines leave the index out, or give it to several calls: a new id with a name begins a call, and without an
    index each name does; a known id goes on with its call.

    Args:
        index: the part's `index`.
        call_id: the part's id, empty in most parts.
        name: its function's name, empty in most parts.
        ids: the ids of the calls so far, by index; the part's is added.
    """
    place = index if isinstance(index, int) else NO_INDEX
    known = ids.setdefault(place, [])
    if call_id and call_id in known:
        return place, known.index(call_id)
    has_new_id = bool(call_id) and known[-1:] not in ([], [""])
    if not known or (name and has_new_id) or (place == NO_INDEX and (name or has_new_id)):
        known.append(call_id)
    known[-1] = known[-1] or call_id
    return place, len(known) - 1


def joined_name(known: str, part: str) -> str:
    """Return the name of a call so far: some engines and gateways send it in parts, others whole with each part."""
    return part if part.startswith(known) else known + part


def call_part(part: Json) -> tuple[str, str, str]:
    """Return the id, name and arguments of a part of a tool call; all are empty where the parser had nothing to say."""
    function = part.get("function") or {}
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
    return part.get("id") or "", function.get("name") or "", text


@dataclasses.dataclass(slots=True)
class Choice:
    """One sampled choice, complete or so far."""

    fields: Json = dataclasses.field(default_factory=functools.partial(dict, role="assistant", content=None))
    texts: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    calls: dict[CallKey, tuple[Json, list[str]]] = dataclasses.field(default_factory=dict)
    """The tool calls of a stream, with the pieces of their arguments."""
    call_ids: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[bytes] = dataclasses.field(default_factory=list)
    """The sampled tokens' logprobs as JSON, one value for each part of the reply; decoded by the writer."""
    finish_reason: str | None = None
    prompt_ids: bytes = b""
    """As `Captured.prompt_ids`, where the choices of one call have different prompts; otherwise empty."""
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the engine has returned of it that becomes a part of its turn, by the part's name."""

    def message(self) -> Json:
        for call, pieces in self.calls.values():
            call["function"]["arguments"] = "".join(pieces)
        if self.calls:
            self.fields["tool_calls"] = [self.calls[key][0] for key in sorted(self.calls)]
        return self.fields | {field: "".join(parts) for field, parts in self.texts.items()}


@dataclasses.dataclass(slots=True)
class Captured:
    """Everything that the engine has returned for one call."""

    prompt_ids: bytes = b""
    """Ids of the prompt as decimal numbers, separated by commas: the writer decodes them. `SENT` for those that were
    sent."""
    choices: dict[int, Choice] = dataclasses.field(default_factory=dict)
    said: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """The first group of the first text that `Call.hides` has found, by the same names."""
    models: set[str] = dataclasses.field(default_factory=set)
    """The models and adapters that the engine says it has sampled with; one, unless it has mixed calls up."""
    gives: set[str] = dataclasses.field(default_factory=set)
    """The parts of turns that the engine has returned."""
    usage: bytes = b"null"
    """The engine's last count of tokens, as JSON."""


def sampled_tokens(turn: Turn, texts: Mapping[int, str]) -> list[tuple[str, float]]:
    """Return each sampled token of a stored turn as its text, or vLLM's name of an id without one, with its logprob."""
    ids = turn.token_ids.tolist()
    names = [texts.get(token, f"token_id:{token}") for token in ids]
    return list(zip(names, turn.logprobs.tolist(), strict=True))


class Action(enum.StrEnum):
    """What a route of the data plane does."""

    SAMPLE = "sample"
    COUNT_TOKENS = "count_tokens"
    LIST_MODELS = "list_models"
    GET_MODEL = "get_model"
    GET_REPLY = "get_reply"
    COMPACT = "compact"


SESSION_PREFIX = "/sessions/{session_id}"
MAX_MESSAGES = 10_000
"""Maximum number of messages of one call, or of prompts."""
MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
}
STREAM: Json = {"type": "boolean", "default": False}
IDENTITY: Json = {
    "type": "object",
    "properties": {
        "session_id": {"type": "string"},
        "step": {"type": ["integer", "string"], "minimum": 0, "maximum": 2**31 - 1},
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WireRoute:
    """One route of a dialect, with its OpenAPI description; it is also served under `/sessions/{session_id}`."""

    method: str = "POST"
    path: str
    """Starlette's syntax: `{name}` is a path parameter, `{name:path}` one that may hold slashes, and `{name:model}` one
    that does not end in `:someMethod`."""
    action: Action = Action.SAMPLE
    summary: str
    required: tuple[str, ...] = ()
    properties: Mapping[str, Json] = dataclasses.field(default_factory=dict)


class Dialect(abc.ABC):
    """One wire format: translates requests to engine requests, and engine replies to the client's format.

    A dialect is registered in `proxy.features`; routes, error shapes and the OpenAPI document derive from it.
    """

    name: ClassVar[str]
    routes: ClassVar[Sequence[WireRoute]]
    error_prefixes: ClassVar[tuple[str, ...]] = ()
    """Path prefixes under which unknown routes are answered in this dialect's error shape."""
    marker_header: ClassVar[bytes] = b""
    """Header that only this format's clients send; it selects the dialect on routes that several formats share."""
    error_schema: ClassVar[Json] = OPENAI_ERROR_SCHEMA
    engine_route: ClassVar[str]
    id_prefix: ClassVar[str]
    object_names: ClassVar[tuple[str, str]]
    reads_url: ClassVar[bool] = False
    """Whether the URL carries parameters of a call: without them it skips `normalise_headers` and `merge_url`."""

    def normalise_headers(self, headers: dict[bytes, bytes], query: Mapping[str, str]) -> dict[bytes, bytes]:  # noqa: ARG002
        return headers

    def merge_url(self, body: Json, route: WireRoute, params: Mapping[str, str], query: Mapping[str, str]) -> Json:  # noqa: ARG002
        return body

    def referenced_turns(self, body: Json) -> list[str]:  # noqa: ARG002
        return []

    def resolve_references(self, body: Json, stored: Mapping[str, Json]) -> Json:  # noqa: ARG002
        """Return the body with the replies of the turns that it refers to; `stored` holds replies by turn id."""
        return body

    @abc.abstractmethod
    def parse(self, body: Json, *, failed_tool_text: str = "") -> Call:
        """Return the call that a request asks for; check only the fields that the proxy itself reads.

        `failed_tool_text` stands before the results of failed tool calls.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """

    @abc.abstractmethod
    def rebuild_choice(self, call: Call, turn: Turn, index: int, texts: Mapping[int, str]) -> Json:
        """Return a stored choice in the format of the engine's route: of a whole reply, or of a stream's chunk.

        Logprobs name the sampled tokens alone, by their `texts`: the most likely other tokens are not stored.
        """

    def encode_reply(self, reply: bytes, call: Call) -> bytes:  # noqa: ARG002  the engine's format is the client's
        """Return a captured and stripped reply in the client's format.

        Raises:
            EngineUnavailable: the engine cut the reply off, and the client's format cannot say so.
        """
        return reply

    def encode_error(self, status: int, body: bytes) -> bytes:  # noqa: ARG002  the engine's format is the client's
        return body

    def encode_models(self, models: list[Json]) -> Json:
        """Return the answer of a `LIST_MODELS` route, from OpenAI's descriptions of the models."""
        return {"object": "list", "data": models}

    def encode_model(self, model: Json) -> Json:
        return model
