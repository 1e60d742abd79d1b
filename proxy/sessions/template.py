"""The served chat template: which ids follow a reply, and which fields it reads.

Nothing about a template is assumed, and there is no code per model family. Each continuation renders the conversation
with the engine's own template and tokenizer and finds the answer in the text: a marker in place of the reply's content
shows where the reply ends, and the text before the reply must be the text that was sent before. If that does not hold,
the answer is a named reason and the call starts a new chain.
"""

from __future__ import annotations

import copy
import functools
import json
import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from proxy.sessions.conversation import CALL_IDS, NAME, NO_FIELDS, ConversationDigests
from proxy.sessions.rendering import LongestTokens
from turnwise.errors import EngineError
from turnwise.tokenizer import ContentFormat, load_tokenizer, shape_conversation
from turnwise.types import Json, TokenIds

MARKER = "TurnwiseMarkQ7Z"
"""Replaces a reply's content; letters and a digit, so that JSON or HTML escaping does not change it."""
PROBE_VALUES = {NAME: "probename", CALL_IDS: "probecall"}
OTHER_VALUE = "otherwise"
"""Nine letters, because some templates refuse other ids of tool calls."""
_NAME, _CALL_ID = PROBE_VALUES[NAME], PROBE_VALUES[CALL_IDS]
FIELD_PROBES: Sequence[list[Json]] = (
    [
        {"role": "user", "content": "a", "name": _NAME},
        {"role": "assistant", "content": "b", "name": _NAME},
        {"role": "user", "content": "c", "name": _NAME},
    ],
    [{"role": "system", "content": "a", "name": _NAME}, {"role": "user", "content": "b"}],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": "b"},
        {"role": "assistant", "content": "c"},
    ],
)
"""Conversations with names and ids of calls; a template may refuse some of them."""
NO_THINKING: Mapping[int, str] = {}
THINKING = ("reasoning", "reasoning_content")
"""Fields of a message with what was thought."""
Reason = Literal["template_unsafe", "thinking_stripped", "tokenizer_differs"]


