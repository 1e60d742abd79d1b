import re
import tomllib
from pathlib import Path

import pytest
from pydantic import Field, SecretStr
from support.commands import invoke
from support.full_disk import no_file_over

from proxy.settings import ProxySettings
from turnwise.commands.flags import DESCRIPTIONS
from turnwise.commands.init import HEAD, settings_file
from turnwise.errors import SettingsError
from turnwise.settings import Settings, describe, field_docs, load_settings, settings_model


class Shop(Settings):
    port: int = 8000
    host: str = "127.0.0.1"
    engines: list[str] = Field(default_factory=list)
    token: SecretStr | None = None


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("PORT", "HOST", "ENGINES", "TOKEN", "PROT"):
        monkeypatch.delenv(f"TURNWISE_PROXY_{name}", raising=False)


def load(config=None, **overrides):
    return load_settings(Shop, config=config, section="proxy", overrides=overrides)


def test_each_source_overrides_the_one_before_it(tmp_path, monkeypatch):
    """Defaults < file < environment < flags."""
    assert load().port == 8000
    (tmp_path / "turnwise.toml").write_text("[proxy]\nport = 1\nhost = 'a'\n")
    assert load().port == 1
    monkeypatch.setenv("TURNWISE_PROXY_PORT", "2")
    assert load().port == 2
    assert load(port=3, host=None).port == 3
    assert load(port=3, host=None).host == "a"


def test_a_file_without_sections_applies_to_the_process_that_reads_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("port = 7\n")
    assert load(path).port == 7


def test_a_process_ignores_the_sections_of_others(tmp_path):
    path = tmp_path / "all.toml"
    path.write_text("[trainer]\nlr = 1.0\n[proxy]\nport = 7\n")
    assert load(path).port == 7


def test_lists_in_the_environment_are_read_as_json(monkeypatch):
    monkeypatch.setenv("TURNWISE_PROXY_ENGINES", '["http://a", "http://b"]')
    assert load().engines == ["http://a", "http://b"]
    monkeypatch.setenv("TURNWISE_PROXY_ENGINES", "http://a")
    with pytest.raises(SettingsError, match="written as JSON"):
        load()


def test_an_undeclared_key_is_an_error_from_every_source(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text("[proxy]\nprot = 7\n")
    with pytest.raises(SettingsError, match=r"\[proxy\] has no setting 'prot' \(from file .*did you mean 'port'\?"):
        load(path)
    with pytest.raises(SettingsError, match="from flag"):
        load(prot=7)
    monkeypatch.setenv("TURNWISE_PROXY_PROT", "7")
    with pytest.raises(SettingsError, match="from environment"):
        load()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("dtype", r"it is 'dtype' of \[trainer\] or 'dtype' of \[engine\]"),
        ("tensor_parallel", r"it is 'tensor_parallel' of \[engine\]"),
        ("max_loras", r"it is 'max_loras' of \[engine\]"),
        ("engine_gpu_memory", r"it is 'gpu_memory' of \[engine\]"),
        ("max_staleness", r"it is 'max_staleness' of \[trainer\]"),
    ],
)
def test_a_setting_of_another_section_is_refused_with_its_place(name, place, monkeypatch):
    monkeypatch.setenv(f"TURNWISE_UP_{name.upper()}", "1")
    with pytest.raises(SettingsError, match=rf"\[up\] has no setting '{name}' \(from environment\); {place}$"):
        load_settings(settings_model("up"), config=None, section="up", overrides={})


def test_a_key_outside_of_the_sections_is_an_error(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("port = 7\n[proxy]\nport = 7\n")
    with pytest.raises(SettingsError, match="outside of its sections"):
        load(path)


def test_an_invalid_value_is_shown_with_its_source(monkeypatch):
    monkeypatch.setenv("TURNWISE_PROXY_PORT", "many")
    with pytest.raises(SettingsError, match=r"port='many' \(from environment\) does not fit: .*integer"):
        load()


def test_the_error_for_a_missing_value_names_the_ways_to_set_it():
    class Needy(Settings):
        database: str

    with pytest.raises(SettingsError, match=r"needs 'database'.*TURNWISE_UP_DATABASE"):
        load_settings(Needy, config=None, section="up", overrides={})


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"broken\.toml' is not TOML"):
        load(path)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(SettingsError, match="cannot read"):
        load(tmp_path / "absent.toml")


def test_the_description_is_toml_that_gives_the_same_settings_and_hides_secrets(tmp_path):
    settings = Shop(port=9, engines=["http://a"], token=SecretStr("hunter2"))
    text = describe(settings, "proxy")
    assert "hunter2" not in text
    assert tomllib.loads(text)["proxy"]["engines"] == ["http://a"]
    bare = tmp_path / "same.toml"
    bare.write_text(describe(Shop(port=9), "proxy"))
    assert load(bare) == Shop(port=9)


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("hunter2", "**********"),
        ("sqlite:///turnwise.db", "sqlite:///turnwise.db"),
        ("postgresql+psycopg://turnwise:p@ss/w@db:5432/name", "postgresql+psycopg://**********@db:5432/name"),
        ("postgresql://db/name?user=a&password=b", "postgresql://db/name?**********"),
    ],
)
def test_the_description_of_a_secret_url_shows_all_but_its_credentials(secret, shown):
    assert f'token = "{shown}"' in describe(Shop(token=SecretStr(secret)), "proxy")


def test_a_secret_never_shows_in_an_error():
    with pytest.raises(SettingsError) as caught:
        load(token=["hunter2"])
    assert "hunter2" not in str(caught.value)


def test_direct_construction_reads_nothing_from_outside(tmp_path, monkeypatch):
    """A test or a program that builds settings itself gets exactly what it wrote."""
    monkeypatch.setenv("TURNWISE_PROXY_PORT", "2")
    (tmp_path / "turnwise.toml").write_text("[proxy]\nport = 1\n")
    assert Shop().port == 8000


@pytest.mark.parametrize(
    "url", ["turnwise.example", "https://", "ftp://turnwise.example", "https://turnwise.example:x"]
)
def test_a_public_url_that_no_client_can_call_is_refused(url):
    """It would be in the `base_url` of each session."""
    with pytest.raises(ValueError, match="not the URL of a proxy; write https://HOST"):
        ProxySettings(public_url=url)


def test_a_public_url_may_have_a_path():
    url = "https://turnwise.example/turnwise"
    assert ProxySettings(public_url=url).public_url == url


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


def test_an_unknown_section_is_named():
    with pytest.raises(ValueError, match="no section 'proxyy': there are proxy, trainer, "):
        settings_model("proxyy")


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
