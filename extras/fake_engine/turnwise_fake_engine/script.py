"""A script of the fake engine: its replies, pace and faults, built by a test or read from a JSON file.

Rules match the last message, so that concurrent callers get their own replies in any order of arrival. Without a
matching rule the engine calls a tool if tools are offered, writes JSON if a schema is given, and otherwise repeats the
user's message.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal, Self

import pydantic

from turnwise.errors import SettingsError


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)


class FaultKind(enum.StrEnum):
    """Kinds of faults."""

    STATUS = "status"
    """An error status instead of the reply."""
    RESET = "reset"
    """The connection is reset before the first byte."""
    RESET_STREAM = "reset_stream"
    """The connection is reset after some chunks; a plain reply is cut in the middle."""
    HANG = "hang"
    """No byte is sent until the client disconnects."""
    HANG_STREAM = "hang_stream"
    """No byte is sent after some chunks until the client disconnects."""
    MALFORMED = "malformed"
    """Invalid JSON."""
    NO_CHOICES = "no_choices"
    """A plain reply without a choice."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105  a kind of fault
    """A reply without the requested token ids."""
    ANOTHER_MODEL = "another_model"
    """A reply that names another model than the call."""
    SLOW_FIRST_TOKEN = "slow_first_token"  # noqa: S105  a kind of fault
    """The reply starts late."""


class Fault(_Strict):
    """A fault for the next calls, or for a call that requests it."""

    kind: FaultKind
    count: int = 1
    """Number of calls that it applies to."""
    status: int = 500
    """The status, for `status`."""
    after_chunks: int = 2
    """Chunks that are sent before the fault, for `reset_stream` and `hang_stream`."""
    seconds: float = 1.0
    """Delay of the first token, for `slow_first_token`."""
    contains: str | None = None
    """Applies only to calls whose last message contains this text."""

    @classmethod
    def from_header(cls, value: str) -> Self:
        """Parse `kind` or `kind;field=value;…`, the form of the `X-Fake-Fault` header.

        Raises:
            ValueError: the header names no fault.
        """
        kind, *fields = (part.strip() for part in value.split(";"))
        return cls.model_validate({"kind": kind, **dict(field.split("=", 1) for field in fields if field)})


class ToolCall(_Strict):
    """One tool call of a scripted reply."""

    name: str
    arguments: dict[str, Any] | str = pydantic.Field(default_factory=dict)
    """An object, or the exact text of one."""


class Reply(_Strict):
    """The reply to one call."""

    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = pydantic.Field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort", "error", "repetition", "content_filter"] = "stop"
    """Any value but `stop` omits the end-of-turn token, as in a truncated reply."""
    pace_seconds: float | None = None
    """Delay before each token; None: the script's pace."""
    choices: list[Reply] = pydantic.Field(default_factory=list)
    """Replies of the second and later choices, for n > 1; without them they are variations of the first."""


class Rule(_Strict):
    """A reply and its condition."""

    reply: Reply
    contains: str | None = None
    """Text that the last message must contain; None matches all."""
    count: int | None = None
    """How often the rule may answer; None for no limit."""
    needs_tools: bool = False
    """Whether the call must offer tools."""


class Script(_Strict):
    """The settings of a fake engine."""

    model: str = "fake"
    rules: list[Rule] = pydantic.Field(default_factory=list)
    """The first matching rule answers."""
    faults: list[Fault] = pydantic.Field(default_factory=list)
    pace_seconds: float = 0.0
    """Delay before each token; 0 sends without delay."""
    load_seconds: float = 0.0
    """How long it takes to load weights from a directory."""
    tokens_per_chunk: int = pydantic.Field(default=1, ge=1)
    max_model_len: int = 32768
    enforces_strict_tools: bool = False
    """Whether it says that it samples calls of strict tools under a grammar; what it says, no grammar constrains."""
    lora: bool = False
    """Whether it was started with LoRA: it has the routes that load adapters, and a metric of them."""
    routed_layers: int = 0
    """Layers of the mixture of experts whose routing whole replies contain: token 7 goes to experts 7 and 8 of 256 in
    layer 0, to 8 and 9 in layer 1, and so on; 0 returns none, as a vLLM without --enable-return-routed-experts."""
    returns_supports: bool = False
    """Say which ids could be sampled, as a vLLM with our plug-in. Of the parameters only top-k leaves some out here."""
    max_logprobs: int = 20
    """Most alternatives that it says that a call may ask for."""
    weight_transfer: bool = False
    """Take weights from a trainer's memory, as a vLLM that was started with our backend."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """`raw_logprobs` ignores the temperature, as vLLM does by default."""
    default_temperature: float = 1.0
    """Temperature of requests that set none, as vLLM takes it from the model's generation_config.json."""
    logprob_shifts: dict[str, float] = pydantic.Field(default_factory=dict)
    """By the name of a directory of weights or of an adapter: nats that this version adds to the logprobs of tokens
    that are requested by id (`logprob_token_ids`), so that its logprobs differ from other versions'."""
    honours_prompt_token_ids: bool = True
    """Whether `kv_transfer_params.prompt_token_ids` replaces the prompt."""
    cached_tokens: int | None = None
    """Tokens of each prompt that it says it had in its cache, as a vLLM with --enable-prompt-tokens-details."""
    call_tools: bool = True
    """Whether `tool_choice: auto` calls a tool after a user's message."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a script from a JSON file.

        Raises:
            SettingsError: the file does not exist or is not a script.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise SettingsError(f"cannot read the script {str(path)!r}: {error.strerror}; name a JSON file") from error
        except pydantic.ValidationError as error:
            raise SettingsError(f"{str(path)!r} is not a script for the fake engine: {error}") from error

    def take_reply(self, last_message: str, *, offers_tools: bool = False) -> Reply | None:
        """Return the reply of the first rule that matches, and count it."""
        for rule in self.rules:
            if rule.needs_tools and not offers_tools:
                continue
            if rule.count != 0 and (rule.contains is None or rule.contains in last_message):
                rule.count = None if rule.count is None else rule.count - 1
                return rule.reply
        return None

    def take_fault(self, last_message: str) -> Fault | None:
        """Return the first fault that applies to this call, and count it."""
        for fault in self.faults:
            if fault.count > 0 and (fault.contains is None or fault.contains in last_message):
                fault.count -= 1
                return fault
        return None
