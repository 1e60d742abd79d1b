"""Renders docs/agents.md from the verdicts."""

from collections.abc import Mapping, Sequence

from harnesses import shortening
from harnesses.entry import Harness
from harnesses.play import COLUMNS, NONE, SAMPLES
from harnesses.registry import HARNESSES, SHORTENING
from harnesses.verdicts import Stored

HEAD = """\
# Agents

This page lists the agents and SDKs that were tested with the proxy, the results, and their configuration.
`make harnesses` installs pinned versions into scratch directories, runs each headless through a real proxy, and writes
this page. Each cell is the result of a check of the database and the replies, failures included.

Any agent with a configurable base URL works with the proxy: set it to `http://HOST:8100/sessions/NAME/v1` (OpenAI
clients), or the same without `/v1` (Anthropic and Google clients). `turnwise run -- COMMAND` does this for you; the
last column of the last table has the names for `--as`. See [rollouts.md](rollouts.md).

The proxy continues chains only if it knows the model's chat template: see [exactness.md](exactness.md).

## Results

A script determines the model's replies. It calls the agent's tool, once or twice in one reply, and ends after the
tool's output. If the agent has a tool for sub-agents, the script gives a sub-agent a task. The conversations are short,
two or three turns without compaction. For images see [dialects.md](dialects.md).
"""
SHORTENED = """\

## Agents that compact or trim

These agents shorten their conversation. The script calls the tool eight times, or once for each of several questions,
and each run contains at least one cut. A cut starts a new chain, and the session's reward applies to all its chains.

Copilot CLI and Cline cut when the engine's count of tokens reaches a part of their context length. The fake engine's
tokens are bytes, up to three times as many as vLLM's, so the length is set from a measured prompt. Copilot CLI asks for
its summary beside its next call: the one that arrives second starts a chain, so a run has two chains or three.

Without a session in the base URL, the calls after a cut are found by the ids of the tool calls that they repeat, and
else by the summary that they go on from. An agent that keeps neither starts a new session, and so does a request for a
summary that is sent without the conversation. Give such agents a session in the base URL: then all calls of a run are
in it.
"""
TAKEN = """\

Of {num_ordinary} calls in these runs that ask for no summary, the proxy takes {num_taken} for a compaction prompt.
"""
ENGINES = {
    "vllm": (
        "a real vLLM serves a small random model with a long context. A logits processor "
        "(`tests/support/forced_tokens.py`) forces the tokens that a working model would sample. Token ids, chat "
        "template, tool parsing and streaming are vLLM's own. A relay (`tests/harnesses/recorder.py`) records the "
        "tokens that vLLM samples, and fails a call when a check requests it"
    ),
    "fake": "the fake engine (`turnwise fake-engine`), which has vLLM's wire format and records its calls itself",
}
"""Meaning of each value of the column `engine`."""


def page(verdicts: Stored) -> str:
    lines = [HEAD, *_played(verdicts), "", *_table(verdicts, HARNESSES, COLUMNS), *_notes(verdicts, HARNESSES)]
    lines += [SHORTENED, *_table(verdicts, SHORTENING, shortening.COLUMNS), *_notes(verdicts, SHORTENING)]
    counted = [verdict for verdict in verdicts.values() if verdict["num_ordinary"]]
    totals = {name: sum(verdict[name] for verdict in counted) for name in ("num_ordinary", "num_taken")}
    lines += [TAKEN.format(**totals).rstrip()] if counted else []
    lines += ["", "## Configuration of each agent", ""]
    lines += ["| agent | package | setting of the base URL | `--as` |", "|---|---|---|---|"]
    for harness in (*HARNESSES, *SHORTENING):
        known = f"`{harness.agent}`" if harness.agent != "any" else "not needed"
        lines.append(f"| {harness.name} | `{harness.package}` | {harness.pointing} | {known} |")
    return "\n".join(lines) + "\n"


def _played(verdicts: Stored) -> list[str]:
    used = {verdict["engine"] for verdict in verdicts.values()}
    commits = {verdict["commit"] for verdict in verdicts.values()}
    lines = ["The column **engine** names the engine behind the proxy:", ""]
    lines += [f"* `{name}`: {meaning}." for name, meaning in ENGINES.items() if name in used]
    when = "on one commit" if len(commits) == 1 else f"on {len(commits)} commits"
    return [*lines, "", f"All rows were played {when}; the last column gives the date and the commit of each."]


def _table(verdicts: Stored, harnesses: Sequence[Harness], columns: Mapping[str, str]) -> list[str]:
    head = ["agent", "version", "dialect", "engine", *columns, "played on"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for harness in harnesses:
        verdict = verdicts.get(harness.name)
        if verdict is not None:
            cells = [verdict["cells"].get(name, "" if name == SAMPLES else NONE) for name in columns]
            played = f"{verdict['date']}, `{verdict['commit']}`"
            row = [harness.name, verdict["version"], harness.dialect, verdict["engine"], *cells, played]
            lines.append(f"| {' | '.join(row)} |")
    return [*lines, "", *(f"* **{name}**: {meaning}." for name, meaning in columns.items())]


def _notes(verdicts: Stored, harnesses: Sequence[Harness]) -> list[str]:
    notes = []
    for harness in harnesses:
        verdict = verdicts.get(harness.name, {"notes": []})
        if verdict["notes"]:
            notes.append(f"* {harness.name}. {harness.remark}".rstrip())
            notes += [f"    * {note}" for note in verdict["notes"]]
    return ["", "The agents that do not pass every check, with the stored turns:", "", *notes] if notes else []