class Unsafe(Exception):
    """The stored tokens cannot be extended faithfully; `reason` goes into the turn."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Continued(NamedTuple):
    """A conversation with a sampled reply, after which the next one is sampled."""

    messages: Sequence[Json]
    replied: int
    last_token: int
    """The last sampled token: one that ends a turn, or another where a length or a stop string cut the reply off."""
    reasoning: str
    """The thinking that was sampled; empty without any."""
    tools: Any
    arguments: Json
    keep_thinking: bool
    """Whether to stay on the chain although the template drops earlier thinking."""


class Shortened(Protocol):
    """Renders less of a long conversation, with the same result."""

    def next_ids(
        self, continued: Continued, kinds: list[int] | None = None, thinking: Mapping[int, str] = NO_THINKING
    ) -> TokenIds:
        """Return what `ChatTemplate.next_ids` does, with `thinking` in replies by their positions.

        `kinds` is what is known of the first messages; it is completed up to the last one.
        """

    def num_rendered(self, continued: Continued, conversation: ConversationDigests) -> int:
        """Return the bytes of messages that `next_ids` renders."""


class ChatTemplate:
    """Renders conversations as the engine does."""

    is_local = True
    """Whether nothing outside of this process is asked."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], content_format: ContentFormat) -> None:
        self.tokenizer = tokenizer
        self.content_format = content_format
        self.end_tokens = frozenset(end_tokens)
        self.ends = {token: tokenizer.decode([token], skip_special_tokens=False) for token in end_tokens}
        self._renders_developer = "developer" in str(tokenizer.chat_template)
        self.fields_read = NO_FIELDS
        """What the template prints besides role, content and tool calls."""
        self.short: Shortened | None = None
        """What renders long conversations in short, in its place; None renders them whole."""

    def render(self, messages: Sequence[Json], tools: Any, arguments: Json, *, generate: bool) -> str:
        """Return the prompt's text.

        Raises:
            Unsafe: when the template refuses the conversation.
        """
        try:
            conversation = shape_conversation(messages, self.content_format, has_developer=self._renders_developer)
            text = self.tokenizer.apply_chat_template(
                conversation, tools=tools or None, tokenize=False, **{**arguments, "add_generation_prompt": generate}
            )
        except Exception as error:
            raise Unsafe("template_unsafe") from error
        return str(text)

    def tokenise(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @functools.cached_property
    def longest_tokens(self) -> LongestTokens:
        return LongestTokens.of(self.tokenizer.get_vocab())

    def token_texts(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of these tokens on its own; a part of a character becomes U+FFFD."""
        return {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in token_ids}

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    @property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self.tokenizer.all_special_tokens)

    def next_ids(self, continued: Continued, closings: list[str] | None = None) -> TokenIds:
        """Return the tokens between the sampled reply and the next one.

        Args:
            continued: the conversation, thinking put back where it was sampled.
            closings: gets the text that closes the reply, where all is as it must be.

        Raises:
            Unsafe: when the template does not put the same text before, or no recognisable text after the reply.
        """
        messages, replied, keep_thinking = continued.messages, continued.replied, continued.keep_thinking
        if keep_thinking:
            messages = [_without_thinking(message) for message in messages]
        render = functools.partial(self.render, tools=continued.tools, arguments=continued.arguments)
        whole = render(messages, generate=True)
        closing = self.after_reply(continued._replace(messages=messages[: replied + 1]), generate=False)
        end, after = self.split_at_end(self.after_reply(continued, generate=True), closing, continued)
        if not whole.endswith(end + after):
            raise Unsafe("template_unsafe")
        reply_end = len(whole) - len(end + after)
        # The text before the reply must be the text that the reply was sampled after.
        before = render(messages[:replied], generate=True)
        thinking_shown = keep_thinking or continued.reasoning.strip() in whole[len(before) : reply_end]
        if not (whole.startswith(before) and len(before) <= reply_end and thinking_shown):
            plain = [_without_thinking(message) for message in messages]
            history = render(plain[:replied], generate=False)
            if not render(plain, generate=True).startswith(history):
                raise Unsafe("template_unsafe")
            if not keep_thinking:
                raise Unsafe("thinking_stripped")
        ids = self.tokenise_after(continued, end, after)
        if closings is not None:
            closings.append(closing)
        return ids

    def tokenise_after(self, continued: Continued, end: str, after: str) -> TokenIds:
        """Tokenise the text after a reply; `end` is its sampled end-of-turn token, empty without one.

        The text is tokenised with that token before it: some tokenizers treat the start of a text differently.
        """
        ids: list[int] = self.tokenizer.encode(end + after, add_special_tokens=False)
        if end:
            if ids[:1] != [continued.last_token]:
                raise Unsafe("tokenizer_differs")
            ids = ids[1:]
        return np.asarray(ids, np.int32)

    def after_reply(self, continued: Continued, *, generate: bool) -> str:
        """Return the text after the reply, with a marker as the last part of the reply that the template prints."""
        messages, replied = continued.messages, continued.replied
        if continued.keep_thinking:  # without it, because a template may drop it
            messages = [_without_thinking(message) for message in messages]
        reply = messages[replied]
        if reply.get("tool_calls"):
            marked = copy.deepcopy(reply)
            marked["tool_calls"][-1]["function"]["arguments"] = json.dumps({MARKER: MARKER})
        else:
            marked = {key: value for key, value in reply.items() if key not in THINKING} | {"content": MARKER}
        shown = [*messages[:replied], marked, *messages[replied + 1 :]]
        text = self.render(shown, continued.tools, continued.arguments, generate=generate)
        _, found, rest = text.rpartition(MARKER)
        if not found:
            raise Unsafe("template_unsafe")
        return rest

    def split_at_end(self, rest: str, closing: str, continued: Continued) -> tuple[str, str]:
        """Return the sampled end-of-turn token, empty where none was sampled, and the text that follows the reply.

        Args:
            rest: the text after the reply's content, with the messages that follow.
            closing: the same for the reply as the last message.
            continued: the conversation; where its reply calls tools, sampled syntax stands between content and end.
        """
        end = self.ends.get(continued.last_token)
        shared = os.path.commonprefix([closing, rest])  # noqa: RUF071  of texts, one character at a time, as it does
        if end is not None:
            at = shared.rfind(end)
            # Some templates have no closing: the token that opens the next message is what ends the turn.
            if at < 0 and end not in closing and rest.startswith(closing + end):
                at = len(closing)
            if at < 0:
                raise Unsafe("template_unsafe")
            return end, rest[at + len(end) :]
        if not continued.messages[continued.replied].get("tool_calls"):
            return "", rest
        at = max((shared.rfind(end) for end in self.ends.values()), default=-1)
        if at < 0:
            raise Unsafe("template_unsafe")
        return "", rest[at:]


class EngineTemplate(ChatTemplate):
    """The template of a model that has it as code in the engine: the engine renders, and its ids are read as text."""

    is_local = False

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], ask: Callable[[Json], list[int]]) -> None:
        super().__init__(tokenizer, end_tokens, "openai")
        self._ask = ask
        """Returns the ids of a chat request's prompt; it waits for them, so it is called in threads."""

    def render(self, messages: Sequence[Json], tools: Any, arguments: Json, *, generate: bool) -> str:
        request: Json = {"messages": messages, "add_generation_prompt": generate, "chat_template_kwargs": arguments}
        try:
            return self.text_of(self._ask(request | ({"tools": tools} if tools else {})))
        except EngineError as error:
            raise Unsafe("template_unsafe") from error


def _without_thinking(message: Json) -> Json:
    return {key: value for key, value in message.items() if key not in THINKING}


def restored(messages: Sequence[Json], thinking: Mapping[int, str]) -> list[Json]:
    """Return messages with thinking in those that have some."""
    whole = list(messages)
    for position, text in thinking.items():
        whole[position] = {**messages[position], "reasoning": text}
    return whole


def load_chat_template(
    path: str, content_format: ContentFormat, ask: Callable[[Json], list[int]] | None = None
) -> ChatTemplate:
    """Load a tokenizer and its template from a directory, or by its id from the local Hugging Face cache.

    `ask` lets the engine render for a tokenizer without a template.

    Raises:
        OSError, ValueError: there is no such tokenizer, as transformers raises it.
    """
    tokenizer, end_tokens = load_tokenizer(path)
    if ask is not None and tokenizer.chat_template is None:
        template: ChatTemplate = EngineTemplate(tokenizer, end_tokens, ask)
    else:
        template = ChatTemplate(tokenizer, end_tokens, content_format)
    template.fields_read = fields_read(template)
    return template


def fields_read(template: ChatTemplate) -> frozenset[str]:
    """Return what a template prints besides role, content and tool calls: `NAME`, `CALL_IDS`.

    The same conversation with other names or ids then gives another text.
    """
    return frozenset(field for field in PROBE_VALUES if any(_prints(template, field, probe) for probe in FIELD_PROBES))


def _prints(template: ChatTemplate, field: str, probe: list[Json]) -> bool:
    other = json.loads(json.dumps(probe).replace(PROBE_VALUES[field], OTHER_VALUE))
    try:
        return len({template.render(messages, None, {}, generate=False) for messages in (probe, other)}) > 1
    except Unsafe:  # the template refuses this kind of conversation, so no such conversation is ever extended
        return False
