"""Renders docs/agents.md from the verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from harnesses.play import COLUMNS, NONE
from harnesses.registry import HARNESSES

Verdicts = Mapping[str, Mapping[str, Any]]

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

## In front of the fake engine

The fake engine decides what the model says: it calls the agent's tool, once or twice in one reply, and ends when it
sees the tool's output; it gives a task to a sub-agent where the agent has a tool for that. These are short
conversations of two or three turns, without compaction.
"""
FORCED = """\
## In front of a real vLLM

A real vLLM serves a small random model with a long context. A logits processor (`tests/support/forced_tokens.py`)
forces the tokens that a working model would sample, by the same script. Token ids, tool parsing and streaming are
vLLM's own. It does not fail or wait on request, so there are fewer columns.
"""


def page(verdicts: Verdicts, forced: Verdicts) -> str:
    """Return the whole page.

    Args:
        verdicts: by the agent's name, in front of the fake engine.
        forced: the same, in front of a real vLLM.
    """
    lines = [HEAD, *_table(verdicts, list(COLUMNS)), ""]
    lines += [f"* **{name}**: {meaning}." for name, meaning in COLUMNS.items()]
    lines += _notes(verdicts)
    if forced:
        columns = [name for name in COLUMNS if any(name in each["cells"] for each in forced.values())]
        lines += ["", FORCED, *_table(forced, columns), *_notes(forced)]
    lines += ["", "## Pointing each by hand", "", "| agent | package | pointed by | `--as` |", "|---|---|---|---|"]
    for harness in HARNESSES:
        known = f"`{harness.agent}`" if harness.agent != "any" else "not needed"
        lines.append(f"| {harness.name} | `{harness.package}` | {harness.pointing} | {known} |")
    return "\n".join(lines) + "\n"


def stated_cells(text: str) -> dict[str, dict[str, str]]:
    """Return what the first table of a page states, by agent and column."""
    lines = text[text.index("| agent |") :].splitlines()
    columns = _split(lines[0])
    rows = [_split(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines[2:])]
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _table(verdicts: Verdicts, columns: list[str]) -> list[str]:
    lines = [f"| agent | version | dialect | {' | '.join(columns)} | played on |", "|---" * (len(columns) + 4) + "|"]
    for harness in HARNESSES:
        verdict = verdicts.get(harness.name)
        if verdict is not None:
            cells = [verdict["cells"].get(name, NONE) for name in columns]
            lines.append(
                f"| {' | '.join([harness.name, verdict['version'], harness.dialect, *cells, verdict['date']])} |"
            )
    return lines


def _notes(verdicts: Verdicts) -> list[str]:
    notes = []
    for harness in HARNESSES:
        verdict = verdicts.get(harness.name, {"cells": {}, "notes": []})
        if verdict["notes"]:
            notes.append(f"* {harness.name}. {harness.remark}".rstrip())
            notes += [f"    * {note}" for note in verdict["notes"]]
    return ["", "What was seen of those that do not do everything:", "", *notes] if notes else []
