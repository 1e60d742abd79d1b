"""README and docs agree with the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])


def test_the_generated_pages_are_up_to_date():
    """Commands, settings, metrics and routes on the pages are those of the code; `make docs` updates the pages."""
    for path, made in runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]().items():
        assert path.read_text() == made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_an_existing_target(page):
    """No page links to a missing file."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("reason", ["edited_history", "system_changed", "tools_changed", "thinking_stripped", "media"])
def test_every_reason_is_explained(reason):
    """docs/exactness.md explains the reasons that the database stores."""
    assert f"`{reason}`" in (ROOT / "docs" / "exactness.md").read_text()
