"""Hooks of MkDocs for `make docs`: the site is made of the pages where they are, so that no text exists twice.

README is its first page. A file outside of docs/ that a page links to is a page too: Markdown as it is, other files as
code, and a directory without a README as a list. Each version is built into its own directory beside those of others.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the site that no page has to link to, besides those of docs/."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)\s]*)?)\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".jsonl": "json", ".sh": "sh"}


def address(path: Path) -> str:
    """Return the address in the site of a file or directory, as MkDocs names pages: with the ending of their source."""
    own = path.relative_to(ROOT)
    if own.parts[0] == "docs":
        own = own.relative_to("docs")
        return str(own) if own.suffix in (".md", ".png") else f"{own}.md"
    if path.is_dir() or own.name == "README.md":
        return str((own if path.is_dir() else own.parent) / "index.md")
    return str(own) if own.suffix == ".md" else f"{own.parent / own.name.lstrip('.')}.md"


def targets(page: Path) -> Iterator[Path]:
    """Yield the files and directories that a page links to.

    Raises:
        FileNotFoundError: one does not exist.
    """
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve(strict=True)
        yield path / "README.md" if (path / "README.md").is_file() else path


@cache
def pages() -> dict[str, Path]:
    """Return the files and directories that are pages of the site, by their addresses."""
    waiting = [*(ROOT / name for name in STARTS), *sorted(ROOT.glob("docs/*.md"))]
    found: dict[str, Path] = {}
    while waiting:
        path = waiting.pop(0)
        if path.suffix == ".png" or address(path) in found:
            continue
        found[address(path)] = path
        if path.suffix == ".md":
            waiting += targets(path)
        elif path.is_dir():
            waiting += [each for each in sorted(path.iterdir()) if each.is_file() and each.suffix in LANGUAGES]
    return found


def text_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = [each.name for each in sorted(path.iterdir()) if each.is_file() and each.suffix in LANGUAGES]
        return "\n".join([f"# {name}", "", *(f"- [{each}]({each})" for each in files)])
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n`````{LANGUAGES.get(path.suffix, '')}\n{text}\n`````\n"


def linked(text: str, path: Path) -> str:
    """Return a page's text with links between files as links between pages of the site."""
    base = posixpath.dirname(address(path))

    def replace(found: re.Match[str]) -> str:
        target = ((path if path.is_dir() else path.parent) / found[1]).resolve(strict=True)
        return f"]({posixpath.relpath(address(target), base or '.')}{found[2]})"

    return LINK.sub(replace, text)


def on_config(config: Any) -> Any:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.site_dir = str(Path(config.site_dir) / version)
    return config


def on_post_build(config: Any) -> None:
    """List the versions that lie beside this one, among which the head of each page lets a reader choose."""
    site = Path(config.site_dir).parent
    built = [each.name for each in site.iterdir() if each.is_dir()]
    newest_first = sorted(built, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    listed = [{"version": each, "title": each, "aliases": []} for each in newest_first]
    (site / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    to_newest = f'<meta http-equiv="refresh" content="0; url={newest_first[0]}/index.html">'
    (site / "index.html").write_text(to_newest, encoding="utf-8")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for uri, path in pages().items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = pages()[page.file.src_uri]
    return markdown if path.is_file() and path.suffix != ".md" else linked(markdown, path)
