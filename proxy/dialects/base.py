"""One call and its reply in canonical form: whatever dialect a client speaks, the rest of the proxy sees these."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from proxy.dialects import sse
from turnwise.types import Json, TokenIds

TEMPLATE_FIELDS = ("chat_template", "documents")
"""Request fields besides `chat_template_kwargs` that a chat template sees."""
NOT_SAMPLING = frozenset({"messages", "tools", "metadata", "kv_transfer_params", "model", "stream", "stream_options"})
"""Request fields that are stored elsewhere, or say nothing about sampling."""


class Encoder(Protocol):
    """Writes the events of one streamed reply; a dialect that is the engine's own needs none of its own."""

    def chunks(self, chunks: list[bytes]) -> bytes:
        """Return the events that tell what chunks of the engine, stripped, tell; there may be none."""

    def done(self) -> bytes:
        """Return the events that end the stream."""

    def error(self, body: bytes) -> bytes:
        """Return the event that tells of an OpenAI-shaped error in the middle of the stream."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Call:
    """What a client asked for."""

    dialect: Dialect
    body: Json
    """What the engine is asked; unknown fields pass through."""
    messages: list[Json]
    """The conversation; empty for a bare text prompt."""
    stream: bool
    num_choices: int
    wants_logprobs: bool
    wants_token_ids: bool
    session_id: str | None = None
    step: int | None = None
    inferred_by: str | None = None
    """The API key that the session was inferred for, because the call names none."""
    idempotency_key: str | None = None
    is_retry: bool = False
    """The SDK marked the call as a repetition of an earlier one."""
    encoder: Encoder = dataclasses.field(default_factory=sse.Verbatim)
    """Writes the reply's events, if it is streamed."""
    asked: Json = dataclasses.field(default_factory=dict)
    """The request in the client's own words, where those are not the engine's."""
    previous_turn_id: str | None = None
    """The turn that the call goes on from without repeating it."""
    notes: Json = dataclasses.field(default_factory=dict)
    """What else is stored with the sampling parameters, because the dialect must know it to go on from the turn."""

    @property
    def model(self) -> str:
        """The model that was asked for; empty lets the engine choose."""
        return str(self.body.get("model") or "")

    @property
    def tools(self) -> list[Json] | None:
        """Tool schemas, None when the model sees none."""
        return self.body.get("tools") or None

    @property
    def template_arguments(self) -> Json:
        """What the chat template sees besides messages and tools."""
        arguments = dict(self.body.get("chat_template_kwargs") or {})
        effort = self.body.get("reasoning_effort")
        if effort is not None:
            arguments["reasoning_effort"] = effort
            arguments.setdefault("enable_thinking", effort != "none")
        arguments.update({field: self.body[field] for field in TEMPLATE_FIELDS if self.body.get(field) is not None})
        return arguments

    @property
    def sampling(self) -> Json:
        """Everything else that was asked for, as it is stored with the turn."""
        return {key: value for key, value in self.body.items() if key not in NOT_SAMPLING} | self.notes

    @property
    def continues_final_message(self) -> bool:
        """Whether the client sampled on from a message of its own, so that the prompt ends inside it."""
        body = self.body
        return bool(
            body.get("continue_final_message") or body.get("echo") or body.get("add_generation_prompt") is False
        )


@dataclasses.dataclass(slots=True)
class Choice:
    """One sampled choice, as far as it has come."""

    message: Json = dataclasses.field(default_factory=lambda: {"role": "assistant", "content": None})
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[bytes] = dataclasses.field(default_factory=list)
    """JSON of the sampled tokens' logprobs, in pieces as the engine told them; read where they are stored."""
    finish_reason: str | None = None
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    """Where choices of one call have different prompts; otherwise empty."""


@dataclasses.dataclass(slots=True)
class Captured:
    """Everything that the engine said in one call."""

    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    choices: dict[int, Choice] = dataclasses.field(default_factory=dict)
    model: str = ""

    def choice(self, index: int) -> Choice:
        """Return a choice, which may be new."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = Choice()
        return found

    def is_finished(self, num_choices: int) -> bool:
        """Say whether every choice has come to its end."""
        return len(self.choices) >= num_choices and all(
            choice.finish_reason is not None for choice in self.choices.values()
        )


class Dialect(Protocol):
    """One wire format: between the client's words and the engine's, and back."""

    name: str
    """As it is stored with a turn."""
    route: str
    """The route that clients call."""
    engine_route: str
    """The engine's route that serves it."""
    id_prefix: str
    """What stands before the call's id in the completion's id."""

    def parse(self, body: Json, *, max_choices: int, max_messages: int) -> Call:
        """Check what the proxy itself relies on; the engine judges the rest.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """

    def engine_body(self, call: Call, prompt_token_ids: TokenIds | None, pinned: Json) -> Json:
        """Return what the engine is asked, so that it tells everything that capture needs."""

    def take_reply(self, raw: bytes, call: Call) -> tuple[Captured, bytes]:
        """Capture a whole reply, and return it without what the client did not ask for.

        Raises:
            msgspec.DecodeError: it is not what the engine's route answers.
        """

    def take_chunks(self, events: list[bytes], captured: Captured, call: Call) -> list[bytes]:
        """Capture chunks of a stream, and return those that the client would have got, stripped.

        Raises:
            msgspec.DecodeError: one is not what the engine's route streams.
        """

    def encode_reply(self, reply: bytes, call: Call) -> bytes:
        """Return a captured and stripped reply in the client's words."""

    def encode_error(self, status: int, body: bytes) -> bytes:
        """Return an OpenAI-shaped error body in the client's words."""
