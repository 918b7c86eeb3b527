"""The reference against the code: each table has what the code has, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import find_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal
from django.utils.module_loading import import_string

from jobqueue import conf, coordinator, exceptions, settlement, signals
from jobqueue.backoff import Backoff
from jobqueue.lifecycle import (
    RULES,
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Retry,
    Snoozed,
    State,
    Verb,
)
from jobqueue.models import EventKind, Job, Queue, Worker
from tests.documentation import DOCS, ROOT, SOURCES, cells, codes, rows, words

COMMANDS = sorted(find_commands(str(ROOT / "jobqueue" / "management")))


# -- Settings and commands


def test_every_setting_has_a_row_with_its_default() -> None:
    """A setting that is added, renamed or given another default is so in the docs too."""
    defaults = {name: getattr(conf.Settings(), name) for name in conf.Settings.__dataclass_fields__}
    written = {
        row["setting"]: ast.literal_eval(row["default"])
        for row in rows("reference/settings.md", "setting")
    }
    written["BACKOFF"] = Backoff.parse(written["BACKOFF"])
    assert written == defaults


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
        if action.option_strings:
            assert bool(value) == (action.nargs != 0), f"{name} takes a value, or doesn't"
        assert (default == "required") == action.required, name
        if action.default not in (None, False):
            assert default == str(action.default), name


def own_options(command: str) -> dict[str, Any]:
    """Return the arguments of a command that not every command of Django has, by name."""
    parser = load_command_class("jobqueue", command).create_parser("manage.py", command)
    common = BaseCommand().create_parser("manage.py", command)
    names = {option for action in common._actions for option in action.option_strings}
    return {
        action.option_strings[0] if action.option_strings else action.metavar: action
        for action in parser._actions
        if not names.intersection(action.option_strings)
    }


# -- A job's life


LIFE = "reference/lifecycle.md"
OUTCOMES: dict[Verb, Outcome] = {
    Verb.COMPLETE: Completed(),
    Verb.FAIL: Failed(Error("")),
    Verb.RETRY: Retry(Error("")),
    Verb.SNOOZE: Snoozed(timedelta(1)),
    Verb.RELEASE: Released(),
    Verb.CANCEL: Cancelled(),
}


def test_the_table_of_verbs_is_that_of_the_code() -> None:
    """Sources, targets and what yields to a cancel request, verb by verb."""
    written = {
        row["verb"]: (words(row["from"]), row["to"], row["yields"]) for row in rows(LIFE, "verb")
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
    assert [row["state"] for row in rows(LIFE, "state")] == list(State)


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


def test_a_coordinator_may_do_what_the_table_says() -> None:
    """Each verb of which that is said is a function, and no other is."""
    said = {row["verb"] for row in rows(LIFE, "verb") if "coordinator" in words(row["who"])}
    assert said == {verb.value for verb in Verb if hasattr(coordinator, verb)}


def test_each_verb_leaves_the_event_that_the_table_says() -> None:
    """By whomever it may be: its worker, a sweep, a coordinator."""
    written = {row["verb"]: codes(row["event"]) for row in rows(LIFE, "verb")}
    assert written == {verb.value: set(kinds(verb)) for verb in Verb}


def kinds(verb: Verb) -> Iterator[str]:
    """Yield the kinds of events that a verb leaves."""
    running = Job(pk=1, state=State.RUNNING, attempt=1)
    now = datetime.now(UTC)
    writes = []
    if verb in OUTCOMES:
        plans = (
            settlement.plan(running, OUTCOMES[verb], now, by_owner=not others, rescue=rescue)
            for others in (False, True)
            for rescue in (False, others)
        )
        writes = [plan[0] for plan in plans]
    elif verb is Verb.RERUN:
        writes = [settlement.plan_rerun(Job(pk=1, state=State.FAILED), now, "")]
    elif verb is Verb.EDIT:
        writes = [settlement.plan_edit(Job(pk=1, state=State.WAITING), {"priority": 1}, "")]
    yield from (write.kind.value for write in writes if write.kind)


def test_columns_that_the_table_names_exist() -> None:
    """What a verb is said to write is a column."""
    for row in rows(LIFE, "verb"):
        named = {words(code).pop() for code in codes(row["writes besides"]) if "_" in code}
        assert named <= {field.name for field in Job._meta.concrete_fields}, row["verb"]


# -- Events, checks, signals


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


def test_every_answer_of_explain_job_has_a_row() -> None:
    """A word that a program or a person meets there can be looked up."""
    tree = ast.parse((ROOT / "jobqueue/explain.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "Answer"}
    assert {row["answer"] for row in rows("how-to/find-out-why.md", "answer")} == given


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
        match = re.match(r"signals\.send_after_commit\(signals\.(\w+),|(\w+)\.send_robust\(", text)
        if match:
            yield match[1] or match[2], {keyword.arg for keyword in node.keywords if keyword.arg}


# -- Interface


@pytest.mark.parametrize("model", [Job, Worker, Queue], ids=lambda model: model.__name__)
def test_every_column_has_a_row(model: Any) -> None:
    """The tables that people read are described."""
    _, _, text = (DOCS / "reference/interface.md").read_text().partition(f"### {model.__name__}\n")
    first = [cells(line)[0] for line in text.split("\n#")[0].splitlines() if line.startswith("| ")]
    written = {name for cell in first for name in words(cell)} - {"column"}
    assert written == {field.name for field in model._meta.concrete_fields}


def test_the_public_interface_exists_and_holds_every_exception() -> None:
    """What the page takes from docstrings is there, and no exception is kept back."""
    names = documented()
    assert all(import_string(name) for name in names)
    own = {cls for cls in vars(exceptions).values() if isinstance(cls, type)}
    errors = {cls for cls in own if issubclass(cls, exceptions.JobQueueError)}
    assert {f"jobqueue.exceptions.{cls.__name__}" for cls in errors} <= names


# What these modules have for others of this package.
INSIDE = {
    "coordinator": set(),
    "transitions": {"delete_finished", "settle", "report"},
    "broker": {"compare"},
}


@pytest.mark.parametrize("module", INSIDE)
def test_the_interface_holds_every_function_of(module: str) -> None:
    """A new verb of these is documented, or begins with an underscore."""
    tree = ast.parse((ROOT / f"jobqueue/{module}.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    public = {name for name in functions if not name.startswith("_")}
    assert {f"jobqueue.{module}.{name}" for name in public - INSIDE[module]} <= documented()


def documented() -> set[str]:
    """Return the dotted paths that the page on the interface takes from docstrings."""
    text = (DOCS / "reference/interface.md").read_text()
    return set(re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.M))
