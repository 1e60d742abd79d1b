"""What reads a line of a file: the files of OpenAI fine-tuning, Hugging Face chat data sets, and formats of plug-ins.

OpenAI has supervised examples with optional weights, and pairs of preferred and other outputs. A row of a data set has
one of three forms, as TRL names them: `messages`; `prompt` and `completion`; `prompt`, `chosen` and `rejected`. Prompts
and outputs may be plain text. `tools` may stand beside them, and a `reward`, `score` or `label` (KTO) of a session. A
line with another column is refused: what it means for the conversation is not known, and an import never guesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.drafts import (
    Draft,
    ImportedConversation,
    SampledTokens,
    chat_messages,
    conversation_of,
    tool_schemas,
    untrained_of,
)
from turnwise.exchange.imports.values import number_of
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """The functions that read one format."""

    drafts_of: Callable[[Json], list[Draft]]
    """Returns the sessions of a document; raises `BadLine` or `SkippedLine` where it has none."""
    key_of: Callable[[Json], str | None] = lambda _: None
    """Returns the session that the document belongs to; None if it is a separate session."""


REWARDS = {"chosen": 1.0, "rejected": 0.0}
"""The sessions of a pair."""
TOOL_COLUMNS = ("tools", "functions", "parallel_tool_calls")
OUTPUTS = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
"""Fields of a preference example, and the session that each becomes."""


def openai_drafts(document: Json) -> list[Draft]:
    """Return one session for a supervised example, two for a preference example."""
    if "preferred_output" in document:
        _check_columns(document, ("input", *OUTPUTS))
        return _pair(document)
    if "messages" not in document:
        raise BadLine(f"it has neither messages nor preferred_output; its fields are {', '.join(document) or 'none'}")
    _check_columns(document, ("messages", *TOOL_COLUMNS))
    messages = chat_messages(document["messages"])
    untrained = untrained_of(document["messages"])
    return [Draft(conversations=[conversation_of(messages, _tools(document), untrained=untrained)])]


def _pair(document: Json) -> list[Draft]:
    request = document.get("input")
    if not isinstance(request, dict):
        raise BadLine("a preference example needs an input with messages")
    _check_columns(request, ("messages", *TOOL_COLUMNS))
    prompt = chat_messages(request.get("messages"))
    wholes, marked = {}, {}
    for field, suffix in OUTPUTS.items():
        wholes[suffix] = [*prompt, *chat_messages(document.get(field))]
        marked[suffix] = _marked(document[field], wholes[suffix])
    return _pair_drafts(wholes, marked, len(prompt), _tools(request))


def _pair_drafts(
    wholes: dict[str, list[Json]], marked: dict[str, frozenset[int]], start: int, tools: list[Json] | None
) -> list[Draft]:
    """Return the sessions of a better and a worse conversation; what both begin with is only part of prompts."""
    better, worse = wholes.values()
    while start < min(len(better), len(worse)) and better[start] == worse[start]:
        start += 1
    return [
        Draft(
            conversations=[conversation_of(whole, tools, untrained=marked[suffix].union(range(start)))],
            rewards={"reward": REWARDS[suffix]},
            suffix=suffix,
        )
        for suffix, whole in wholes.items()
    ]


def _tools(document: Json) -> list[Json] | None:
    tools, functions = tool_schemas(document.get("tools")), tool_schemas(document.get("functions"))
    if tools and functions:
        raise BadLine("it has tools and functions")
    return tools or functions


def _check_columns(document: Json, known: Sequence[str]) -> None:
    other = [column for column, value in document.items() if column not in known and _is_given(value)]
    if other:
        read = " and ".join(column for column in document if column in known)
        raise BadLine(
            f"it has the column {other[0]!r:.60} beside {read}, which is not read; leave it out, or write what it "
            "means into the messages"
        )


def _is_given(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


FORMS = (("messages",), ("prompt", "completion"), ("prompt", *REWARDS))
REWARD_COLUMNS = ("reward", "score", "label")


def data_set_drafts(document: Json) -> list[Draft]:
    """Return the session of a row, or the two sessions of a preference row."""
    form = next((form for form in FORMS if all(_is_given(document.get(column)) for column in form)), None)
    if form is None:
        raise BadLine(
            f"it has none of the forms {'; '.join(map(' and '.join, FORMS))}; its columns are "
            f"{', '.join(document) or 'none'}"
        )
    is_pair = form == FORMS[2]
    _check_columns(document, (*form, "tools", *(() if is_pair else REWARD_COLUMNS)))
    tools = _tools(document)
    if form == FORMS[0]:
        messages, untrained = chat_messages(document["messages"]), untrained_of(document["messages"])
        conversation = conversation_of(messages, tools, untrained=untrained)
        return [_scored(conversation, document)]
    prompt = chat_messages(_as_messages(document["prompt"], "user"))
    wholes, marked = {}, {}
    for column in form[1:]:
        output = _as_messages(document[column], "assistant")
        wholes[column] = [*prompt, *chat_messages(output)]
        marked[column] = _marked(output, wholes[column])
        if (role := wholes[column][len(prompt)]["role"]) not in ("assistant", "tool"):
            raise BadLine(f"its {column} begins with a message of the role {role!r}, and not where its prompt ends")
    if is_pair:
        return _pair_drafts(wholes, marked, len(prompt), tools)
    untrained = marked["completion"].union(range(len(prompt)))
    conversation = conversation_of(wholes["completion"], tools, untrained=untrained)
    return [_scored(conversation, document)]


def _marked(found: list[Any], whole: list[Json]) -> frozenset[int]:
    """Return the places in a conversation of the messages that a file marks as not trained; it ends with the file's."""
    return frozenset(place + len(whole) - len(found) for place in untrained_of(found))


