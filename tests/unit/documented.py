"""The blocks of code in the pages at the root and in docs/, and the commands in their shell blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
PAGES = [*FIRST_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
_SHELLS = {"sh", "bash"}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# In running text: a script with options, or a target of make; what stands in brackets is no command yet.
_INLINE = re.compile(r"`(python scripts/[^`\n\[]* -[^`\n\[]*|make [\w-]+)`")


@dataclass(frozen=True)
class Block:
    """Code of a page, with the language that the page says it has."""

    page: Path
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command as one line, without its comment."""

    page: Path
    line: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of the languages on all pages."""
    found = [
        Block(page, *block)
        for page in PAGES
        for block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    ]
    return [block for block in found if block.language in languages]


def commands() -> list[Command]:
    """Return every command of every shell block, and those in running text that have options."""
    lines = [
        Command(block.page, re.sub(r"(^|\s+)#\s.*", "", line).strip())
        for block in blocks(*_SHELLS)
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    ]
    inline = [
        Command(page, line)
        for page in PAGES
        for line in _INLINE.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    ]
    return list(dict.fromkeys(line for line in [*lines, *inline] if line.line))
