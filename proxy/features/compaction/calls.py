"""A call whose conversation the proxy changes, and one that is asked for a summary: what differs from another call."""

from __future__ import annotations

import abc
import dataclasses
import enum

from proxy.features.compaction.edits import Edit
from proxy.features.compaction.texts import END, PROMPT, framed, is_framed, with_prompt, without_prompt
from proxy.features.formats.translated import TranslatedCall
from proxy.features.roles.chains import KNOWN_TASK
from proxy.features.roles.prompts import ASKS_FOR_SUMMARY, COMPACTION
from proxy.sessions.conversation import canonical_content
from turnwise.errors import EngineUnavailable
from turnwise.store.turns import TurnView
from turnwise.types import Json, Turn

NOT_OF_A_SUMMARY = frozenset(
    {
        *("n", "stop", "tool_choice", "response_format", "structured_outputs", "logprobs", "top_logprobs"),
        *("continue_final_message", "add_generation_prompt"),
    }
)
"""Fields of a call that say nothing of the summary of its conversation."""
NOT_OF_A_CALL_BETWEEN = frozenset({"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"})
"""Fields that say how the client gets the reply which follows a summary, and how long that may be."""


class Form(enum.Enum):
    """What a reply that is a summary is for its client."""

    ENGINES = enum.auto()
    """Nothing: the proxy has asked for it, and reads what the engine has answered."""
    REPLY = enum.auto()
    """A reply of the format with the summary alone."""
    WINDOW = enum.auto()
    """OpenAI's list of the items that the next request begins with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """A summary that stands before a reply."""

    text: str
    reply_id: str
    """The id of the reply that it is."""
    usage: Json
    session_id: str


@dataclasses.dataclass(slots=True, kw_only=True)
class ManagedCall(TranslatedCall):
    """A call of a format in which the proxy may change the conversation."""

    edits: tuple[Edit, ...] = ()
    applied: list[Json] | None = None
    """What edits have cleared, for the reply; None of a request without edits."""
    form: Form | None = None
    """What its reply is if it is a summary; None if it is a reply to the client."""
    prompt: str = PROMPT
    """What asks for its summary."""
    summary: Summary | None = None
    """What the proxy has put in the place of its conversation."""
    continued: str | None = None
    """The session of the summary that the conversation begins with."""
    cleared: frozenset[int] = frozenset()
    """The indices of the messages whose thinking was cleared."""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of its reply: the session's is there once the session is known."""


def know_task(call: ManagedCall) -> None:
    """Let the words of a summary, which may speak of summaries, not count as what a call asks for."""
    last = call.messages[-1] if call.messages else {}
    rest = str(canonical_content(last.get("content"))).rpartition(END)[2]
    if is_framed(last) and COMPACTION.pattern.search(rest) is None:
        call.notes = call.notes | {KNOWN_TASK: ""}


def ask(call: ManagedCall, form: Form, prompt: str) -> None:
    """Let a call ask for a summary of its conversation, with the tools in its prompt that are there already."""
    call.form, call.prompt, call.num_choices = form, prompt, 1
    call.wants_logprobs = call.wants_token_ids = False
    messages = call.messages = with_prompt(call.messages, prompt)
    call.body = {name: value for name, value in call.body.items() if name not in NOT_OF_A_SUMMARY}
    call.body |= {"messages": messages} | ({"tool_choice": "none"} if call.tools else {})
    call.notes = call.notes | {KNOWN_TASK: ASKS_FOR_SUMMARY}


def asking(call: ManagedCall, prompt: str) -> ManagedCall:
    """Return the call by which the proxy itself asks for the summary of a call's conversation."""
    body = {name: value for name, value in call.body.items() if name not in NOT_OF_A_CALL_BETWEEN}
    key = call.idempotency_key
    own = dataclasses.replace(
        call, body=body, stream=False, edits=(), idempotency_key=None if key is None else f"{key}#summary"
    )
    ask(own, Form.ENGINES, prompt)
    return own


def go_on(call: ManagedCall, summary: Summary, kept: list[Json]) -> None:
    """Put a summary in the place of a call's conversation, and let the call go on in the summary's session."""
    call.summary = summary
    call.messages = [*kept, framed(summary.text)]
    call.body = {**call.body, "messages": call.messages}
    call.notes = call.notes | {KNOWN_TASK: ""}
    call.cleared = frozenset()
    if call.session_id is None:
        call.session_id, call.session_source = summary.session_id, "compaction"


class Managed(abc.ABC):
    """A format whose calls the proxy may change."""

    @abc.abstractmethod
    def encode_with(self, call: ManagedCall) -> None:
        """Let the reply of a call show what was changed, also where it is streamed."""


def is_summary(turn: Turn) -> bool:
    return turn.sampling.get(KNOWN_TASK) == ASKS_FOR_SUMMARY


def resumed(earlier: TurnView, kept_roles: tuple[str, ...]) -> TurnView:
    """Return a stored turn as a conversation that goes on from it, which of a summary has no more than that."""
    if not is_summary(earlier.turn):
        return earlier
    before = [each for each in without_prompt(earlier.messages, PROMPT) if each.get("role") in kept_roles]
    turn = dataclasses.replace(earlier.turn, response=framed(said(earlier.turn.response)))
    return dataclasses.replace(earlier, messages=before, turn=turn)


def said(message: Json | None) -> str:
    """Return the summary that a reply is.

    Raises:
        EngineUnavailable: it has no text.
    """
    content = (message or {}).get("content")
    text = content.strip() if isinstance(content, str) else ""
    if not text:
        raise EngineUnavailable("the model has answered the request for a summary without a text; retry")
    return text
