"""The docs say what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])


def test_the_references_are_made_from_this_code():
    """Commands, settings, metrics and routes on the pages are those of the code; `make docs` brings it up to date."""
    for path, made in runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]().items():
        assert path.read_text() == made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    """No page links to a file that is not there."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("reason", ["edited_history", "system_changed", "tools_changed", "thinking_stripped", "media"])
def test_every_reason_is_explained(reason):
    """Who finds a reason in the database finds it in the docs."""
    assert f"`{reason}`" in (ROOT / "docs" / "exactness.md").read_text()
