"""README and docs agree with the code."""

import functools
import re
import runpy
from pathlib import Path

import pytest

from trainer.algorithms.loading import provided
from trainer.claims.claims import smallest_batch
from trainer.features import Settings
from turnwise.store.sessions import REWARDED_IDLE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


def test_the_generated_pages_are_up_to_date():
    for path, made in runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]().items():
        assert path.read_text() == made


@functools.cache
def written_words() -> set[str]:
    return {
        word
        for page in ROOT.glob("docs/*.md")
        if page.name not in ("reference.md", "files.md")
        for word in re.findall(r"\w+", page.read_text())
    }


@pytest.mark.parametrize("settings", [Settings, *(each.Settings for each in provided().values())])
def test_every_setting_of_training_is_on_a_page_that_a_person_wrote(settings):
    """The generated table says what a setting is; a page says when to change it."""
    assert settings.model_fields.keys() - written_words() == set()


def test_readme_says_how_long_live_traffic_takes_as_the_code_does():
    """A version follows from a quarter of 32 groups, and a group is eight single sessions."""
    rule = Settings()
    least = smallest_batch(rule) * rule.singles_per_group
    assert f"follows from {least} of them" in (ROOT / "README.md").read_text()
    assert REWARDED_IDLE.total_seconds() == 600, "ten minutes in README, docs/training.md and the trainer's report"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_an_existing_target(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(path), f"{page.name} links to {target}#{anchor}"


def test_no_page_installs_from_an_index_what_none_has():
    assert [page.name for page in PAGES if re.search(r"pip install '?turnwise", page.read_text())] == []


def _anchors(page: Path) -> set[str]:
    """Return the names by which GitHub links to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_paths_of_the_source_in_a_page_exist(page):
    for path in re.findall(
        r"`((?:proxy|trainer|turnwise|bench|migrations|tests|examples)/[\w/.-]+)`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_contributing_names_the_rooms_of_each_package_from_the_uppermost_floor_down():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    floors = runpy.run_path(str(ROOT / "docs" / "files_page.py"))["floors"]()
    blocks = text[text.index("```") : text.rindex("```")].split("\n\n")
    for (package, rooms), block in zip(floors.items(), blocks, strict=True):
        lines = re.findall(r"^ ([a-z_, ]+?)(?:  .*)?$", block, re.MULTILINE)
        assert [room for line in lines for room in line.split(", ")] == rooms, package


@pytest.mark.parametrize(
    "reason", ["edited_history", "system_changed", "tools_changed", "thinking_stripped", "media", "media_rerendered"]
)
def test_every_reason_is_explained(reason):
    assert f"`{reason}`" in (ROOT / "docs" / "exactness.md").read_text()
