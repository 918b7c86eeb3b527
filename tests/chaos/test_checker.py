"""The checker: good histories pass, and each kind of bad one is found and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos import cli, log
from tests.chaos.checker import KINDS, Violation
from tests.chaos.history import Known, gather
from tests.chaos.stories import WAITING, Story, ended, running

SCHEDULED = Known("scheduled", 1)
RETRY = (running(), SCHEDULED)


def claimed() -> Story:
    """Return a story up to where its handler runs, at version 1."""
    return Story().born().claim().run()


def run_again() -> Story:
    """Return a story in which the first attempt failed, up to where the second one runs."""
    story = claimed().write(1, *RETRY, owner=True)
    return story.write(2, SCHEDULED, Known("waiting", 1)).claim(3, 2).run(4, 2)


def completed_and_rerun() -> Story:
    """Return a story of an effect that was had, and of a second run, at version 4."""
    story = Story().born(task="effect").claim().run().complete()
    return story.write(2, ended(), Known("waiting", 1)).claim(3, 2).run(4, 2)


SECOND = running(2)

GOOD: dict[str, Callable[[], list[Violation]]] = {
    "completed": lambda: claimed().complete().violations(2),
    "failed once": lambda: run_again().complete(4, before=SECOND).violations(5, ended(attempt=2)),
    "rolled back": lambda: Story().born("undone").violations(),
    "rolled back, and its id given again": lambda: (
        Story().born("undone", token="other").born().claim().run().complete().violations(2)
    ),
    "enqueuing killed, not committed": lambda: Story().born(None).violations(),
    "enqueuing killed, committed": lambda: (
        Story().born("unknown").claim().run().complete().violations(2)
    ),
    "reply lost, written": lambda: claimed().complete(1, "unknown").told("already").violations(2),
    "killed while it wrote, not written": lambda: (
        claimed()
        .complete(1, None)
        .write(1, running(), ended("failed"), log="sweep")
        .violations(2, ended("failed"))
    ),
    "refused, for a sweep was first": lambda: (
        claimed()
        .write(1, running(), ended("failed"), log="sweep")
        .complete(1, "refused")
        .told("conflict", found=2)
        .violations(2, ended("failed"))
    ),
    "refused, long after": lambda: (
        run_again()
        .complete(1, "refused")
        .told("conflict", found=4)
        .complete(4, before=SECOND)
        .violations(5, ended(attempt=2))
    ),
    "deleted": lambda: claimed().complete().write(2, ended(), ended("gone")).violations(),
    "deleted, and the reply lost": lambda: (
        claimed().complete().write(2, ended(), ended("gone"), "unknown").violations()
    ),
    "reply lost, and deleted before its owner asked again": lambda: (
        claimed()
        .complete(1, "unknown")
        .write(2, ended(), ended("gone"))
        .told("conflict")
        .violations()
    ),
    "completed by an operator, and so without the effect": lambda: (
        Story()
        .born(task="effect")
        .claim()
        .run()
        .write(1, running(), ended(), log="operator")
        .violations(2, task="effect")
    ),
    "asked to stop, and completed": lambda: claimed().within("cancel").complete().violations(2),
    "asked to stop, and cancelled": lambda: (
        claimed()
        .within("cancel")
        .write(1, running(), ended("cancelled"), owner=True)
        .violations(2, ended("cancelled"))
    ),
    "an effect for each completion": lambda: (
        completed_and_rerun()
        .complete(4, before=SECOND)
        .violations(5, ended(attempt=2), task="effect", effects=[1, 4])
    ),
}

# By name, what must be found.
BAD: dict[str, tuple[set[str], Callable[[], list[Violation]]]] = {
    "gone": ({"enqueue lost"}, lambda: Story().born().violations()),
    "completed and gone": ({"enqueue lost"}, lambda: claimed().complete().violations()),
    "an acknowledged write undone": (
        {"write lost"},
        lambda: claimed().complete().violations(1, running()),
    ),
    "an acknowledged deletion undone": (
        {"write lost"},
        lambda: claimed().complete().write(2, ended(), ended("gone")).violations(2),
    ),
    "completed without its effect": (
        {"effect lost"},
        lambda: (
            completed_and_rerun()
            .complete(4, before=SECOND)
            .violations(5, ended(attempt=2), task="effect", effects=[1])
        ),
    ),
    "still waiting": ({"not final"}, lambda: Story().born().violations(0, WAITING)),
    "rolled back and run": (
        {"ran though rolled back"},
        lambda: Story().born("undone").run().violations(),
    ),
    "rolled back and there": (
        {"exists though rolled back"},
        lambda: Story().born("undone").violations(2),
    ),
    "there, and nobody enqueued it": ({"unheard of"}, lambda: Story().violations(2)),
    "run, and nobody enqueued it": ({"unheard of"}, lambda: Story().run().violations()),
    "one claim run twice": ({"ran twice"}, lambda: claimed().run().complete().violations(2)),
    "run without a claim": (
        {"ran unclaimed"},
        lambda: (
            Story()
            .born()
            .write(0, WAITING, ended("cancelled", 0, None))
            .run()
            .violations(1, ended("cancelled", 0, None))
        ),
    ),
    "run as another attempt than was claimed": (
        {"ran unclaimed"},
        lambda: Story().born().claim().run(1, 2).complete().violations(2),
    ),
    "a sweep and the owner": (
        {"two writes of one version", "two outcomes of one execution"},
        lambda: (
            claimed().write(1, running(), ended("failed"), log="sweep").complete().violations(2)
        ),
    ),
    "two claims of one version": (
        {"two writes of one version"},
        lambda: Story().born().claim().claim(holder="w2").complete().violations(2),
    ),
    "one attempt with two outcomes": (
        {"two outcomes of one execution", "stale write accepted"},
        lambda: claimed().write(1, *RETRY).complete(2).violations(3),
    ),
    "an effect had twice": (
        {"effect doubled"},
        lambda: claimed().complete().violations(2, effects=[1, 1]),
    ),
    "the effect of an execution that was superseded": (
        {"effect without completion"},
        lambda: run_again().complete(4, before=SECOND).violations(5, ended(attempt=2), effects=[1]),
    ),
    "an effect of nothing": (
        {"effect without completion"},
        lambda: Story().violations(effects=[1]),
    ),
    "a write by somebody else's claim": (
        {"stale write accepted"},
        lambda: claimed().complete(before=running(holder="w2")).violations(2, ended(holder="w2")),
    ),
    "an earlier version after a later one": (
        {"out of order"},
        lambda: Story().born().run().complete().claim().violations(2),
    ),
    "progress after the end": (
        {"stale write accepted"},
        lambda: claimed().complete().within("progress").violations(2),
    ),
    "progress of what never ran": (
        {"stale write accepted"},
        lambda: claimed().within("progress", 0).complete().violations(2),
    ),
    "asked to stop, and retried": (
        {"cancelled and went on"},
        lambda: (
            claimed()
            .within("cancel")
            .write(1, *RETRY)
            .write(2, SCHEDULED, ended("cancelled", 1, None))
            .violations(3, ended("cancelled", 1, None))
        ),
    ),
    "changed, and nobody wrote": ({"gap"}, lambda: claimed().violations(2)),
    "changed, and nobody wrote, where an effect was due": (
        {"gap"},
        lambda: Story().born(task="effect").claim().run().violations(2, task="effect"),
    ),
    "changed, and whoever asked was refused": (
        {"gap"},
        lambda: claimed().complete(1, "refused").violations(2),
    ),
    "from completed to running": (
        {"no such verb"},
        lambda: (
            claimed()
            .complete()
            .write(2, ended(), SECOND)
            .complete(3, before=SECOND)
            .violations(4, ended(attempt=2))
        ),
    ),
    "another row than was written": (
        {"row differs"},
        lambda: claimed().complete().violations(2, ended("failed")),
    ),
    "completed with the result of another of its batch": (
        {"row differs"},
        lambda: claimed().complete().violations(2, result="other"),
    ),
    "called already applied, when a sweep had written": (
        {"unknown resolved twice"},
        lambda: (
            claimed()
            .complete(1, "unknown")
            .write(1, running(), ended("failed"), log="sweep")
            .told("already")
            .violations(2, ended("failed"))
        ),
    ),
    "called already applied, when what followed tells another story": (
        {"unknown resolved twice"},
        lambda: (
            claimed()
            .complete(1, "unknown")
            .write(1, *RETRY, "unknown", log="sweep")
            .told("already")
            .write(2, SCHEDULED, ended("cancelled", 1, None))
            .violations(3, ended("cancelled", 1, None))
        ),
    ),
    "called gone with its own write, and still there": (
        {"unknown resolved twice"},
        lambda: claimed().complete(1, "unknown").told("conflict").violations(2),
    ),
    "called a conflict with its own write": (
        {"unknown resolved twice"},
        lambda: claimed().complete(1, "unknown").told("conflict", found=2).violations(2),
    ),
    "refused, and nothing had changed": (
        {"refused without cause"},
        lambda: claimed().told("conflict", found=1).complete().violations(2),
    ),
    "half a batch": ({"written in part"}, lambda: claimed().partly().complete().violations(2)),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_history_has_no_violation(name):
    assert GOOD[name]() == []


@pytest.mark.parametrize("name", BAD)
def test_bad_history_is_found_and_named(name):
    """airflow#63183, bull#1416: what must never be is found, by its name and no other."""
    kinds, violations = BAD[name]
    assert {violation.kind for violation in violations()} == kinds


