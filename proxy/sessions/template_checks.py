"""What is found out about a chat template by rendering probes: small conversations that are made for one question.

The questions are whether it prints names and ids of calls, and whether it continues long conversations as their
outlines. The second takes half a second of CPU, so its answer is kept beside the tokenizer. It depends on the
tokenizer's files, whose digest names the directory, and on the code that checks, whose digest is in the file's name.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from proxy.sessions.digests import CALL_IDS, NAME
from proxy.sessions.outline import Continued
from proxy.sessions.template import ChatTemplate, Reason, Unsafe
from turnwise import tokenizer as tokenizers
from turnwise.files import write_whole
from turnwise.tokenizer import ContentFormat, KeptTokenizer, load_tokenizer
from turnwise.types import Json, TokenIds

log = logging.getLogger(__name__)


def load_chat_template(path: str, content_format: ContentFormat) -> ChatTemplate:
    """Load a tokenizer and its template from a directory, or by its id from the local Hugging Face cache.

    Raises:
        OSError, ValueError: there is no such tokenizer, as transformers raises it.
    """
    tokenizer, end_tokens = load_tokenizer(path)
    template = ChatTemplate(tokenizer, end_tokens, content_format)
    template.fields_read = fields_read(template)
    file = _result_file(tokenizer, content_format)
    if file is not None and file.exists():
        template.shorten(tools=json.loads(file.read_text(encoding="utf-8")))
        return template
    shorten_if_alike(template)
    if file is not None:
        _keep(file, template.shortens_tools)
    return template


def fields_read(template: ChatTemplate) -> frozenset[str]:
    """Return what a template prints besides role, content and tool calls: `NAME`, `CALL_IDS`.

    The same conversation with other names or ids then gives another text.
    """
    return frozenset(field for field in (NAME, CALL_IDS) if any(_prints(template, field, probe) for probe in PROBES))


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
            _continues_alike(template, probe) for probe in long_probes(min(template.end_tokens))
        ):
            return
    template.shorten(tools=None)


def _continues_alike(template: ChatTemplate, probe: Continued) -> bool:
    """Return whether the short way answers like the whole way, also once it knows the kind of conversation."""
    probes = [probe] if probe.reasoning else [probe, _with_other_text(probe)]
    return all(_answer(template.continuation, each) == _answer(template.whole_continuation, each) for each in probes)


def _answer(continuation: Callable[[Continued], TokenIds], probe: Continued) -> list[int] | Reason:
    """Return the answer to a probe: ids, or the reason of a refusal."""
    try:
        return list(map(int, continuation(probe)))
    except Unsafe as unsafe:
        return unsafe.reason


def _result_file(tokenizer: Any, content_format: ContentFormat) -> Path | None:
    if not isinstance(tokenizer, KeptTokenizer):
        return None
    return tokenizer.directory / f"checks-{content_format}-{_code_digest()}.json"


@functools.cache
def _code_digest() -> str:
    """Return the digest of the code that the checks run."""
    digest = blake2b(digest_size=8)
    here = sorted(Path(__file__).parent.glob("*.py"))
    for file in [*here, Path(tokenizers.__file__)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _keep(file: Path, shortens_tools: bool | None) -> None:
    try:
        write_whole(file, json.dumps(shortens_tools))
    except OSError as error:
        log.warning(
            "the checks of a chat template cannot be kept in %s and are repeated at each start: %s", file, error
        )


PROBE_VALUES = {NAME: "probename", CALL_IDS: "probecall"}
OTHER_VALUE = "otherwise"
"""Nine letters, because some templates refuse other ids of tool calls."""
_NAME, _CALL_ID = PROBE_VALUES[NAME], PROBE_VALUES[CALL_IDS]
PROBES: Sequence[list[Json]] = (
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
REPEATED = 12
"""Repetitions of a pattern: enough for most of them to be left out of the outline."""
LONG_TEXT = "Some text that is long enough to lose its middle in the outline. " * 8
OTHER_TEXT = "Words of another length, none of which the first text has. " * 6
CALLED, OTHER_CALLED = "look_up", "write_down"
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": LONG_TEXT,
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
    for name in (CALLED, OTHER_CALLED, "send_off")
]
SYSTEM: Json = {"role": "system", "content": LONG_TEXT}
USER: Json = {"role": "user", "content": LONG_TEXT}
ANSWER: Json = {"role": "assistant", "content": LONG_TEXT}
THOUGHT: Json = {**ANSWER, "reasoning": LONG_TEXT}
EMBEDDED_THOUGHT: Json = {"role": "assistant", "content": f"<think>\n{LONG_TEXT}\n</think>\n\n{LONG_TEXT}"}


def _with_other_text(probe: Continued) -> Continued:
    """Return a conversation with the same kinds of messages: with other texts, functions and ids of calls."""
    text = json.dumps([probe.messages, probe.reasoning]).replace(LONG_TEXT, OTHER_TEXT)
    messages, reasoning = json.loads(text.replace(CALLED, OTHER_CALLED).replace("call_", "made_"))
    return probe._replace(messages=messages, reasoning=reasoning)


def _call(number: int, content: str = "", *, name: str = CALLED, first: int = 0, **fields: Any) -> Json:
    """Return a reply with calls; their ids have nine characters, because some templates refuse others."""
    arguments = json.dumps({"name": LONG_TEXT})
    calls = [
        {"id": f"call_{each:04}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for each in range(first, first + number)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


def _results(number: int, *, first: int = 0, **fields: Any) -> list[Json]:
    return [
        {"role": "tool", "tool_call_id": f"call_{each:04}", "content": LONG_TEXT, **fields}
        for each in range(first, first + number)
    ]


WORK = [_call(1), *_results(1, name=CALLED)]
OTHER_WORK = [_call(1, first=9), *_results(1, first=9)]
SAME_ID = [_call(1, name="send_off"), *_results(1)]
"""Another function with the id of a later call, which a template may take for the later one."""
BEFORE: Sequence[list[Json]] = (
    [SYSTEM, USER, *[ANSWER, USER] * REPEATED],
    [USER, *[ANSWER, USER] * REPEATED],
    [SYSTEM, USER, *[THOUGHT, USER] * REPEATED],
    [USER, *[EMBEDDED_THOUGHT, USER] * REPEATED],
    [SYSTEM, USER, *WORK * REPEATED],
    [USER, *[_call(1, reasoning=LONG_TEXT), *_results(1, name=CALLED)] * REPEATED],
    [SYSTEM, USER, *[_call(2, LONG_TEXT), *_results(2, name=CALLED)] * REPEATED],
    [SYSTEM, USER, *OTHER_WORK * REPEATED, *SAME_ID, *OTHER_WORK * REPEATED],
    [SYSTEM, USER, *WORK * REPEATED, ANSWER, USER, *WORK * REPEATED],
    [SYSTEM, USER, *WORK * REPEATED, THOUGHT, USER, *[ANSWER, USER] * REPEATED],
)
"""What stands before the reply."""
REPLIES: Sequence[tuple[Json, list[Json]]] = (
    (ANSWER, [USER]),
    (THOUGHT, [USER]),
    (_call(1), _results(1)),
    (_call(2, reasoning=LONG_TEXT), [*_results(2, name=CALLED), USER]),
)
"""Replies, and what follows them."""


def long_probes(end_token: int) -> Iterator[Continued]:
    """Yield the probes; `end_token` is what ends a reply that was not cut off."""
    for before, (reply, after), keep_thinking in itertools.product(BEFORE, REPLIES, (False, True)):
        has_calls = any(message.get("tool_calls") for message in [*before, reply])
        yield Continued(
            messages=[*before, reply, *after],
            replied=len(before),
            last_token=end_token,
            reasoning=reply.get("reasoning", ""),
            tools=TOOLS if has_calls else None,
            arguments={},
            keep_thinking=keep_thinking,
        )
