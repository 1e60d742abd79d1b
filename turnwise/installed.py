"""Which extras this copy of Turnwise lacks, and the `pip install` that adds them, by how the copy was installed."""

from __future__ import annotations

import functools
import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

EXTRAS = ("store", "proxy", "trainer", "export", "otel", "engine-cpu")
"""Extras of a user; of those that bring one package the first is named."""
_MODULES = {
    "tokenizers": "proxy",
    "starlette": "proxy",
    "vllm": "engine-cpu",
    "PIL": "trainer",
    "opentelemetry": "otel",
}
"""Extras of modules whose distribution has another name, or is only a dependency of a dependency."""
_REQUIREMENT = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")


def install_command(*extras: str) -> str:
    """Return the command that installs extras beside what is installed here."""
    return f"pip install {_source('[' + ','.join(extras) + ']' if extras else '')}"


def extra_of(module: str) -> str | None:
    """Return the extra that brings a module; None if none does."""
    return _MODULES.get(module) or next((each for each in EXTRAS if module in _requirements(each)), None)


def missing_from(extra: str) -> list[str]:
    """Return the distributions of an extra that are not installed, under the names that most are imported by."""
    return [name for name in _requirements(extra) if installed_version(name) is None]


def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    found = _distribution(name)
    return None if found is None else found.version


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


@functools.cache
def _requirements(extra: str) -> tuple[str, ...]:
    own = _distribution("turnwise")
    found = [_REQUIREMENT.match(each) for each in (own.requires if own is not None else None) or ()]
    return tuple(match[1].replace("-", "_").lower() for match in found if match is not None and match[2] == extra)


def _source(named: str) -> str:
    """Return what pip is given, by the record that pip keeps of an installation from anything but an index."""
    own = _distribution("turnwise")
    if own is None:  # imported from a checkout that nobody installed
        return _of_directory(Path(__file__).parent.parent, named, is_editable=True)
    record = json.loads(own.read_text("direct_url.json") or "{}")
    url = urlsplit(record.get("url", ""))
    if not url.scheme:
        return f"'turnwise{named}'"
    if url.scheme != "file":
        return f"'turnwise{named} @ {record['url']}'"
    path = Path(unquote(url.path))
    if "dir_info" in record:
        return _of_directory(path, named, is_editable=record["dir_info"].get("editable", False))
    return f"'{path}{named}'"


def _of_directory(path: Path, named: str, *, is_editable: bool) -> str:
    place = "." if path == Path.cwd() else str(path)
    return f"{'-e ' if is_editable else ''}'{place}{named}'"
