"""What is captured of an engine's reply, whole or so far.

Logprobs and the prompt's ids, most of a reply's bytes, stay JSON, which the writer decodes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping

import msgspec

from turnwise.types import Json, Turn

SENT = b"-0"
"""Stands for the ids of the prompt that was sent, where the engine returns these; no engine writes an id so."""


@dataclasses.dataclass(slots=True)
class Choice:
    """One sampled choice, complete or so far."""

    fields: Json = dataclasses.field(default_factory=functools.partial(dict, role="assistant", content=None))
    """The message's fields, without the texts of a stream."""
    texts: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The message's texts in the parts of a stream, by field."""
    arguments: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    """The arguments of its tool calls in the parts of a stream, by the call's index."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[bytes] = dataclasses.field(default_factory=list)
    """The sampled tokens' logprobs as JSON, one value for each part of the reply; decoded by the writer."""
    finish_reason: str | None = None
    prompt_ids: bytes = b""
    """As `Captured.prompt_ids`, where the choices of one call have different prompts; otherwise empty."""
    routed_experts: str | None = None
    """Experts of each token by layer, as an .npy array in base64; None unless the engine returns them."""

    def message(self) -> Json:
        """Return the message so far."""
        for index, parts in self.arguments.items():
            self.fields["tool_calls"][index]["function"]["arguments"] = "".join(parts)
        return self.fields | {field: "".join(parts) for field, parts in self.texts.items()}


@dataclasses.dataclass(slots=True)
class Captured:
    """Everything that the engine has returned for one call."""

    prompt_ids: bytes = b""
    """Ids of the prompt as decimal numbers, separated by commas: the writer decodes them. `SENT` for those that were
    sent."""
    choices: dict[int, Choice] = dataclasses.field(default_factory=dict)
    models: set[str] = dataclasses.field(default_factory=set)
    """The models and adapters that the engine says it has sampled with; one, unless it has mixed calls up."""
    has_routing: bool = False
    """Whether the engine has returned the experts of the tokens."""


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None
    """On the chat route."""
    token_logprobs: list[float | None] | None = None
    """On the completions route."""


_logprobs = msgspec.json.Decoder(list[_Logprobs | None])
_logprob_of = operator.attrgetter("logprob")


def read_logprobs(pieces: Iterable[bytes]) -> list[float | None]:
    """Return the logprobs of the sampled tokens; an empty list if the JSON has another shape."""
    found: list[float | None] = []
    try:
        for piece in _logprobs.decode(b"[%b]" % b",".join(pieces)):
            if piece is not None:
                found += map(_logprob_of, piece.content or ())
                found += piece.token_logprobs or ()
    except msgspec.DecodeError:
        return []
    return found


def sampled_tokens(turn: Turn, texts: Mapping[int, str]) -> list[tuple[str, float]]:
    """Return each sampled token of a stored turn as its text, or vLLM's name of an id without one, with its logprob."""
    ids = turn.token_ids.tolist()
    names = [texts.get(token, f"token_id:{token}") for token in ids]
    return list(zip(names, turn.logprobs.tolist(), strict=True))
