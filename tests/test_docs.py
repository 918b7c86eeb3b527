"""The pages of the documentation: links lead somewhere, commands exist, the README fits."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from django.core.management import find_commands, get_commands, load_command_class
from django.core.management.base import BaseCommand

from example_project import databases
from jobqueue import conf
from tests.documentation import DOCS, FENCED, PAGES, README, ROOT, blocks

# -- README


def test_readme_names_extras_that_exist_and_fits_a_screen() -> None:
    """What ``pip install`` is told to add is declared, and nobody has to scroll for long."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = README.read_text()
    named = {extra for found in re.findall(r"\[([\w,]+)\]'", text) for extra in found.split(",")}
    assert {"demo", "test", "postgres"} <= named <= set(extras)
    assert len(text.splitlines()) <= 66


@pytest.mark.parametrize("page", [README, DOCS / "tutorial.md"], ids=lambda page: page.name)
def test_the_options_for_sqlite_are_those_of_the_example_project(page: Path) -> None:
    """One recipe, and the one that the demo and the tests run on."""
    (text,) = (block.text for block in blocks(page) if "OPTIONS" in block.text)
    assert ast.literal_eval(text[text.index('["OPTIONS"] = ') + 14 :]) == databases.SQLITE_OPTIONS


def test_the_promise_is_the_same_everywhere() -> None:
    """In its short form, on the pages that begin with it."""
    promise = (
        "*at-least-once execution; at most one accepted outcome per execution; exactly-once "
        "effects in the same database for handlers that use `context.atomic()`.*"
    )
    for page in (README, DOCS / "index.md", DOCS / "explanation/guarantees.md"):
        text = " ".join(page.read_text().split())
        assert promise.lower() in text.lower(), page


# -- What all pages mention


def test_settings_that_pages_mention_exist() -> None:
    """``JOBQUEUE["X"]`` is nowhere said of an X that isn't there."""
    mentioned = {
        name for page in PAGES for name in re.findall(r"JOBQUEUE\[\"(\w+)\"\]", page.read_text())
    }
    assert mentioned
    assert mentioned <= set(conf.Settings.__dataclass_fields__)


def test_command_lines_are_understood() -> None:
    """Every ``manage.py`` of the docs names a command, and options that it has."""
    known = {**get_commands()}
    known |= dict.fromkeys(
        find_commands(str(ROOT / "example_project/management")), "example_project"
    )
    lines = {
        line
        for page in PAGES
        for block in blocks(page)
        if block.language in ("console", "sh", "ini")
        for line in re.findall(r"manage\.py ([^&\n]+)", block.text)
    }
    assert any(line.startswith("run_worker") for line in lines)
    for line in sorted(lines):
        name, *arguments = shlex.split(line, comments=True)
        assert name in known, line
        app = known[name]
        command = app if isinstance(app, BaseCommand) else load_command_class(app, name)
        command.create_parser("manage.py", name).parse_args(arguments)


# -- Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Files exist, and so do the headings in them."""
    prose = FENCED.sub("", page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"^\[\w+\]: (\S+)$", prose, re.M)
    for target in targets:
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.is_file(), target
        assert not anchor or anchor in anchors(path), target


def anchors(page: Path) -> set[str]:
    """Return what the headings of ``page`` are called in links."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_every_page_is_in_a_table_of_contents() -> None:
    """A page that nobody links to is not found."""
    listed = {
        (page.parent / f"{line}.md").resolve()
        for page in DOCS.rglob("*.md")
        for block in blocks(page)
        if block.language == "toctree"
        for line in block.text.splitlines()
        if line and not line.startswith(":")
    }
    assert listed == set(DOCS.rglob("*.md")) - {DOCS / "index.md"}


def test_decisions_are_numbered_one_by_one() -> None:
    """Each page's heading has the number of its file, and none is missing."""
    pages = sorted((DOCS / "adr").glob("0*.md"))
    numbers = [page.name[:4] for page in pages]
    assert numbers == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        assert page.read_text().startswith(f"# {page.name[:4]}. "), page.name
