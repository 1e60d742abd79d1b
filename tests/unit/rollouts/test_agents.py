from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from turnwise.errors import SettingsError
from turnwise.rollouts.agents import AGENTS, Address, command_line, environment, find_agent, write_files


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address("http://127.0.0.1:8100/sessions/s1/v1", "key-1", "demo", tmp_path / "home")


def test_an_agent_is_identified_by_its_program():
    assert find_agent(["/opt/bin/codex", "exec"]).name == "codex"
    assert find_agent(["python", "agent.py"]).name == "any"
    assert find_agent(["npx", "codex"], "codex").name == "codex"
    with pytest.raises(SettingsError, match="'codx'"):
        find_agent(["npx"], "codx")


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_every_known_agent_gets_the_address_of_its_session(name, address):
    agent = AGENTS[name]
    write_files(agent, address)
    for path in address.home.rglob("*.json"):
        json.loads(path.read_text())
    for path in address.home.rglob("*.toml"):
        assert address.base_url in str(tomllib.loads(path.read_text()))
    variables = environment(agent, address, scratch_home=True)
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:8100/sessions/s1/v1"
    assert variables["ANTHROPIC_BASE_URL"] == variables["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8100/sessions/s1"
    assert variables["HOME"] == str(address.home)


def test_an_agents_default_flags_precede_the_users_flags(address):
    assert command_line(AGENTS["pi"], ["pi", "-p", "hello"], address) == [
        *("pi", "--provider", "turnwise", "--model", "demo"),
        *("-p", "hello"),
    ]


def test_the_users_turnwise_settings_are_not_passed_to_the_agent(address, monkeypatch):
    monkeypatch.setenv("TURNWISE_RUN_API_KEY", "secret")
    assert "TURNWISE_RUN_API_KEY" not in environment(AGENTS["any"], address, scratch_home=False)
