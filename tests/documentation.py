"""Reading the documentation: its pages, their code blocks, their tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from jobqueue import arguments
from jobqueue.worker import execute

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted((ROOT / "jobqueue").rglob("*.py"))

FENCED = re.compile(r"(<!-- tested -->\n)?^ *```\{?(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)
FILE = re.compile(r"^# (\S+\.py)\n(.*?)(?=^# \S+\.py\n|\Z)", re.M | re.S)


class Block(NamedTuple):
    """A code block of a page; it is ``tested`` if the page says so in a comment before it."""

    language: str
    text: str
    tested: bool


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of ``page``, in order."""
    found = FENCED.finditer(page.read_text())
    return [Block(match[2], match[3], bool(match[1])) for match in found]


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading of ``page``, up to the next one, by the heading."""
    parts = re.split(r"^#+ (.+)\n", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(page: str, column: str, section: str = "") -> list[dict[str, str]]:
    """Return the rows of the first table below ``section`` whose first column is ``column``."""
    text = (DOCS / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = iter(text.splitlines())
    header = next(cells(line) for line in lines if line.startswith(f"| {column} |"))
    next(lines)
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append(dict(zip(header, cells(line), strict=True)))
    return table


def cells(line: str) -> list[str]:
    """Return the cells of one row, bare of backticks where they are one word of code."""
    parts = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return [part.strip("`") if re.fullmatch("`[^`]+`", part) else part for part in parts]


def words(cell: str) -> set[str]:
    """Return what a cell lists, commas and backticks aside."""
    return set(re.findall(r"\w+", cell))


def codes(cell: str) -> set[str]:
    """Return what a cell has in backticks, or all of a cell that was nothing else."""
    return set(re.findall(r"`([^`]+)`", cell) or filter(None, [cell]))


def write_files(text: str, directory: Path) -> None:
    """Append each part of a block to the file that its first line, a comment, names."""
    for name, part in FILE.findall(text):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(part)


@contextmanager
def importable(texts: Iterable[str], directory: Path) -> Iterator[None]:
    """Make the files that these blocks show importable, and forget them afterwards."""
    for text in texts:
        write_files(text, directory)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        packages = {path.name for path in directory.iterdir()}
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
        arguments._path.cache_clear()
        execute._handler.cache_clear()
        execute._imported.cache_clear()
