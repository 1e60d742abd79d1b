"""Every command and every setting in README and docs exists: syntax, programs, subcommands, flags, names, files."""

import re
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from support.documented_commands import PAGES, ROOT, blocks
from support.waiting import WAIT_SECONDS

from turnwise.commands.cli import main
from turnwise.commands.flags import DESCRIPTIONS
from turnwise.exchange.plugins import COMMANDS, PACKAGE_OF
from turnwise.settings import load_settings, settings_model

SHELL = blocks("sh")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

OTHER_PROGRAMS = {"apt-get", "chmod", "cp", "createdb", "curl", "cut", "export", "node", "npm", "pg_dump", "pg_restore"}
OTHER_PROGRAMS |= {"pip", "printf", "python", "sqlite3", "su", "."}
"""Programs of others: only the syntax of their commands is checked, not their flags."""

each_block = pytest.mark.parametrize("block", SHELL, ids=str)


@pytest.fixture(autouse=True)
def _files_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("calls.jsonl").touch()
    Path("examples.jsonl").touch()
    Path("path/to/model").mkdir(parents=True)


def _check_turnwise(words: list[str]) -> None:
    command: click.Command = main
    context = click.Context(main, info_name="turnwise")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    command.make_context(command.name, list(words), parent=context.parent)


def _check_compose(words: list[str]) -> None:
    """Check that the profile and the services of a `docker compose` command are in the file."""
    known = set(COMPOSE["services"])
    profiles = {profile for service in COMPOSE["services"].values() for profile in service.get("profiles", [])}
    if "--profile" in words:
        assert words[words.index("--profile") + 1] in profiles
    if "logs" in words:
        assert words[-1] in known
    if "run" in words:
        assert known & set(words)


@each_block
def test_a_block_is_valid_shell_syntax(block):
    done = subprocess.run(
        ["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


@each_block
def test_every_command_of_the_block_exists_with_its_flags(block):
    for words in block.commands():
        match words:
            case ["turnwise", *rest]:
                _check_turnwise(rest)
            case ["torchrun", *_, "-m", "turnwise", "train", "--config", config, "--multi-devices"]:
                _check_turnwise(["train", "--config", config, "--multi-devices"])
            case ["make", target, *_]:
                assert target in MAKE_TARGETS
            case ["docker", "compose", *rest]:
                _check_compose(rest)
            case [program, *_]:
                assert program in OTHER_PROGRAMS, f"add {program!r} to OTHER_PROGRAMS, or a case that checks it"


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_every_setting_of_a_toml_block_exists(block):
    path = Path("block.toml")
    path.write_text(block.text)
    for section in tomllib.loads(block.text):
        needed = {"model": "owner/name"} if section == "engine" else {}
        assert section in DESCRIPTIONS
        load_settings(settings_model(section), config=path, section=section, overrides=needed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_inline_command_exists(page):
    for command in re.findall(r"`((?:pytest|python|make|turnwise) [^`]+)`", page.read_text()):
        program, first, *_ = command.split()
        if program == "pytest" or (program == "python" and first.endswith(".py") and "/" in first):
            assert list(ROOT.glob(first.rstrip("/"))), f"{page.name}: {first} does not exist"
        elif program == "make":
            assert first in MAKE_TARGETS | {"SEED=…"}, f"{page.name}: make {first}"
        elif program == "turnwise" and first.isalpha():
            assert first in {*main.commands, *PACKAGE_OF[COMMANDS]}, f"{page.name}: turnwise {first}"
