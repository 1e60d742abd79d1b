"""The table of docs/agents.md: a fast part with one SDK for each wire format, and all of it as slow tests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from harnesses.engines import FakeEngine, ScriptedEngine, running_forced_engine
from harnesses.entry import ROOT, Harness
from harnesses.install import InstallFailed, install
from harnesses.page import page
from harnesses.play import COLUMNS, Verdict, examine, examine_briefly, simple_rules, sub_agent_rules
from harnesses.proxy_process import ProxyProcess
from harnesses.registry import HARNESSES, SHORTENING
from harnesses.run import Stage
from harnesses.shortening import ShorteningHarness, examine_shortening
from harnesses.verdicts import FILE, Verdicts
from turnwise_fake_engine import Script, running_fake_engine

from proxy.features.native_ids import NATIVE_IDS
from proxy.sessions.identities import OWN_HEADER

CONTEXT_TOKENS = 262_144
SCRATCH = ROOT / ".harnesses"
ALL = (*HARNESSES, *SHORTENING)
STATED = Verdicts(FILE, "present").read()
SDKS = [
    harness
    for harness in HARNESSES
    if harness.installer == "dev" and harness.name.split(" ")[0] in {"openai", "anthropic", "google-genai"}
]
GOOD = {"inferred": "yes", "session by": "conversation", "parallel tools": "yes"}


def by_name(harness: Harness) -> str:
    return harness.name


def installed(harness: Harness) -> Path | None:
    """Return the directory of an agent; None if it cannot be installed on this machine."""
    try:
        return install(harness, SCRATCH)
    except InstallFailed:
        return None


Served = tuple[ScriptedEngine, ProxyProcess]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A fake engine with a long context and a proxy in front of it, for all tests of the module."""
    directory = tmp_path_factory.mktemp("agents")
    with running_fake_engine(Script(model="gpt-4.1-mini", max_model_len=CONTEXT_TOKENS)) as running:
        engine = FakeEngine(running)
        with contextlib.closing(ProxyProcess(engine.url, directory)) as proxy:
            yield engine, proxy


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("forced")
    with (
        running_forced_engine(directory / "model", directory) as engine,
        contextlib.closing(ProxyProcess(engine.url, directory)) as proxy,
    ):
        yield engine, proxy


def test_every_agent_has_a_row_with_its_pinned_version():
    assert {name: row["version"] for name, row in STATED.items()} == {each.name: each.version for each in ALL}
    assert page(STATED) == (ROOT / "docs" / "agents.md").read_text()


def test_no_ordinary_call_of_an_agent_was_taken_for_a_compaction_prompt():
    """The agents' own requests are the corpus; `make harnesses` counts them."""
    assert sum(row["num_ordinary"] for row in STATED.values()) > 0
    assert {name: row["num_taken"] for name, row in STATED.items() if row["num_taken"]} == {}


@pytest.mark.parametrize("harness", SDKS, ids=by_name)
def test_an_sdk_without_a_session_is_one_exact_chain_with_parallel_tools(fake, harness):
    engine, proxy = fake
    verdict = examine_briefly(Stage(harness, install(harness, SCRATCH), proxy, engine))
    assert verdict.cells == GOOD, verdict.notes


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("harness", SDKS, ids=by_name)
def test_every_check_of_an_sdk_holds_in_front_of_a_real_engine_with_forced_tokens(forced, harness):
    engine, proxy = forced
    verdict = examine(Stage(harness, install(harness, SCRATCH), proxy, engine))
    assert {column: cell for column, cell in verdict.cells.items() if cell == "no"} == {}, verdict.notes
    assert verdict.cells.keys() == COLUMNS.keys()


def test_the_verdicts_of_another_commit_are_played_again(tmp_path):
    first, second = HARNESSES[:2]
    file = tmp_path / "verdicts.json"
    Verdicts(file, "earlier").add(first, "vllm", Verdict({"runs": "no"}, ["late"]))
    verdicts = Verdicts(file, "present")
    verdicts.add(second, "fake", Verdict({"runs": "yes"}))
    assert [verdicts.has(each) for each in (first, second)] == [False, True]
    played = [verdicts.read()[each.name] for each in (first, second)]
    assert [(row["engine"], row["cells"]["runs"], row["commit"]) for row in played] == [
        ("vllm", "no", "earlier"),
        ("fake", "yes", "present"),
    ]
    assert "played on 2 commits" in page(verdicts.read())


@pytest.mark.slow
@pytest.mark.parametrize("harness", ALL, ids=by_name)
def test_an_agent_passes_the_checks_that_its_row_states(fake, harness):
    """`make harnesses` installs them; what no machine could install says so in its row."""
    engine, proxy = fake
    stated = STATED[harness.name]["cells"]
    directory = installed(harness)
    if directory is None:
        pytest.skip(f"{harness.name} is not installed on this machine; its row says {stated['runs']!r}")
    stage = Stage(harness, directory, proxy, engine)
    verdict = examine_shortening(stage) if isinstance(harness, ShorteningHarness) else examine(stage)
    good = {column: cell for column, cell in stated.items() if cell == "yes" or column in {"sessions", "summary"}}
    assert {column: verdict.cells.get(column) for column in good} == good, verdict.notes


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
def test_the_id_of_a_real_client_names_its_session_and_its_sub_agent(tmp_path, case):
    """`make harnesses` installs the clients. All calls of a run are in one session, also those of its sub-agent."""
    (harness,) = (each for each in HARNESSES if each.name == case.client)
    try:
        directory = install(harness, ROOT / ".harnesses")
    except InstallFailed as error:
        pytest.skip(str(error))
    with (
        running_fake_engine(Script(model="gpt-4.1-mini", max_model_len=CONTEXT_TOKENS)) as engine,
        contextlib.closing(ProxyProcess(engine.url, tmp_path, case.ignored)) as proxy,
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
