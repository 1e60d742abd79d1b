"""The served chat template: which ids follow a reply, which fields it reads, and what of a long history is left out.

Nothing about a template is assumed, and there is no code per model family. Each continuation renders the conversation
with the engine's own template and tokenizer and finds the answer in the text: a marker in place of the reply's content
shows where the reply ends, and the text before the reply must be the text that was sent before. If that does not hold,
the answer is a named reason and the call starts a new chain.

What a template renders after a reply depends on the reply, on the messages after it, on the earlier calls that they
answer, and at most on the kinds of the other messages before it: whether there was thinking, a tool call, a later
question. So a long conversation is replaced by its outline, one with the same kinds of messages in the same
neighbourhoods: long texts lose their middle, and of a pattern that repeats, such as a call and its result, most
repetitions are left out. A message whose text has one of the template's own marks, such as `</think>`, is kept whole.
Probes show whether a template treats both alike. They take half a second of CPU, so their result is kept beside the
tokenizer: the tokenizer's files name the directory, and the code that checks is in the file's name by its digest.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import os.path
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cachetools
import jinja2
import jinja2.ext
import numpy as np
import orjson
from jinja2 import nodes, sandbox

from proxy.sessions.conversation import NO_FIELDS, canonical_content, tool_call_ids
from proxy.sessions.rendering import LongestTokens
from proxy.sessions.template_probes import FIELD_PROBES, OTHER_VALUE, PROBE_VALUES, long_conversations, with_other_text
from turnwise import tokenizer as tokenizers
from turnwise.errors import EngineError
from turnwise.files import write_whole
from turnwise.json_text import dumps
from turnwise.tokenizer import ContentFormat, KeptTokenizer, load_tokenizer, shape_conversation
from turnwise.types import Json, TokenIds

log = logging.getLogger(__name__)
MAX_CLOSINGS = 1024
"""Kinds of conversations whose closing text is known."""
GIVEN_BYTES = 16
"""Length of the digest of tools and template arguments in the key of a closing text."""
MARKER = "TurnwiseMarkQ7Z"
"""Replaces a reply's content; letters and a digit, so that JSON or HTML escaping does not change it."""
KEPT_HEAD, KEPT_TAIL = 4, 8
MIN_MESSAGES = 24
MAX_TEXT = 256
"""Characters of a text that is kept whole."""
KEPT_TEXT = 96
"""Characters of a longer text that are kept at each end."""
MIN_MARK = 3
RESULT_ROLES = ("tool", "function")
"""A tuple, not a set, because a client may send an unhashable value as a role."""
NO_THINKING: Mapping[int, str] = {}
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


