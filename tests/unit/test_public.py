"""What a release promises stays for one minor version after it is deprecated: names, and what a caller must give."""

import re
import runpy
from pathlib import Path

import pytest

from turnwise import __version__

DOCS = Path(__file__).parents[2] / "docs"
NEEDED = " required"


def broken(recorded: list[str], current: list[str], deprecated: dict[str, str], version: str) -> list[str]:
    """Return what callers of a recorded release can no longer rely on, in a version.

    `deprecated` has the version since which each name is deprecated; a later minor version may remove it.
    """
    there = {line.removesuffix(NEEDED) for line in current}
    known = {line.removesuffix(NEEDED) for line in recorded}
    removed = [line for line in (each.removesuffix(NEEDED) for each in recorded) if line not in there]
    demanded = [line for line in current if line.endswith(NEEDED) and line not in recorded]

    def parent(line: str) -> str:
        return re.split(r" (?:takes|query|path|header|argument|--)", line)[0]

    return [line for line in removed if minor(deprecated.get(line, "99.0")) >= minor(version)] + [
        line for line in demanded if line.removesuffix(NEEDED) in known or parent(line) in known
    ]


def minor(version: str) -> tuple[int, int]:
    major, number, *_ = version.split(".")
    return int(major), int(number)


def test_nothing_that_the_release_promises_is_gone():
    names = runpy.run_path(str(DOCS / "public_names.py"))["names"]()
    page = (DOCS / "compatibility.md").read_text()
    deprecated = dict(re.findall(r"^\| `(.+?)` \| ([\d.]+) \|", page, flags=re.MULTILINE))
    recorded = (DOCS / "public.txt").read_text().splitlines()
    assert broken(recorded, names, deprecated, __version__) == [], "docs/compatibility.md says what to do"


RECORDED = ["POST /v1/rewards", "POST /v1/rewards takes value required", "Client.reward", "[proxy] port"]


@pytest.mark.parametrize(
    ("current", "deprecated", "found"),
    [
        (RECORDED, {}, []),
        ([*RECORDED, "[proxy] more", "POST /v1/rewards takes note"], {}, []),
        (RECORDED[:-1], {}, ["[proxy] port"]),
        (RECORDED[:-1], {"[proxy] port": "0.3.1"}, ["[proxy] port"]),
        (RECORDED[:-1], {"[proxy] port": "0.2.5"}, []),
        (["POST /v1/rewards takes value", *RECORDED[2:]], {}, ["POST /v1/rewards"]),
        ([*RECORDED, "Client.reward argument note required"], {}, ["Client.reward argument note required"]),
        ([*RECORDED, "Client.new", "Client.new argument note required"], {}, []),
        ([each.removesuffix(NEEDED) for each in RECORDED], {}, []),
    ],
)
def test_a_removal_needs_a_deprecation_of_an_earlier_minor_version_and_a_caller_need_not_give_more(
    current, deprecated, found
):
    assert broken(RECORDED, current, deprecated, "0.3.2") == found
