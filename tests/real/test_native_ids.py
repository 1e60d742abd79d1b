"""Ids that agents send by themselves name the session and its sub-agents: each kind with a real client."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from harnesses import proxy_process
from harnesses.engines import FakeEngine
from harnesses.entry import ROOT
from harnesses.install import InstallFailed, install
from harnesses.play import simple_rules, sub_agent_rules
from harnesses.registry import HARNESSES
from harnesses.run import Stage
from turnwise_fake_engine import Script, running_fake_engine

from proxy.sessions.which import NATIVE_IDS, OWN_HEADER

CONTEXT_TOKENS = 262_144
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()


class Case(NamedTuple):
    client: str
    entry: str
    ignored: tuple[str, ...] = ()
    """Entries that the client sends as well, turned off."""
    names_sub_agent: bool = False


CASES = (
    Case("Claude Code", "claude-code", names_sub_agent=True),
    Case("Claude Code", "claude-user", ignored=("claude-code",)),
    Case("Codex CLI", "codex", names_sub_agent=True),
    Case("Codex CLI", "prompt-cache-key", ignored=("codex",)),
    Case("opencode", OWN_HEADER, names_sub_agent=True),
    Case("opencode", "session-affinity", ignored=(OWN_HEADER,)),
    Case("Mistral Vibe", "session-affinity"),
    Case("OpenHands SDK", "litellm"),
    Case("Kimi Code", "prompt-cache-key"),
)
WITH_AN_SDK = {"conversation": "openai (Python)"}
"""Entries whose client needs no installation: `tests/contract/clients` has their tests, which are not slow."""


def test_every_entry_of_the_table_has_a_real_client_that_the_docs_name():
    tested = {case.entry: case.client for case in CASES} | WITH_AN_SDK
    assert tested.keys() == {entry.name for entry in NATIVE_IDS} | {OWN_HEADER}
    rows = [line for line in CONCEPTS.splitlines() if line.startswith("| ")]
    for entry, client in tested.items():
        assert any(f"`{entry}" in row and client in row for row in rows), f"docs/concepts.md: {entry}, {client}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.client}: {case.entry}")
def test_the_id_of_a_real_client_names_its_session_and_its_sub_agent(tmp_path: Path, case: Case):
    """`make harnesses` installs the clients. All calls of a run are in one session, also those of its sub-agent."""
    (harness,) = (each for each in HARNESSES if each.name == case.client)
    try:
        directory = install(harness, ROOT / ".harnesses")
    except InstallFailed as error:
        pytest.skip(str(error))
    with (
        running_fake_engine(Script(model="gpt-4.1-mini", max_model_len=CONTEXT_TOKENS)) as engine,
        proxy_process.running(engine.url, tmp_path, ignored_ids=case.ignored) as proxy,
    ):
        stage = Stage(harness, directory, proxy, FakeEngine(engine))
        attempt = stage.attempt(
            None, lambda place: sub_agent_rules(stage) if case.names_sub_agent else simple_rules(stage, place, "one")
        )
    assert attempt.finished, attempt.log[-2000:]
    (session_id,) = {turn["session_id"] for turn in attempt.turns}
    if case.entry == OWN_HEADER:
        assert session_id.startswith("ses_")
    else:
        assert session_id.startswith(f"{case.entry}:")
    reasons = {turn["role_reason"] for turn in attempt.turns if turn["role"] == "sub_agent"}
    assert ("agent_id" in reasons) == case.names_sub_agent