class ChatTemplate:
    """Renders conversations as the engine does."""

    is_local = True
    """Whether nothing outside of this process is asked."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], content_format: ContentFormat) -> None:
        self._tokenizer = tokenizer
        self._format = content_format
        self.end_tokens = frozenset(end_tokens)
        self._ends = {token: tokenizer.decode([token], skip_special_tokens=False) for token in end_tokens}
        self._renders_developer = "developer" in str(tokenizer.chat_template)
        self.fields_read = NO_FIELDS
        """What the template prints besides role, content and tool calls."""
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
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def until_end(self, sampled: str) -> str:
        """Return a reply up to the last end of a turn in it; all of it without one."""
        ends = [sampled.rfind(end) + len(end) for end in self._ends.values() if end in sampled]
        return sampled[: max(ends, default=len(sampled))]

    @functools.cached_property
    def longest_tokens(self) -> LongestTokens:
        return LongestTokens.of(self._tokenizer.get_vocab())

    def token_texts(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each of these tokens on its own; a part of a character becomes U+FFFD."""
        return {token: self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids}

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    @property
    def special_tokens(self) -> frozenset[str]:
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

    def renders_in_short(self, continued: Continued) -> bool:
        """Return whether what is before the reply is rendered in short.

        A template may print the function of the call that a result answers, so that call must not be left out: of a
        result that answers a call before the reply, or does not say which call it answers.
        """
        called: frozenset[str] = frozenset()
        for message in continued.messages[continued.replied :] if self._outliner is not None else ():
            answered = message.get("tool_call_id")
            if (answered is not None or message.get("role") in RESULT_ROLES) and answered not in [*called]:
                return False
            called |= tool_call_ids(message)
        return self._outliner is not None

    def next_ids(
        self, continued: Continued, kinds: list[int] | None = None, thinking: Mapping[int, str] = NO_THINKING
    ) -> TokenIds:
        """Return the tokens between the sampled reply and the next one, as `next_ids_of_whole` does.

        A long conversation before the reply is replaced by its outline, where that was shown to make no difference.
        Of conversations with the same kinds of messages, only the first is rendered and checked as a whole. Of the
        others only the text after the reply is rendered; they are checked as a whole if the reply does not close as
        the first one's, for example where a call's id is printed. `kinds` are of the first messages; they are used
        again and completed. `thinking` is what is put into replies, by their positions.

        Raises:
            Unsafe: as `next_ids_of_whole`.
        """
        if self._outliner is None or not self.renders_in_short(continued):
            return self.next_ids_of_whole(continued._replace(messages=restored(continued.messages, thinking)))
        short, all_kinds = self._outliner.shortened(continued, [] if kinds is None else kinds, thinking)
        if short.reasoning:  # whether a template prints thinking may depend on its text
            return self.next_ids_of_whole(short)
        end_token = short.last_token if short.last_token in self._ends else None
        given = dumps([short.tools, short.arguments], option=orjson.OPT_SORT_KEYS)
        given_digest = blake2b(given, digest_size=GIVEN_BYTES).digest()
        key = (all_kinds, short.replied, end_token, short.keep_thinking, given_digest)
        with self._lock:
            known = self._closings.get(key)
        if known is not None:
            try:
                rest = self._after_reply(short, generate=True)
                return self._tokenise(short, *self._split_at_end(rest, known, short))
            except Unsafe:
                pass  # the check of the whole decides
        return self.next_ids_of_whole(short, closing_key=key)

    def next_ids_of_whole(self, continued: Continued, *, closing_key: Hashable = None) -> TokenIds:
        """Return the tokens between the sampled reply and the next one.

        Args:
            continued: the conversation, thinking put back where it was sampled.
            closing_key: what decides the text that closes the reply, where that text is kept for later calls.

        Raises:
            Unsafe: when the template does not put the same text before, or no recognisable text after the reply.
        """
        messages, replied, keep_thinking = continued.messages, continued.replied, continued.keep_thinking
        if keep_thinking:
            messages = [_without_thinking(message) for message in messages]
            continued = continued._replace(messages=messages)
        render = functools.partial(self.render, tools=continued.tools, arguments=continued.arguments)
        whole = render(messages, generate=True)
        closing = self._after_reply(continued._replace(messages=messages[: replied + 1]), generate=False)
        end, after = self._split_at_end(self._after_reply(continued, generate=True), closing, continued)
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
        ids = self._tokenise(continued, end, after)
        if closing_key is not None:
            with self._lock:
                self._closings[closing_key] = closing
        return ids

    def _tokenise(self, continued: Continued, end: str, after: str) -> TokenIds:
        """Tokenise the text after a reply; `end` is its sampled end-of-turn token, empty without one.

        The text is tokenised with that token before it: some tokenizers treat the start of a text differently.
        """
        ids: list[int] = self._tokenizer.encode(end + after, add_special_tokens=False)
        if end:
            if ids[:1] != [continued.last_token]:
                raise Unsafe("tokenizer_differs")
            ids = ids[1:]
        return np.asarray(ids, np.int32)

    def _after_reply(self, continued: Continued, *, generate: bool) -> str:
        """Return the text after the reply, with a marker as the last part of the reply that the template prints."""
        messages, replied = continued.messages, continued.replied
        if continued.keep_thinking:  # without it, because a template may drop it
            messages = [_without_thinking(message) for message in messages]
        reply = messages[replied]
        if reply.get("tool_calls"):
            marked = copy.deepcopy(reply)
            marked["tool_calls"][-1]["function"]["arguments"] = json.dumps({MARKER: MARKER})
        else:
            marked = {**_without_thinking(reply), "content": MARKER}
        shown = [*messages[:replied], marked, *messages[replied + 1 :]]
        text = self.render(shown, continued.tools, continued.arguments, generate=generate)
        _, found, rest = text.rpartition(MARKER)
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
        at = max((shared.rfind(end) for end in self._ends.values()), default=-1)
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
    if "reasoning" not in message and "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}


