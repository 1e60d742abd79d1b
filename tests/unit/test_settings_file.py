"""The settings file that `turnwise init` writes is read back by every process."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support.commands import invoke
from support.full_disk import no_file_over

from turnwise.commands.flags import DESCRIPTIONS, settings_model
from turnwise.commands.init import HEAD, settings_file
from turnwise.settings import Settings, field_docs, load_settings

REQUIRED = {"engine": {"model": "owner/name"}, "reward": {"source": "judge"}}
"""Settings without a default."""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def text() -> str:
    return settings_file()


def _with_all_defaults_set(text: str) -> str:
    lines = [re.sub(r"^#(?=[a-z_]+ = )", "", line) for line in text.splitlines() if not line.endswith('= "..."')]
    return "\n".join(lines)


def test_the_unedited_file_changes_no_setting(text):
    assert tomllib.loads(text) == {section: {} for section in DESCRIPTIONS}


@pytest.mark.parametrize("section", DESCRIPTIONS)
def test_with_every_setting_set_each_process_gets_its_defaults(text, section):
    path = Path("turnwise.toml")
    path.write_text(_with_all_defaults_set(text))
    model = settings_model(section)
    needed = REQUIRED.get(section, {})
    assert load_settings(model, config=path, section=section, overrides=needed) == model(**needed)


@pytest.mark.parametrize("section", DESCRIPTIONS)
def test_every_setting_is_in_the_file_with_its_description(text, section):
    table = text[text.index(f"\n[{section}]") :]
    docs = field_docs(settings_model(section), Settings)
    for name in settings_model(section).model_fields:
        assert re.search(rf"^#{name} = ", table, flags=re.MULTILINE), name
        if name in docs:
            assert docs[name].split()[0] in table


def test_the_lora_example_at_its_head_is_a_valid_settings_file():
    example = "\n".join(line.removeprefix("#   ") for line in HEAD.splitlines() if line.startswith("#   "))
    Path("lora.toml").write_text(example)
    result = invoke("up", "--dry-run", "--json", "--config", "lora.toml")
    assert result.exit_code == 0, result.output
    assert '"--max-lora-rank",\n      "16"' in result.output


def test_the_short_file_has_twenty_lines_of_settings_that_exist():
    short = invoke("init", "--output", "-").output
    assert len(short.strip().splitlines()) <= 25
    Path("turnwise.toml").write_text(_with_all_defaults_set(short))
    for section in tomllib.loads(short):
        load_settings(settings_model(section), config=None, section=section, overrides=REQUIRED.get(section, {}))


@pytest.mark.parametrize("text", ["[proxyy]\nport = 1\n", "[up]\nport = 1\n\n[proxyy]\nport = 1\n"])
def test_a_misspelt_section_is_an_error_with_the_right_name(text):
    Path("turnwise.toml").write_text(text)
    result = invoke("up", "--dry-run")
    assert (result.exit_code, "did you mean [proxy]?" in result.stderr) == (2, True)


def test_init_writes_the_file_once_and_never_over_another():
    assert invoke("init", "--all").exit_code == 0
    before = Path("turnwise.toml").read_text()
    again = invoke("init", "--all")
    assert (again.exit_code, "exists" in again.stderr) == (2, True)
    assert Path("turnwise.toml").read_text() == before
    assert invoke("init", "--all", "--output", "-").output.strip() == before.strip()


def test_init_on_a_full_disk_leaves_no_file_so_that_the_same_command_can_be_repeated():
    with no_file_over(100):
        full = invoke("init", "--all")
    assert (full.exit_code, "cannot write" in full.stderr, list(Path().iterdir())) == (2, True, [])
    assert invoke("init", "--all").exit_code == 0