def _as_messages(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _rewards(document: Json) -> dict[str, float]:
    found = {column: number_of(document.get(column), column) for column in REWARD_COLUMNS}
    if found["label"] not in (None, 0.0, 1.0):
        raise BadLine(f"its label is {document['label']!r:.80}; a label that is a reward is 0 or 1")
    values = {value for value in found.values() if value is not None}
    if len(values) > 1:
        raise BadLine(f"its {', '.join(REWARD_COLUMNS)} are {found}, and each of them is a reward")
    return {"reward": values.pop()} if values else {}


def _scored(conversation: ImportedConversation, document: Json) -> Draft:
    rewards = _rewards(document)
    is_unscored = not rewards and not set(REWARD_COLUMNS).isdisjoint(document)
    return Draft(conversations=[conversation], rewards=rewards, is_unscored=is_unscored)


def plugin_format(module: Any) -> Format:
    """Return the format that a module of another package reads; what its sessions contain is checked here."""

    def drafts_of(document: Json) -> list[Draft]:
        return [
            Draft(
                conversations=[_checked(each) for each in found["conversations"]],
                rewards=_numbers(found.get("rewards", {})),
                task_id=found.get("task_id"),
            )
            for found in module.drafts_of(document)
        ]

    return Format(drafts_of, module.key_of)


def _numbers(found: Json) -> dict[str, float]:
    values = {name: number_of(value, f"reward {name!r}") for name, value in found.items()}
    return {name: value for name, value in values.items() if value is not None}


def _checked(found: Json) -> ImportedConversation:
    messages = chat_messages(found["messages"])
    trained = found.get("trained")
    untrained = frozenset() if trained is None else frozenset(range(len(messages))).difference(trained)
    checked = conversation_of(
        messages, tool_schemas(found.get("tools")), untrained=untrained, model=found.get("model", "")
    )
    sampled = {place: SampledTokens(**tokens) for place, tokens in found.get("sampled", {}).items()}
    return dataclasses.replace(checked, sampled=sampled, created_at=found.get("created_at", {}))


FORMATS = {"openai": Format(openai_drafts), "hf": Format(data_set_drafts)}
