"""What the served model's chat template renders after a sampled reply, for any template, without code per model family.

Nothing about a template is assumed. Each continuation renders the conversation with the engine's own template and
tokenizer and finds the answer in the text: a marker in place of the reply's content shows where the reply ends, and
the text before the reply must be the text that was sent before. If that does not hold, the answer is a named reason
and the call starts a new chain.
"""

from __future__ import annotations

import copy
import json
import os.path
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, Protocol

import cachetools
import numpy as np
import orjson

from proxy.sessions.digests import NO_FIELDS
from proxy.sessions.outline import NO_THINKING, Continued, Outliner, answers_earlier_call, marks_of, restored
from turnwise.json_text import dumps
from turnwise.tokenizer import ContentFormat, shape_conversation
from turnwise.types import Json, TokenIds

MAX_CLOSINGS = 1024
"""Kinds of conversations whose closing text is known."""
GIVEN_BYTES = 16
"""Length of the digest of tools and template arguments in the key of a closing text."""

MARKER = "TurnwiseMarkQ7Z"
"""Replaces a reply's content; letters and a digit, so that JSON or HTML escaping does not change it."""

Reason = Literal["template_unsafe", "thinking_stripped", "tokenizer_differs"]


class Unsafe(Exception):
    """The stored tokens cannot be extended faithfully; `reason` goes into the turn."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    chat_template: Any
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: list[Json], **kwargs: Any) -> Any:
        """Render a conversation."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise text."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""


