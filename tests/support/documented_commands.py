"""The blocks of commands and settings in README, docs and examples, as the tests read them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)")
_REDIRECTION = re.compile(r"> \S+")
_OPERATORS = {"&&", "||", "|", ";"}


@dataclass(frozen=True)
class Block:
    page: Path
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"

    def commands(self) -> list[list[str]]:
        """Return the simple commands of a shell block, each as its words without assignments and comments."""
        found: list[list[str]] = []
        text = _REDIRECTION.sub("", _SUBSTITUTION.sub("VALUE", self.text.replace("\\\n", " ")))
        for line in text.splitlines():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), ";"]:
                if word not in _OPERATORS:
                    words.append(word)
                    continue
                while words and _ASSIGNMENT.match(words[0]):
                    words.pop(0)
                if words:
                    found.append(words)
                words = []
        return found


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        fenced = re.finditer(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [Block(page, number, each[1], each[2]) for number, each in enumerate(fenced, 1)]
    return [block for block in found if block.language in languages]