def test_each_kind_of_violation_is_seen():
    """The last ones are of processes: see ``test_chaos`` and ``test_families``."""
    seen = set().union(*(kinds for kinds, _ in BAD.values()))
    of_processes = {"process ended", "not replaced", "not buried", "outlived its parent"}
    assert seen | of_processes == set(KINDS)


def test_violation_is_told_with_its_lines():
    (violation,) = Story().born("undone").run().violations()
    assert cli.as_text(violation) == (
        "VIOLATION ran though rolled back: job 7: token was never committed\n"
        '    enqueue: {"e": "born", "t": 1.0, "jobs": [[7, "token", "quick", "waiting"]], "n": 1}\n'
        '    worker: {"e": "run", "t": 3.0, "job": 7, "v": 1, "attempt": 1, "token": "token"}'
    )


def test_line_that_was_cut_short_is_as_good_as_not_written(tmp_path):
    """A process was killed within its last line: what it had asked is unknown."""
    writer = log.Log(tmp_path / f"worker-1{log.SUFFIX}")
    writer.ask("born", jobs=[[7, "token", "quick", "waiting"]])
    with (tmp_path / f"worker-1{log.SUFFIX}").open("a") as file:
        file.write('{"e": "ok", "of": [1')
    assert gather(log.read(tmp_path)).life(7).birth.status == "unknown"


def test_rows_of_one_statement_are_answered_each_for_itself(tmp_path):
    """Of a batch, a row that was not what it should have been is refused, and the others stand."""
    writer = log.Log(tmp_path / f"worker-1{log.SUFFIX}")
    change = [["running", 1, "w1"], ["completed", 1, "w1"]]
    number = writer.ask("write", jobs=[[7, 1, *change], [8, 1, *change]], owner=True)
    writer.answer("refused", [number], jobs=[8])
    writer.answer("ok", [number])
    history = gather(log.read(tmp_path))
    statuses = {job_id: life.writes[0].status for job_id, life in history.lives.items()}
    assert statuses == {7: "ok", 8: "refused"}
