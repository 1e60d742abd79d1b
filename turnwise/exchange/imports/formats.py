"""What reads a line of a file: the files of OpenAI fine-tuning, Hugging Face chat data sets, and formats of plug-ins.

OpenAI has supervised examples with optional weights, and pairs of preferred and other outputs. Of data sets it takes
the columns that TRL and most published sets use: `messages` or `conversations`; `prompt` with `completion`; `prompt`
with `chosen` and `rejected`, or these two with the prompt in both; `instruction`, `input` and `output` of Alpaca. Each
may be messages or plain text. `system`, `system_prompt` and `history` come before them. A `label` (KTO) or `score`
column is the reward. A row that can be read in two ways is refused: an import never guesses a reply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.drafts import (
    Draft,
    ImportedConversation,
    SampledTokens,
    chat_message,
    chat_messages,
    check_marks,
    check_no_media,
    conversation_of,
    tool_schemas,
    untrained_of,
)
from turnwise.types import Json, number_of


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """The functions that read one format."""

    drafts_of: Callable[[Json], list[Draft]]
    """Returns the sessions of a document; raises `BadLine` or `SkippedLine` where it has none."""
    key_of: Callable[[Json], str | None] = lambda _: None
    """Returns the session that the document belongs to; None if it is a separate session."""


REWARDS = {"chosen": 1.0, "rejected": 0.0}
"""The sessions of a pair."""
OUTPUTS = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
"""Fields of a preference example, and the session that each becomes."""


def openai_drafts(document: Json) -> list[Draft]:
    """Return one session for a supervised example, two for a preference example."""
    if "preferred_output" in document:
        return _pair(document)
    if "messages" not in document:
        raise BadLine(f"it has neither messages nor preferred_output; its fields are {', '.join(document) or 'none'}")
    messages = chat_messages(document["messages"])
    untrained = untrained_of(document["messages"])
    return [Draft(conversations=[conversation_of(messages, _tools(document), untrained=untrained)])]


def _pair(document: Json) -> list[Draft]:
    request = document.get("input")
    if not isinstance(request, dict):
        raise BadLine("a preference example needs an input with messages")
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
    tools, functions = tool_schemas(document.get("tools")), document.get("functions")
    if isinstance(functions, str) and not functions.lstrip().startswith("["):
        return tools  # a text of the row's own
    functions = tool_schemas(functions)
    if tools and functions and tools != functions:
        raise BadLine("it has tools and functions")
    return tools or functions


CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
REWARD_COLUMNS = ("reward", "score", "label")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")


def data_set_drafts(document: Json) -> list[Draft]:
    """Return the session of a row, or the two sessions of a preference row."""
    check_no_media(document)
    check_marks(document)
    tools = _tools(document)
    given = [column for column in CONVERSATION_COLUMNS if document.get(column)]
    columns = _conversations(document, given)
    if document.get("chosen") is not None and document.get("rejected") is not None:
        starts, wholes, marked = [], {}, {}
        for name in REWARDS:
            wholes[name], start, marked[name] = _with_prompt(document, name)
            starts.append(start)
        is_whole = wholes["chosen"][0]["role"] != "assistant"  # else another column may have its prompt
        _check_agrees(document, columns if is_whole else given, list(wholes.values()))
        return _pair_drafts(wholes, marked, min(starts), tools)
    rewards = _rewards(document)
    document = _with_completion(document)
    if columns and document.get("completion") is not None:
        _check_agrees(document, columns, [_with_prompt(document, "completion")[0]])
    if columns:
        return [Draft(conversations=[_whole_conversation(document, columns[0], tools)], rewards=rewards)]
    if document.get("completion") is not None:
        whole, start, untrained = _with_prompt(document, "completion")
        untrained = untrained.union(range(start or len(whole) - 1))
        return [Draft(conversations=[conversation_of(whole, tools, untrained=untrained)], rewards=rewards)]
    for column in given:
        chat_messages(document[column])  # says what it is instead
    raise BadLine(
        f"it has none of the columns {', '.join(CONVERSATION_COLUMNS)}, completion, chosen with rejected, "
        f"instruction with output; its columns are {', '.join(document) or 'none'}"
    )


def _conversations(document: Json, given: list[str]) -> list[str]:
    """Return the column of a row that is a conversation, or none: one of other objects or of text is the row's own."""
    columns = [
        column
        for column in given
        if isinstance(found := document[column], list)
        and any(isinstance(one, dict) and one.keys() & {"role", "from"} for one in found)
    ]
    read = [(chat_messages(document[column]), untrained_of(document[column])) for column in columns]
    if any(one != read[0] for one in read):
        raise BadLine(f"it has the columns {' and '.join(columns)}, each of which is a conversation")
    return columns[:1]


