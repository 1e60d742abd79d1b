"""How long conversations are rendered in short: what of their history is left out, and where that makes no difference.

What a template renders after a reply depends on the reply, on the messages after it, on the earlier calls that they
answer, and at most on the kinds of the other messages before it: whether there was thinking, a tool call, a later
question. So a long conversation is replaced by its outline, one with the same kinds of messages in the same
neighbourhoods: long texts lose their middle, and of a pattern that repeats, such as a call and its result, most
repetitions are left out. A message whose text has one of the template's own marks, such as `</think>`, is kept whole.
Probes show whether a template treats both alike. They take half a second of CPU, so their result is kept beside the
tokenizer: the tokenizer's files name the directory, and the code that checks is in the file's name by its digest.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cachetools
import jinja2
import jinja2.ext
import orjson
from jinja2 import nodes, sandbox

from proxy.features.outline.probes import long_conversations, with_other_text
from proxy.sessions import template as templates
from proxy.sessions.conversation import ConversationDigests, canonical_content, tool_call_ids
from proxy.sessions.template import NO_THINKING, ChatTemplate, Continued, Reason, Unsafe, restored
from turnwise import tokenizer as tokenizers
from turnwise.files import write_whole
from turnwise.json_text import dumps
from turnwise.tokenizer import KeptTokenizer
from turnwise.types import Json, TokenIds

log = logging.getLogger(__name__)
MAX_CLOSINGS = 1024
"""Kinds of conversations whose closing text is known."""
GIVEN_BYTES = 16
"""Length of the digest of tools and template arguments in the key of a closing text."""
KEPT_HEAD, KEPT_TAIL = 4, 8
MIN_MESSAGES = 24
MAX_TEXT = 256
"""Characters of a text that is kept whole."""
KEPT_TEXT = 96
"""Characters of a longer text that are kept at each end."""
MIN_MARK = 3
RESULT_ROLES = ("tool", "function")
"""A tuple, not a set, because a client may send an unhashable value as a role."""


class Outlines:
    """Renders the outlines of long conversations for one template."""

    def __init__(self, template: ChatTemplate, outliner: Outliner) -> None:
        self._template = template
        self._outliner = outliner
        self._lock = threading.Lock()
        """Of the closings: calls read and keep them in several threads."""
        self._closings: cachetools.FIFOCache[Hashable, str] = cachetools.FIFOCache(MAX_CLOSINGS)
        """The text that closes a reply, by what decides it, of conversations in which the tokens could be extended."""

    def next_ids(
        self, continued: Continued, kinds: list[int] | None = None, thinking: Mapping[int, str] = NO_THINKING
    ) -> TokenIds:
        """Return the tokens between the sampled reply and the next one.

        A long conversation before the reply is replaced by its outline, where that was shown to make no difference.
        Of conversations with the same kinds of messages, only the first is rendered and checked as a whole. Of the
        others only the text after the reply is rendered; they are checked as a whole if the reply does not close as
        the first one's, for example where a call's id is printed. `kinds` are of the first messages; they are used
        again and completed.

        Raises:
            Unsafe: as `ChatTemplate.next_ids`.
        """
        template = self._template
        if not renders_in_short(continued):
            return template.next_ids(continued._replace(messages=restored(continued.messages, thinking)))
        short, all_kinds = self._outliner.shortened(continued, [] if kinds is None else kinds, thinking)
        if short.reasoning:  # whether a template prints thinking may depend on its text
            return template.next_ids(short)
        end_token = short.last_token if short.last_token in template.ends else None
        given = dumps([short.tools, short.arguments], option=orjson.OPT_SORT_KEYS)
        given_digest = blake2b(given, digest_size=GIVEN_BYTES).digest()
        key = (all_kinds, short.replied, end_token, short.keep_thinking, given_digest)
        with self._lock:
            known = self._closings.get(key)
        if known is not None:
            try:
                rest = template.after_reply(short, generate=True)
                return template.tokenise_after(short, *template.split_at_end(rest, known, short))
            except Unsafe:
                pass  # the check of the whole decides
        closings: list[str] = []
        found = template.next_ids(short, closings)
        with self._lock:
            self._closings[key] = closings[0]
        return found

    def num_rendered(self, continued: Continued, conversation: ConversationDigests) -> int:
        known = len(conversation.kinds)
        is_outlined = 0 < known <= continued.replied and renders_in_short(continued)
        return conversation.num_bytes - (conversation.num_old_bytes if is_outlined else 0)


def renders_in_short(continued: Continued) -> bool:
    """Return whether what is before the reply is rendered in short.

    A template may print the function of the call that a result answers, so that call must not be left out: of a
    result that answers a call before the reply, or does not say which call it answers.
    """
    called: frozenset[str] = frozenset()
    for message in continued.messages[continued.replied :]:
        answered = message.get("tool_call_id")
        if (answered is not None or message.get("role") in RESULT_ROLES) and answered not in [*called]:
            return False
        if "tool_calls" in message:
            called |= tool_call_ids(message)
    return True


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
        self._shortens_tools = shortens_tools

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
        if self._shortens_tools and isinstance(tools, list):
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


def shorten(template: ChatTemplate) -> None:
    """Let a served template render long conversations in short, if its checks, which may be kept, allow that."""
    tokenizer = template.tokenizer
    if template.short is not None:
        return
    if not isinstance(tokenizer, KeptTokenizer):
        shorten_if_alike(template)
        return
    file = tokenizer.directory / f"checks-{template.content_format}-{_code_digest()}.json"
    if file.exists():
        use_outlines(template, tools=json.loads(file.read_text(encoding="utf-8")))
        return
    tools = shorten_if_alike(template)
    try:
        write_whole(file, json.dumps(tools))
    except OSError as error:
        log.warning(
            "the checks of a chat template cannot be kept in %s and are repeated at each start: %s", file, error
        )


def use_outlines(template: ChatTemplate, *, tools: bool | None) -> None:
    """Render long conversations in short from now on, unchecked, and long lists of `tools` too; None renders all."""
    source = template.tokenizer.chat_template
    marks = marks_of(source) if isinstance(source, str) and tools is not None else None
    template.short = None if marks is None else Outlines(template, Outliner(marks, shortens_tools=bool(tools)))


def shorten_if_alike(template: ChatTemplate) -> bool | None:
    """Let a template render long conversations in short, if probes show that it continues both alike.

    Return whether it renders long lists of tools in short too; None where it renders nothing so.
    """
    for tools in (True, False) if template.end_tokens else ():
        use_outlines(template, tools=tools)
        if template.short is None:
            return None
        if all(_continues_alike(template, probe) for probe in _long_probes(min(template.end_tokens))):
            return tools
    template.short = None
    return None


def _long_probes(end_token: int) -> Iterable[Continued]:
    """Yield the probes; `end_token` is what ends a reply that was not cut off."""
    for (messages, replied, tools), keep_thinking in itertools.product(long_conversations(), (False, True)):
        reasoning = messages[replied].get("reasoning", "")
        yield Continued(messages, replied, end_token, reasoning, tools, {}, keep_thinking)


def _continues_alike(template: ChatTemplate, probe: Continued) -> bool:
    probes = [probe]
    if not probe.reasoning:
        probes.append(probe._replace(messages=with_other_text(probe.messages)))
    assert template.short is not None
    shortened = template.short.next_ids
    return all(_answer(shortened, each) == _answer(template.next_ids, each) for each in probes)


def _answer(continuation: Callable[[Continued], TokenIds], probe: Continued) -> list[int] | Reason:
    try:
        return list(map(int, continuation(probe)))
    except Unsafe as unsafe:
        return unsafe.reason


@functools.cache
def _code_digest() -> str:
    digest = blake2b(digest_size=8)
    here = [path for each in (__file__, templates.__file__) for path in sorted(Path(each).parent.glob("*.py"))]
    for file in [*here, Path(tokenizers.__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
