"""Whether a reply passes an example's check: read as text and calls, judged by a rule, a command or a rubric.

A command is a file of the operator's directory, which no example, agent or tenant can write, and runs there; an example
only names it. It gets the conversation with the reply, as a grading command gets a session.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from trainer.features.examples.playing import stops_of
from turnwise.errors import GraderFailed
from turnwise.features.examples import COMMAND, NOT_AGAIN, RUBRIC, TEXT, TOOL_CALL, Example
from turnwise.rewards.grader import CommandGrader, document
from turnwise.rewards.judge import Judge
from turnwise.rewards.settings import RewardSettings
from turnwise.settings import load_settings
from turnwise.types import Json

LEAST_SCORE = 0.5
"""Reward from which a command's or a rubric's verdict is a right answer, unless the rubric has its own."""
_THINKING = re.compile(r"^.*?</think>", re.DOTALL)
_TAGGED = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MARKS = re.compile(r"</?tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<function_calls>|</?tools?>")
"""What models write around their calls."""


class ExampleRules(BaseModel):
    """How versions answer pinned examples, and who judges the answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answers: int = Field(default=5, ge=0, le=1000)
    """Of each version to each example, before it is published; 0 publishes every version."""
    tokens: int = Field(default=512, ge=1)
    """At which an answer is cut, where the call had no lower limit."""
    must_mend: bool = True
    """Publish no version that still fails an example: no answer is right, nor was any of the served version's. Off, a
    version is only compared with the served one."""
    commands: str = ""
    """Directory of the programs that checks of kind `command` name; nobody but the operator can write there. Empty: no
    such check is judged."""
    seconds: float = Field(default=60.0, gt=0)
    """Time limit of a command."""


class Reply(NamedTuple):
    """What a reply says and calls."""

    text: str
    calls: list[tuple[str, Any]]
    """Names and arguments."""


def read_reply(text: str, sampling: Json) -> Reply:
    """Return a reply's text without its thinking and its calls, and the calls.

    Calls are read as most models write them: JSON objects with `name` and `arguments` or `parameters`, or
    `<function=name>` with parameters.
    """
    for stop in stops_of(sampling):
        text = text.partition(stop)[0]
    text, calls = _THINKING.sub("", text, count=1), list[tuple[str, Any]]()
    for name, inner in _TAGGED.findall(text):
        calls.append((name, {key: _value(value) for key, value in _PARAMETER.findall(inner)}))
    text, found = _without_objects(_TAGGED.sub("", text))
    return Reply(_MARKS.sub("", text).strip(), [*calls, *found])


class Checks:
    """Judges replies to examples."""

    def __init__(self, rules: ExampleRules, log: Path) -> None:
        """`log` gets what commands write to their standard error."""
        self._rules = rules
        self._log = log

    def why_not_judged(self, example: Example) -> str | None:
        """Return why an example cannot be judged with these settings; None where it can."""
        kind = example.criterion["kind"]
        if kind == RUBRIC and judge_settings(example).judge_url is None:
            return "no `judge_url` is set in [reward], which judges by rubrics"
        if kind == COMMAND and (why := self._why_no_command(example.criterion["name"])):
            return why
        return None

    def are_right(self, example: Example, texts: Sequence[str]) -> list[bool]:
        """Return which replies, as the tokenizer decodes them, pass.

        Raises:
            GraderFailed: A command or the judge gave no verdict.
        """
        check, replies = example.criterion, [read_reply(text, example.sampling) for text in texts]
        if check["kind"] == TOOL_CALL:
            return [any(_is_call(call, check) for call in reply.calls) for reply in replies]
        if check["kind"] == TEXT:
            return [_has_text(reply.text, check) for reply in replies]
        least = check.get("least", LEAST_SCORE)
        return asyncio.run(self._scores(example, replies, least))

    def is_again(self, example: Example, texts: Sequence[str], pinned: str) -> list[bool]:
        """Return which replies say and call the same as the pinned one."""
        known = read_reply(pinned, example.sampling)
        return [_same(read_reply(text, example.sampling), known) for text in texts]

    def _why_no_command(self, name: str) -> str | None:
        directory = Path(self._rules.commands)
        if not self._rules.commands:
            return f"no `examples.commands` is set, the directory with the command {name!r}"
        if not os.access(directory / name, os.X_OK):
            return f"there is no executable {name!r} in {str(directory)!r} (examples.commands)"
        return None

    async def _scores(self, example: Example, replies: Sequence[Reply], least: float) -> list[bool]:
        decide = self._by_command if example.criterion["kind"] == COMMAND else self._by_rubric
        return [score >= least for score in await decide(example, [_document(example, reply) for reply in replies])]

    async def _by_command(self, example: Example, documents: Sequence[Json]) -> list[float]:
        directory = Path(self._rules.commands).absolute()  # noqa: ASYNC240  it asks no disk
        grader = CommandGrader([str(directory / example.criterion["name"])], self._rules.seconds)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNWISE_")}
        found = []
        for each in documents:
            grades = await grader.grade(each, cwd=directory, environment=environment, log=self._log)
            if len(grades) != 1:
                raise GraderFailed(
                    f"the command {example.criterion['name']!r} gave {len(grades)} verdicts on one reply"
                )
            found.append(grades[0].value)
        return found

    async def _by_rubric(self, example: Example, documents: Sequence[Json]) -> list[float]:
        judge = Judge(judge_settings(example))
        try:
            return [(await judge.decide([each]))[0].value for each in documents]
        finally:
            await judge.close()


