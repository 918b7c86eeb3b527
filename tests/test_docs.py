"""The documentation against the code: tables are compared, examples run, links followed."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.core.management import find_commands, get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal
from django.utils.module_loading import import_string

from example_project import databases
from jobqueue import conf, exceptions, signals
from jobqueue.backoff import Backoff
from jobqueue.lifecycle import RULES, State
from jobqueue.models import EventKind, Job, Queue, Worker

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted((ROOT / "jobqueue").rglob("*.py"))
COMMANDS = sorted(find_commands(str(ROOT / "jobqueue" / "management")))

FENCED = re.compile(r"(<!-- tested -->\n)?^ *```\{?(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S)


class Block(NamedTuple):
    """A code block of a page; it is ``tested`` if the page says so in a comment before it."""

    language: str
    text: str
    tested: bool


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of ``page``, in order."""
    found = FENCED.finditer(page.read_text())
    return [Block(match[2], match[3], bool(match[1])) for match in found]


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
    return [part.strip("`") if part.count("`") == 2 and part[0] == "`" else part for part in parts]


def words(cell: str) -> set[str]:
    """Return what a cell lists, commas and backticks aside."""
    return set(re.findall(r"\w+", cell))


# -- Tables of the reference


def test_every_setting_has_a_row_with_its_default() -> None:
    """A setting that is added, renamed or given another default is so in the docs too."""
    defaults = {name: getattr(conf.Settings(), name) for name in conf.Settings.__dataclass_fields__}
    written = {
        row["setting"]: ast.literal_eval(row["default"])
        for row in rows("reference/settings.md", "setting")
    }
    written["BACKOFF"] = Backoff.parse(written["BACKOFF"])
    assert written == defaults


def test_settings_that_pages_mention_exist() -> None:
    """``JOBQUEUE["X"]`` is nowhere said of an X that isn't there."""
    mentioned = {
        name for page in PAGES for name in re.findall(r"JOBQUEUE\[\"(\w+)\"\]", page.read_text())
    }
    assert mentioned
    assert mentioned <= set(conf.Settings.__dataclass_fields__)