class ChatTemplate:
    """Renders conversations as the engine does."""

    def __init__(self, tokenizer: ChatTokenizer, end_tokens: Sequence[int], content_format: ContentFormat) -> None:
        self._tokenizer = tokenizer
        self._format = content_format
        self.end_tokens = frozenset(end_tokens)
        """Ids that end a turn."""
        self._ends = {token: tokenizer.decode([token], skip_special_tokens=False) for token in end_tokens}
        self._renders_developer = "developer" in str(tokenizer.chat_template)
        self.fields_read = NO_FIELDS
        """What the template prints besides role, content and tool calls; `load_chat_template` finds it out."""
        self._outliner: Outliner | None = None
        self._lock = threading.Lock()
        """Of the closings: calls read and keep them in several threads."""
        self._closings: cachetools.FIFOCache[Hashable, str] = cachetools.FIFOCache(MAX_CLOSINGS)
        """The text that closes a reply, by what decides it, of conversations in which the tokens could be extended."""

    def render(self, messages: Sequence[Json], tools: Any, arguments: Json, *, generate: bool) -> str:
        """Return the prompt's text.

        Raises:
            Unsafe: when the template refuses the conversation.
        """
        try:
            conversation = shape_conversation(messages, self._format, has_developer=self._renders_developer)
            text = self._tokenizer.apply_chat_template(
                conversation, tools=tools or None, tokenize=False, **{**arguments, "add_generation_prompt": generate}
            )
        except Exception as error:
            raise Unsafe("template_unsafe") from error
        return str(text)

    def tokenise(self, text: str) -> list[int]:
        """Return the ids of a rendered prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def reply_ids(self, messages: Sequence[Json], reply: str, tools: Any, arguments: Json) -> list[int]:
        """Return the tokens of a reply that a person wrote, its end of turn included, as they would be sampled.

        Raises:
            Unsafe: when the template does not render the reply after its own generation prompt.
        """
        prompt = self.render(messages, tools, arguments, generate=True)
        whole = self.render([*messages, {"role": "assistant", "content": reply}], tools, arguments, generate=False)
        sampled = whole[len(prompt) :]
        if not whole.startswith(prompt) or reply.strip() not in sampled:
            raise Unsafe("template_unsafe")
        ends = [sampled.rfind(end) + len(end) for end in self._ends.values() if end in sampled]
        sampled = sampled[: max(ends, default=len(sampled))]
        before, ids = self.tokenise(prompt), self.tokenise(prompt + sampled)
        return ids[len(before) :] if ids[: len(before)] == before else self.tokenise(sampled)

    def hinted_ids(self, messages: Sequence[Json], hint: str, tools: Any, arguments: Json) -> list[int]:
        """Return the prompt of these messages with a hint of the user after the last one.

        Raises:
            Unsafe: when the template refuses the conversation.
        """
        last = messages[-1]
        if last.get("role") == "user" and isinstance(last.get("content"), str):
            hinted = [*messages[:-1], {**last, "content": f"{last['content']}\n\n{hint}"}]
        else:
            hinted = [*messages, {"role": "user", "content": hint}]
        return self.tokenise(self.render(hinted, tools, arguments, generate=True))

    def token_texts(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of these tokens on its own; a part of a character becomes U+FFFD."""
        return {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids}

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts of the tokens that mark structure, such as the ends of turns."""
        return frozenset(self._tokenizer.all_special_tokens)

    def shorten(self, *, tools: bool | None) -> None:
        """Render long conversations in short from now on, unchecked; `tools` is what `shortens_tools` will be."""
        marks = marks_of(self._tokenizer.chat_template) if isinstance(self._tokenizer.chat_template, str) else None
        self._outliner = None if tools is None or marks is None else Outliner(marks, shortens_tools=tools)
        self._closings.clear()

    @property
    def shortens_tools(self) -> bool | None:
        """Whether long lists of tools are rendered in short too; None where nothing is."""
        return None if self._outliner is None else self._outliner.shortens_tools

    def renders_in_short(self, messages: Sequence[Json], replied: int) -> bool:
        """Return whether what is before the reply at index `replied` is rendered in short.

        A template may print the function of the call that a result answers, so that call must not be left out.
        """
        return self._outliner is not None and not answers_earlier_call(messages[replied:])

    def continuation(
        self, continued: Continued, kinds: list[int] | None = None, thinking: Mapping[int, str] = NO_THINKING
    ) -> TokenIds:
        """Return the tokens between the sampled reply and the next one, as `whole_continuation` does.

        A long conversation before the reply is replaced by its outline, where that was shown to make no difference.
        Of conversations with the same kinds of messages, only the first is rendered and checked as a whole. Of the
        others only the text after the reply is rendered; they are checked as a whole if the reply does not close as
        the first one's, for example where a call's id is printed. `kinds` are of the first messages; they are used
        again and completed. `thinking` is what is put into replies, by their positions.

        Raises:
            Unsafe: as `whole_continuation`.
        """
        if self._outliner is None or not self.renders_in_short(continued.messages, continued.replied):
            return self.whole_continuation(continued._replace(messages=restored(continued.messages, thinking)))
        short, all_kinds = self._outliner.shortened(continued, [] if kinds is None else kinds, thinking)
        if short.reasoning:  # whether a template prints thinking may depend on its text
            return self.whole_continuation(short)
        end_token = short.last_token if short.last_token in self._ends else None
        given = dumps([short.tools, short.arguments], option=orjson.OPT_SORT_KEYS)
        given_digest = blake2b(given, digest_size=GIVEN_BYTES).digest()
        key = (all_kinds, short.replied, end_token, short.keep_thinking, given_digest)
        with self._lock:
            known = self._closings.get(key)
        if known is not None:
            try:
                rest = self._after_marker(_with_marker(_printed(short)), generate=True)
                return self._tokenise(short, *self._split_at_end(rest, known, short))
            except Unsafe:
                pass  # the check of the whole decides
        return self.whole_continuation(short, closing_key=key)

    def whole_continuation(self, continued: Continued, *, closing_key: Hashable = None) -> TokenIds:
        """Return the tokens between the sampled reply and the next one.

        Args:
            continued: the conversation, thinking put back where it was sampled.
            closing_key: what decides the text that closes the reply, where that text is kept for later calls.

        Raises:
            Unsafe: when the template does not put the same text before, or no recognisable text after the reply.
        """
        continued = _printed(continued)
        messages, replied, keep_thinking = continued.messages, continued.replied, continued.keep_thinking
        whole = self._rendered(continued, generate=True)
        marked = _with_marker(continued)
        closing = self._after_marker(marked._replace(messages=marked.messages[: replied + 1]), generate=False)
        end, after = self._split_at_end(self._after_marker(marked, generate=True), closing, continued)
        if not whole.endswith(end + after):
            raise Unsafe("template_unsafe")
        reply_end = len(whole) - len(end + after)
        # The text before the reply must be the text that the reply was sampled after.
        before = self._rendered(continued._replace(messages=messages[:replied]), generate=True)
        thinking_shown = keep_thinking or continued.reasoning.strip() in whole[len(before) : reply_end]
        if not (whole.startswith(before) and len(before) <= reply_end and thinking_shown):
            plain = continued._replace(messages=[_without_thinking(message) for message in messages])
            history = self._rendered(plain._replace(messages=plain.messages[:replied]), generate=False)
            if not self._rendered(plain, generate=True).startswith(history):
                raise Unsafe("template_unsafe")
            if not keep_thinking:
                raise Unsafe("thinking_stripped")
        ids = self._tokenise(continued, end, after)
        if closing_key is not None:
            with self._lock:
                self._closings[closing_key] = closing
        return ids

    def _rendered(self, continued: Continued, *, generate: bool) -> str:
        return self.render(continued.messages, continued.tools, continued.arguments, generate=generate)

    def _tokenise(self, continued: Continued, end: str, after: str) -> TokenIds:
        """Tokenise the text after a reply; `end` is its sampled end-of-turn token, empty without one.

        The text is tokenised with that token before it: some tokenizers treat the start of a text differently.
        """
        ids = self.tokenise(end + after)
        if end:
            if ids[:1] != [continued.last_token]:
                raise Unsafe("tokenizer_differs")
            ids = ids[1:]
        return np.asarray(ids, np.int32)

    def _after_marker(self, marked: Continued, *, generate: bool) -> str:
        """Return the text after the marked reply's content."""
        _, found, rest = self._rendered(marked, generate=generate).rpartition(MARKER)
        if not found:
            raise Unsafe("template_unsafe")
        return rest

    def _split_at_end(self, rest: str, closing: str, continued: Continued) -> tuple[str, str]:
        """Return the sampled end-of-turn token, empty where none was sampled, and the text that follows the reply.

        Args:
            rest: the text after the reply's content, with the messages that follow.
            closing: the same for the reply as the last message.
            continued: the conversation; where its reply calls tools, sampled syntax stands between content and end.
        """
        end = self._ends.get(continued.last_token)
        if end is not None:
            at = _last_common(closing, rest, end)
            # Some templates have no closing: the token that opens the next message is what ends the turn.
            if at is None and end not in closing and rest.startswith(closing + end):
                at = len(closing)
            if at is None:
                raise Unsafe("template_unsafe")
            return end, rest[at + len(end) :]
        if not continued.messages[continued.replied].get("tool_calls"):
            return "", rest
        found = [at for end in self._ends.values() if (at := _last_common(closing, rest, end)) is not None]
        if not found:
            raise Unsafe("template_unsafe")
        return "", rest[max(found) :]


def _with_marker(continued: Continued) -> Continued:
    """Return the conversation with the marker as the last part that a template prints of the reply."""
    messages, replied = continued.messages, continued.replied
    reply = messages[replied]
    if reply.get("tool_calls"):
        marked = copy.deepcopy(reply)
        marked["tool_calls"][-1]["function"]["arguments"] = json.dumps({MARKER: MARKER})
    else:
        marked = {**_without_thinking(reply), "content": MARKER}
    return continued._replace(messages=[*messages[:replied], marked, *messages[replied + 1 :]])


def _printed(continued: Continued) -> Continued:
    """Return the conversation without the thinking that its template may drop."""
    if not continued.keep_thinking:
        return continued
    return continued._replace(messages=[_without_thinking(message) for message in continued.messages])


def _without_thinking(message: Json) -> Json:
    """Return the message without thinking."""
    if "reasoning" not in message and "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}


def _last_common(closing: str, rest: str, end: str) -> int | None:
    """Return the last position of `end` in the common prefix of both texts; None without one."""
    shared = os.path.commonprefix([closing, rest])  # noqa: RUF071  of texts, one character at a time, as it does
    at = shared.rfind(end)
    return None if at < 0 else at
