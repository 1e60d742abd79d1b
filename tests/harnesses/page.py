"""Renders docs/agents.md from the verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harnesses.entries import HARNESSES
from harnesses.play import COLUMNS

HEAD = """\
# Agents

How agents are pointed at the proxy, and what was seen when each was played through it. `make harnesses` installs
pinned versions into scratch directories, plays each headless through a real proxy in front of the fake engine, and
writes this page. What does not work is in the table too.

Any agent whose base URL can be set can be pointed: give it `http://HOST:8100/sessions/NAME/v1` (OpenAI clients), or the
same without `/v1` (Anthropic and Google clients). `turnwise run -- COMMAND` does it for you; the names that `--as`
takes are in the last column of the second table. See [rollouts.md](rollouts.md).

The fake engine decides what the model says: it calls the agent's tool once and ends when it sees the tool's output.
These are short conversations of two or three turns, without sub-agents, compaction or parallel tools.
"""


def page(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the whole page."""
    names = list(COLUMNS)
    lines = [HEAD, f"| agent | version | dialect | {' | '.join(names)} | played on |", "|---" * (len(names) + 4) + "|"]
    notes = []
    for harness in HARNESSES:
        verdict = verdicts.get(harness.name)
        if verdict is None:
            continue
        cells = [verdict["cells"].get(name, "–") for name in names]
        row = [harness.name, verdict["version"], harness.dialect, *cells, verdict["date"]]
        lines.append(f"| {' | '.join(row)} |")
        notes += [f"* {harness.name}: {note}" for note in verdict["notes"]]
    lines += ["", *(f"* **{name}**: {meaning}." for name, meaning in COLUMNS.items())]
    if notes:
        lines += ["", "What was seen of those that do not do everything:", "", *notes]
    lines += ["", "## Pointing each by hand", "", "| agent | package | pointed by | `--as` |", "|---|---|---|---|"]
    for harness in HARNESSES:
        known = f"`{harness.agent}`" if harness.agent != "any" else "not needed"
        lines.append(f"| {harness.name} | `{harness.package}` | {harness.pointing} | {known} |")
    return "\n".join(lines) + "\n"