def test_every_command_has_a_section() -> None:
    """A new command is documented."""
    page = (DOCS / "reference/commands.md").read_text()
    assert sorted(re.findall(r"^## (.+)$", page, re.M)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_row_with_its_default(command: str) -> None:
    """The options of the page are those of the parser: value or flag, required or by default."""
    written = {
        row["option"]: row["default"]
        for row in rows("reference/commands.md", "option", section=command)
    }
    assert {option.split()[0] for option in written} == set(own_options(command))
    for option, default in written.items():
        name, *value = option.split()
        action = own_options(command)[name]
        assert bool(value) == (action.nargs != 0), f"{name} takes a value, or doesn't"
        assert (default == "required") == action.required, name
        if action.default not in (None, False):
            assert default == str(action.default), name


def own_options(command: str) -> dict[str, Any]:
    """Return the options of a command that not every command of Django has, by name."""
    parser = load_command_class("jobqueue", command).create_parser("manage.py", command)
    common = BaseCommand().create_parser("manage.py", command)
    names = {option for action in common._actions for option in action.option_strings}
    return {
        action.option_strings[0]: action
        for action in parser._actions
        if not names.intersection(action.option_strings)
    }


def test_the_table_of_verbs_is_that_of_the_code() -> None:
    """Sources, targets and what yields to a cancel request, verb by verb."""
    written = {
        row["verb"]: (words(row["from"]), row["to"], row["yields"])
        for row in rows("reference/lifecycle.md", "verb")
    }
    beyond = {"edit": "the same", "delete": "gone"}
    assert written == {
        verb.value: (
            {state.value for state in rule.sources},
            rule.target.value if rule.target else beyond[verb],
            "yes" if rule.yields_to_cancel else "no",
        )
        for verb, rule in RULES.items()
    }
    assert [row["state"] for row in rows("reference/lifecycle.md", "state")] == list(State)


def test_the_drawing_shows_every_rule_and_no_other() -> None:
    """Each line of the drawing says which rule it draws."""
    drawing = (DOCS / "_static/lifecycle.svg").read_text()
    drawn = re.findall(r'data-verb="(\w+)" data-from="(\w+)" data-to="(\w+)"', drawing)
    assert sorted(drawn) == sorted(
        (verb.value, source.value, rule.target.value if rule.target else beyond)
        for verb, rule in RULES.items()
        for source in rule.sources
        for beyond in ["gone" if verb == "delete" else source.value]
    )
    assert set(re.findall(r'class="state"[^>]*>(\w+)<', drawing)) == set(State)


def test_every_kind_of_event_has_a_row() -> None:
    """An event that people meet in a job's history is explained."""
    assert [row["kind"] for row in rows("reference/events.md", "kind")] == EventKind.values


def test_every_system_check_has_a_row() -> None:
    """An id that ``manage.py check`` prints can be looked up."""
    used = {
        found
        for path in SOURCES
        for found in re.findall(r'"(jobqueue\.[EW]\d+)"', path.read_text())
    }
    assert {row["id"] for row in rows("reference/checks.md", "id")} == used


def test_every_signal_has_a_row_with_its_payload() -> None:
    """Receivers get the keywords that the page names."""
    written = {
        row["signal"]: words(row["payload"]) for row in rows("reference/signals.md", "signal")
    }
    assert set(written) == {n for n, value in vars(signals).items() if isinstance(value, Signal)}
    sent = [call for path in SOURCES for call in signals_sent(ast.parse(path.read_text()))]
    assert {name for name, _ in sent} == set(written)
    for name, payload in sent:
        assert payload == written[name], name


def signals_sent(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Yield name and keywords for each call that sends a signal of ``jobqueue.signals``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        match = re.match(
            r"signals\.(?:send_after_commit\(signals\.)?(\w+)(?:\.send_robust\(|,)", text
        )
        if match:
            yield match[1], {keyword.arg for keyword in node.keywords if keyword.arg}


@pytest.mark.parametrize("model", [Job, Worker, Queue], ids=lambda model: model.__name__)
def test_every_column_has_a_row(model: Any) -> None:
    """The tables that people read are described."""
    _, _, text = (DOCS / "reference/interface.md").read_text().partition(f"### {model.__name__}\n")
    first = [cells(line)[0] for line in text.split("\n#")[0].splitlines() if line.startswith("| ")]
    written = {name for cell in first for name in words(cell)} - {"column"}
    assert written == {field.name for field in model._meta.concrete_fields}


def test_the_public_interface_exists_and_holds_every_exception() -> None:
    """What the page takes from docstrings is there, and no exception is kept back."""
    text = (DOCS / "reference/interface.md").read_text()
    names = set(re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.M))
    assert all(import_string(name) for name in names)
    own = {cls for cls in vars(exceptions).values() if isinstance(cls, type)}
    errors = {cls for cls in own if issubclass(cls, exceptions.JobQueueError)}
    assert {f"jobqueue.exceptions.{cls.__name__}" for cls in errors} <= names


# -- README


def test_readme_names_extras_that_exist_and_fits_a_screen() -> None:
    """What ``pip install`` is told to add is declared, and nobody has to scroll for long."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = README.read_text()
    named = {extra for found in re.findall(r"\[([\w,]+)\]'", text) for extra in found.split(",")}
    assert {"demo", "test", "postgres"} <= named <= set(extras)
    assert len(text.splitlines()) <= 70


@pytest.mark.parametrize("page", [README, DOCS / "tutorial.md"], ids=lambda page: page.name)
def test_the_options_for_sqlite_are_those_of_the_example_project(page: Path) -> None:
    """One recipe, and the one that the demo and the tests run on."""
    (text,) = (block.text for block in blocks(page) if "OPTIONS" in block.text)
    assert ast.literal_eval(text[text.index('["OPTIONS"] = ') + 14 :]) == databases.SQLITE_OPTIONS


# -- Code and commands


PYTHON = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.language == "python"
]
TESTED = [
    pytest.param(block.values[0].text, name, id=f"{block.id}{name and '-'}{name}")
    for block in PYTHON
    if block.values[0].tested
    for name in re.findall(r"^def (test_\w+)", block.values[0].text, re.M) or [""]
]


@pytest.mark.parametrize("block", PYTHON)
def test_python_compiles_and_imports_what_exists(block: Block) -> None:
    """No example has a syntax error, or takes from this package what isn't there."""
    tree = ast.parse(block.text if block.text[0] != " " else f"if 1:\n{block.text}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jobqueue"):
            assert all(import_string(f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize(("code", "function"), TESTED)
def test_examples_run(code: str, function: str, alias: str) -> None:
    """A block that is marked as tested runs; one that holds tests passes, on each engine."""
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "example", "exec"), namespace)
    if function:
        namespace[function]()


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


# -- Following a page in a project of its own


def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    """Each step in its order, with real processes, ends as the page says."""
    page = blocks(DOCS / "tutorial.md")
    output, session = "", ""
    for block in page:
        if block.language == "pycon":
            session += block.text
            continue
        run_session(session, tmp_path)
        session = ""
        match block.language:
            case "python":
                write_files(block.text, tmp_path)
            case "console":
                output = run(without_installation(block.text), tmp_path, killed="--lease")
            case "text":
                assert block.text in output
    run_session(session, tmp_path)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    """Settings, handler, enqueue, worker and sweep as the README has them."""
    run("django-admin startproject mysite .", tmp_path)
    for block in blocks(README):
        if block.language == "python":
            write_files(block.text, tmp_path)
    (lines,) = (b.text for b in blocks(README) if "manage.py migrate" in b.text)
    migrate, worker, sweep = (line.split("  #")[0] for line in lines.splitlines())
    run(migrate, tmp_path)
    run("python manage.py shell -c 'import shop.orders'", tmp_path)
    assert "1 completed" in run(f"{worker} --burst", tmp_path)
    assert "0 examined" in run(sweep, tmp_path)
    query = ">>> from jobqueue.models import Job\n>>> Job.objects.get().result\n{'sent': 42}\n"
    run_session(query, tmp_path)


def write_files(text: str, directory: Path) -> None:
    """Append each part of a block to the file that its first line, a comment, names."""
    for name, part in re.findall(r"^# (\S+\.py)\n(.*?)(?=^# \S+\.py\n|\Z)", text, re.M | re.S):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(part)


def without_installation(script: str) -> str:
    """Leave out what the session's environment has already."""
    done = ("python -m venv", "pip install")
    return "\n".join(line for line in script.splitlines() if not line.startswith(done))


def run(script: str, directory: Path, killed: str = "") -> str:
    """Run a shell script, and return what it printed; one with ``killed`` in it may be killed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
        "DJANGO_SETTINGS_MODULE": "mysite.settings",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}",
    }
    done = subprocess.run(
        ["bash", "-ec", script],
        check=False,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    fine = (-9, 137) if killed and killed in script else (0,)
    assert done.returncode in fine, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


DOCTEST = """
import doctest, sys, django
django.setup()
sys.exit(doctest.testfile("session.txt", False, optionflags=doctest.ELLIPSIS).failed)
"""


def run_session(session: str, directory: Path) -> None:
    """Run what a reader types into ``manage.py shell``, and compare what the page shows."""
    if session:
        (directory / "session.txt").write_text(session)
        run(f"python -c {shlex.quote(DOCTEST)}", directory)


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