def _with_completion(document: Json) -> Json:
    """Return a row of Alpaca's columns with a prompt and a completion, and any other as it is."""
    if not isinstance(document.get("instruction"), str) or document.get("output") is None:
        return document
    if document.get("completion") not in (None, document["output"]):
        raise BadLine("it has a completion and another output")
    asked = "\n\n".join(filter(None, (document["instruction"], document.get("input"))))
    return document | {"prompt": asked, "completion": document["output"]}


def _check_agrees(document: Json, columns: list[str], wholes: list[list[Json]]) -> None:
    """Refuse a column's conversation that other columns neither make nor begin with: which is trained is not known."""
    for column in columns:
        messages = _joined(_before(document), chat_messages(document[column]))
        if messages[0]["role"] == "system" and wholes[0][0]["role"] != "system":
            messages = messages[1:]
        if messages not in wholes and any(whole[: len(messages)] != messages for whole in wholes):
            raise BadLine(f"its {column} is another conversation than its other columns are")


def _whole_conversation(document: Json, column: str, tools: list[Json] | None) -> ImportedConversation:
    messages, before = chat_messages(document[column]), _before(document)
    prompt = document.get("prompt")
    if prompt is not None and _begun(messages, chat_messages(_as_messages(prompt, "user"))) is None:
        raise BadLine(f"its prompt {prompt!r:.80} is not part of its {column}")
    whole = _joined(before, messages)
    return conversation_of(whole, tools, untrained=_marked(document[column], whole).union(range(len(before))))


def _marked(found: list[Any], whole: list[Json]) -> frozenset[int]:
    """Return the places in a conversation of the messages that a file marks as not trained; it ends with the file's."""
    return frozenset(place + len(whole) - len(found) for place in untrained_of(found))


def _with_prompt(document: Json, column: str) -> tuple[list[Json], int, frozenset[int]]:
    """Return a row's messages up to the output in a column, how many are its prompt (0: none), and the marked ones."""
    output, prompt = document[column], document.get("prompt")
    given = _as_messages(output, "assistant")
    messages, start = chat_messages(given), 0
    if prompt is None and isinstance(output, str):
        raise BadLine(f"its {column} is a text, and there is no prompt that it answers")
    if prompt is not None:
        asked = chat_messages(_as_messages(prompt, "user"))
        begun = _begun(messages, asked)
        if begun is None and messages[0]["role"] != "assistant" and asked[-1]["role"] == "user":
            raise BadLine(f"its prompt is not part of its {column}, which has a prompt of its own")
        messages, start = ([*asked, *messages], len(asked)) if begun is None else (messages, begun)
    whole = _joined(_before(document), messages)
    return whole, start + len(whole) - len(messages) if start else 0, _marked(given, whole)


def _begun(messages: list[Json], asked: list[Json]) -> int | None:
    """Return after how many messages a prompt ends that a conversation repeats; None where it does not repeat it.

    A data set may give the question as text beside a conversation that begins with a system prompt.
    """
    if len(messages) > len(asked) and messages[: len(asked)] == asked:
        return len(asked)
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return first + 1 if len(asked) == 1 and messages[first : first + 1] == asked else None


def _before(document: Json) -> list[Json]:
    """Return the messages of the columns that precede a conversation: a system prompt, and earlier exchanges."""
    given = {column: document[column] for column in SYSTEM_COLUMNS if document.get(column)}
    systems = list(given.values())
    history = document.get("history") or []
    is_paired = isinstance(history, list) and all(isinstance(one, list) and len(one) == 2 for one in history)
    if any(one != systems[0] for one in systems) or not is_paired:
        raise BadLine(f"its {', '.join(given) if is_paired else 'history'} cannot be put before the conversation")
    exchanges = [message for asked, answered in history for message in (("user", asked), ("assistant", answered))]
    return [
        chat_message({"role": role, "content": text})
        for role, text in [*(("system", one) for one in systems[:1]), *exchanges]
    ]


def _joined(before: list[Json], messages: list[Json]) -> list[Json]:
    if before and messages[0]["role"] in ("system", "developer"):
        if messages[0] != before[0]:
            raise BadLine(
                "its conversation begins with a system prompt, and a column would put something else before it"
            )
        messages = messages[1:]
    return [*before, *messages]


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
