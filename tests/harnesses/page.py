"""Renders docs/agents.md from the verdicts."""

from __future__ import annotations

import itertools

from harnesses.play import COLUMNS, NONE
from harnesses.registry import HARNESSES
from harnesses.verdicts import Stored

HEAD = """\
# Agents

How agents are pointed at the proxy, and what was measured when each was played through it. `make harnesses` installs
pinned versions into scratch directories, plays each headless through a real proxy, and writes this page. Each cell is
the result of a check on the database and the replies. What does not work is in the table too.

Any agent whose base URL can be set can be pointed: give it `http://HOST:8100/sessions/NAME/v1` (OpenAI clients), or the
same without `/v1` (Anthropic and Google clients). `turnwise run -- COMMAND` does it for you; the names that `--as`
takes are in the last column of the last table. See [rollouts.md](rollouts.md).

Chains are continued only where the proxy knows the model's chat template. With `--engine-check off` it loads the
template of the directory that the engine names, or of `--tokenizer`, and checks nothing; without a template every turn
after the first is `retokenised` with the reason `template_unknown`.

## What was measured

A script decides what the model says: it calls the agent's tool, once or twice in one reply, and ends when it sees the
tool's output; it gives a task to a sub-agent where the agent has a tool for that. These are short conversations of two
or three turns, without compaction. How images are served is in [dialects.md](dialects.md).
"""
ENGINES = {
    "vllm": (
        "a real vLLM serves a small random model with a long context. A logits processor "
        "(`tests/support/forced_tokens.py`) forces the tokens that a working model would sample. Token ids, chat "
        "template, tool parsing and streaming are vLLM's own. A relay (`tests/harnesses/recorder.py`) lists what vLLM "
        "sampled, and fails a call where a check asks for it"
    ),
    "fake": "the fake engine (`turnwise fake-engine`), which has vLLM's wire format and lists its calls itself",
}
"""What the values of the column `engine` mean."""


def page(verdicts: Stored) -> str:
    """Return the whole page."""
    lines = [HEAD, *_played(verdicts), "", *_table(verdicts, list(COLUMNS)), ""]
    lines += [f"* **{name}**: {meaning}." for name, meaning in COLUMNS.items()]
    lines += _notes(verdicts)
    lines += ["", "## Pointing each by hand", "", "| agent | package | pointed by | `--as` |", "|---|---|---|---|"]
    for harness in HARNESSES:
        known = f"`{harness.agent}`" if harness.agent != "any" else "not needed"
        lines.append(f"| {harness.name} | `{harness.package}` | {harness.pointing} | {known} |")
    return "\n".join(lines) + "\n"


def _played(verdicts: Stored) -> list[str]:
    """Return what the engines of the table are, and on how many commits it was made."""
    used = {verdict["engine"] for verdict in verdicts.values()}
    commits = {verdict["commit"] for verdict in verdicts.values()}
    lines = ["The column **engine** says what each was played in front of:", ""]
    lines += [f"* `{name}`: {meaning}." for name, meaning in ENGINES.items() if name in used]
    when = "on one commit" if len(commits) == 1 else f"on {len(commits)} commits"
    return [*lines, "", f"All rows were played {when}; the last column has the date and the commit of each."]


def stated_cells(text: str) -> dict[str, dict[str, str]]:
    """Return what the first table of a page states, by agent and column."""
    lines = text[text.index("| agent |") :].splitlines()
    columns = _split(lines[0])
    rows = [_split(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines[2:])]
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _table(verdicts: Stored, columns: list[str]) -> list[str]:
    head = ["agent", "version", "dialect", "engine", *columns, "played on"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for harness in HARNESSES:
        verdict = verdicts.get(harness.name)
        if verdict is not None:
            cells = [verdict["cells"].get(name, NONE) for name in columns]
            played = f"{verdict['date']}, `{verdict['commit']}`"
            row = [harness.name, verdict["version"], harness.dialect, verdict["engine"], *cells, played]
            lines.append(f"| {' | '.join(row)} |")
    return lines


def _notes(verdicts: Stored) -> list[str]:
    notes = []
    for harness in HARNESSES:
        verdict = verdicts.get(harness.name, {"cells": {}, "notes": []})
        if verdict["notes"]:
            notes.append(f"* {harness.name}. {harness.remark}".rstrip())
            notes += [f"    * {note}" for note in verdict["notes"]]
    return ["", "What was seen of those that do not do everything:", "", *notes] if notes else []