def marks_of(source: str) -> tuple[str, ...] | None:
    """Return the texts that a template may look for in messages; None where the template cannot be parsed.

    Names such as `tool_calls` are no marks: they are looked for among a message's fields.
    """
    environment = sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    try:
        parsed = environment.parse(source)
    except jinja2.TemplateSyntaxError:
        return None
    texts = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
    return tuple(sorted(text for text in map(str.strip, texts) if len(text) >= MIN_MARK and not text.isidentifier()))


class Outliner:
    """Shortens conversations for one template."""

    def __init__(self, marks: Sequence[str], *, shortens_tools: bool = False) -> None:
        self._marks = marks
        self.shortens_tools = shortens_tools

    def shortened(
        self, continued: Continued, known: list[int], thinking: Mapping[int, str]
    ) -> tuple[Continued, tuple[int, ...]]:
        """Return a conversation that is short before its reply, and the kinds of all its messages.

        Of the tools, the first and the last one are kept, without their parameters; one with a mark as it is.

        Args:
            continued: the whole conversation.
            known: kinds of the first messages, completed up to the last message.
            thinking: what is put into replies that were sent without it, by position.
        """
        replied = continued.replied
        known += map(self.kind, continued.messages[len(known) :])
        messages = restored(continued.messages, thinking) if thinking else continued.messages
        kinds = known[:]
        for position in thinking:
            kinds[position] = self.kind(messages[position])
        positions = kept_positions(kinds[:replied]) if replied >= MIN_MESSAGES else range(replied)
        kept = [outlined(messages[at], has_marks=kinds[at] < 0) for at in positions]
        tools = continued.tools
        if self.shortens_tools and isinstance(tools, list):
            tools = [self._outline_tool(tool) for tool in (tools if len(tools) <= 2 else (tools[0], tools[-1]))]
        short = continued._replace(messages=[*kept, *messages[replied:]], replied=len(kept), tools=tools)
        return short, (*(kinds[at] for at in positions), *kinds[replied:])

    def _outline_tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        text = dumps(tool).decode()
        if not isinstance(function, dict) or any(mark in text for mark in self._marks):
            return tool
        short = {field: _cut(value) for field, value in function.items()}
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and parameters.get("type") == "object":
            short["parameters"] = {"type": "object", "properties": {}}
        return {**tool, "function": short}

    def kind(self, message: Json) -> int:
        """Return the hash of what a template may distinguish messages by; negative for a text with marks.

        That is the role, the number of calls up to two, whether there is thinking and any content, and the template's
        marks in the text. Of a mark it counts whether the content begins or ends with it: templates ask for that.
        """
        calls, thinking = message.get("tool_calls"), message.get("reasoning", message.get("reasoning_content"))
        content = str(canonical_content(message.get("content")))
        bare, role = content.strip(), message.get("role")
        text = content + str(thinking or "")
        marks = [(mark, bare.startswith(mark), bare.endswith(mark)) for mark in self._marks if mark in text]
        num_calls = min(len(calls), 2) if isinstance(calls, list) else 0
        role = role if isinstance(role, str) else repr(role)
        number = abs(hash((role, num_calls, bool(thinking), not content, *marks)))
        return -1 - number if marks else number


def restored(messages: Sequence[Json], thinking: Mapping[int, str]) -> list[Json]:
    """Return messages with thinking in those that have some."""
    whole = list(messages)
    for position, text in thinking.items():
        whole[position] = {**messages[position], "reasoning": text}
    return whole


def outlined(message: Json, *, has_marks: bool) -> Json:
    """Return a message without long arguments; where it has no marks, its long texts have lost their middle."""
    short = message.copy() if has_marks else {field: _cut(value) for field, value in message.items()}
    if isinstance(message.get("content"), list) and not has_marks:
        short["content"] = [_outlined_part(part) for part in message["content"]]
    if isinstance(message.get("tool_calls"), list):
        short["tool_calls"] = [_without_arguments(call) for call in message["tool_calls"]]
    return short