def judge_settings(example: Example) -> RewardSettings:
    """Return the settings of the judge that `turnwise reward` has, with an example's rubric and one vote."""
    given = {"source": "judge", "rubric": example.criterion.get("rubric"), "votes": 1}
    return load_settings(RewardSettings, config=None, section="reward", overrides=given)


def right_of(checks: Checks, example: Example, texts: Sequence[str], pinned: str) -> list[bool]:
    """Return which replies pass the example's check."""
    if example.criterion["kind"] == NOT_AGAIN:
        return [not is_same for is_same in checks.is_again(example, texts, pinned)]
    return checks.are_right(example, texts)


def _document(example: Example, reply: Reply) -> Json:
    """Return the conversation with a reply, as graders read sessions."""
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in reply.calls
        ]
    turn_id = example.example_id
    turn: Json = {
        "turn_id": turn_id,
        "parent_turn_id": None,
        "chain_id": turn_id,
        "seq": 0,
        "step": 0,
        "model": "",
        "finish_reason": None,
        "outcome": "exact",
        "reason": None,
        "rewards": [],
        "messages": example.messages,
        "response": message,
        "tools": example.tools,
    }
    return document({"session_id": example.session_id or turn_id, "metadata": {}}, [turn])


def _is_call(call: tuple[str, Any], check: Json) -> bool:
    name, arguments = call
    wanted = check.get("arguments") or {}
    given = arguments if isinstance(arguments, dict) else {}
    return name == check["name"] and all(each in given and given[each] == value for each, value in wanted.items())


def _has_text(text: str, check: Json) -> bool:
    if "equals" in check:
        return text.split() == check["equals"].split()
    return check["contains"] in text


def _same(reply: Reply, pinned: Reply) -> bool:
    if pinned.calls:
        return reply.calls == pinned.calls
    return not reply.calls and reply.text.split() == pinned.text.split()


def _without_objects(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return a text without the JSON objects, or lists of them, that are calls; and the calls."""
    decoder, rest, calls, at = json.JSONDecoder(), list[str](), list[tuple[str, Any]](), 0
    while (start := min((found for mark in "{[" if (found := text.find(mark, at)) >= 0), default=-1)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, start + 1
        found = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
        is_calls = bool(found) and all(each is not None for each in found)
        rest.append(text[at:start] if is_calls else text[at:end])
        calls += [each for each in found if each is not None] if is_calls else []
        at = end
    return "".join([*rest, text[at:]]), calls


def _call_of(value: Any) -> tuple[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    named = next((name for name in ("arguments", "parameters") if name in value), None)
    if named is None:
        return None
    return value["name"], _value(value[named]) if isinstance(value[named], str) else value[named]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