def _outlined_part(part: Any) -> Any:
    return {field: _cut(value) for field, value in part.items()} if isinstance(part, dict) else _cut(part)


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > MAX_TEXT
    return f"{value[:KEPT_TEXT]} {value[-KEPT_TEXT:]}" if is_long else value


def _without_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str) or len(arguments) <= MAX_TEXT:
        return call
    return {**call, "function": {**call["function"], "arguments": "{}"}}


def kept_positions(kinds: Sequence[Hashable]) -> list[int]:
    """Return the positions of the messages to keep.

    Both ends are kept, and the first and the last message of each kind. Between two of these, the longest block is left
    out after which the same two kinds follow each other as at its start. Blocks have an even length, because some
    templates check that users and assistants alternate.
    """
    last = len(kinds)
    backwards = kinds[::-1]
    first_and_last = [at for kind in set(kinds) for at in (kinds.index(kind), last - 1 - backwards.index(kind))]
    pinned = {*range(last - KEPT_TAIL, last), *first_and_last}
    before = KEPT_HEAD - 1
    positions = [*range(before)]
    for end in [*sorted(position for position in pinned if position >= KEPT_HEAD), last]:
        begin, resume = _longest_block(kinds, before, end)
        positions += [*range(before, begin), *range(resume, end)]
        before = end
    return positions


def _longest_block(kinds: Sequence[Hashable], start: int, end: int) -> tuple[int, int]:
    """Return the longest block between `start` and `end` that can be left out; an empty one at the end if none can."""
    last = min(end, len(kinds) - 1)
    for begin in range(start + 1, min(start + 4, end)):
        before, after = kinds[begin - 1], kinds[begin]
        for resume in range(last - (last - begin) % 2, begin + 1, -2):
            if kinds[resume] == after and kinds[resume - 1] == before:
                return begin, resume
    return end, end


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
    if not isinstance(tokenizer, KeptTokenizer):
        shorten_if_alike(template)
        return template
    file = tokenizer.directory / f"checks-{content_format}-{_code_digest()}.json"
    if file.exists():
        template.shorten(tools=json.loads(file.read_text(encoding="utf-8")))
        return template
    shorten_if_alike(template)
    try:
        write_whole(file, json.dumps(template.shortens_tools))
    except OSError as error:
        log.warning(
            "the checks of a chat template cannot be kept in %s and are repeated at each start: %s", file, error
        )
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


def shorten_if_alike(template: ChatTemplate) -> None:
    """Let a template render long conversations in short, if probes show that it continues both alike."""
    for shortens_tools in (True, False) if template.end_tokens else ():
        template.shorten(tools=shortens_tools)
        if template.shortens_tools is None or all(
            _continues_alike(template, probe) for probe in _long_probes(min(template.end_tokens))
        ):
            return
    template.shorten(tools=None)


def _long_probes(end_token: int) -> Iterable[Continued]:
    """Yield the probes; `end_token` is what ends a reply that was not cut off."""
    for (messages, replied, tools), keep_thinking in itertools.product(long_conversations(), (False, True)):
        reasoning = messages[replied].get("reasoning", "")
        yield Continued(messages, replied, end_token, reasoning, tools, {}, keep_thinking)


def _continues_alike(template: ChatTemplate, probe: Continued) -> bool:
    probes = [probe]
    if not probe.reasoning:
        probes.append(probe._replace(messages=with_other_text(probe.messages)))
    return all(_answer(template.next_ids, each) == _answer(template.next_ids_of_whole, each) for each in probes)


def _answer(continuation: Callable[[Continued], TokenIds], probe: Continued) -> list[int] | Reason:
    try:
        return list(map(int, continuation(probe)))
    except Unsafe as unsafe:
        return unsafe.reason


@functools.cache
def _code_digest() -> str:
    digest = blake2b(digest_size=8)
    here = sorted(Path(__file__).parent.glob("*.py"))
    for file in [*here, Path(tokenizers.__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
