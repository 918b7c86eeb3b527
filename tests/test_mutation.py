"""Every guard is needed: without it a test fails, on each engine, and with it none does."""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
import sys

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from jobqueue import db, dispatch, fence, guards, transitions
from jobqueue.fence import SettleResult
from jobqueue.lifecycle import RULES, Completed, Settled, Verb
from jobqueue.testing.conformance import ConformanceMixin
from jobqueue.testing.conformance.columns import DECIDED
from tests import servers
from tests.coordinating import impatient
from tests.explorer import mutants as explorer
from tests.explorer import report as explorer_report
from tests.helpers import (
    ENGINES,
    child_environment,
    engine,
    pause_at,
    run_in_thread,
    wait_until,
)
from tests.mutation import batches, drops, killers, report
from tests.mutation.gate import Mutant, survives
from tests.mutation.table import NO_BATCHES, TABLE, verb
from tests.races.scenes import job_in, settle_all, update_of_job

ENGINE_OF = {alias: name for name, alias in ENGINES.items()}
MUTANTS = {
    f"{guard}, {mutant.note}" if mutant.note else guard: mutant
    for guard, mutants in TABLE.items()
    for mutant in mutants
}

sqlite_only = pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)


NOT_EXCUSED = [
    pytest.param(*alias.values, name, id=f"{alias.id}-{name}", marks=alias.marks)
    for alias in map(engine, ENGINES)
    for name, mutant in MUTANTS.items()
    if alias.id not in mutant.excused
]


@pytest.mark.parametrize(("alias", "name"), NOT_EXCUSED, indirect=["alias"])
def test_mutant_is_killed(alias, name):
    """A survivor means that the guard could be deleted and nobody would notice."""
    mutant = MUTANTS[name]
    told = {each.__name__: report.verdict(mutant, each, alias) for each in mutant.killers}
    assert told == dict.fromkeys(told, "killed")


# -- Nothing is left out


def test_model_and_code_drop_the_same_guards():
    """Each is proved twice, under one name."""
    assert set(TABLE) == set(explorer.MUTANTS)


def test_every_guard_of_the_statements_is_dropped():
    """By some mutant: so a new one needs a mutant, and a test that kills it."""
    named = {
        name
        for name, value in vars(guards).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    before, dropped = dict(vars(guards)), set()
    for mutant in MUTANTS.values():
        with pytest.MonkeyPatch.context() as patch:
            mutant.drop(patch)
            dropped |= {name for name, value in vars(guards).items() if value is not before[name]}
    assert dropped == named | {"FINGERPRINT"}


def test_every_verb_has_its_states_and_every_setback_yields():
    """Each line of the table of verbs, in both of its conditions."""
    assert {verb(each) for each in Verb} <= set(TABLE)
    yielding = {f"cancel: in {each}" for each in Verb if RULES[each].yields_to_cancel}
    assert len(yielding) == 4
    assert yielding == {guard for guard in TABLE if guard.startswith("cancel: ")}


def test_every_column_of_the_fingerprint_has_its_test():
    """By raw SQL that changes it alone, in the public suite."""
    for column in guards.FINGERPRINT:
        name = f"test_{column}_alone_counts"
        assert hasattr(ConformanceMixin, name)
        (first, *_) = TABLE[f"fingerprint: {column}"]
        assert first.killers[0].__name__ == f"conformance: {name}"


def test_every_write_that_rests_on_a_copy_meets_a_changed_column():
    """All verbs but those that rest on the state and the time alone, from each of their states."""
    chosen_by_state = {Verb.CLAIM, Verb.PROMOTE}
    wanted = {
        (state, each) for each in set(Verb) - chosen_by_state for state in RULES[each].sources
    }
    tried = {(state, name) for state, writes in DECIDED.items() for name in writes}
    assert tried - wanted == {
        ("running", name) for name in ("progress", "checkpoint", "request cancel")
    }
    assert wanted <= tried


# -- Nothing is excused without a reason


def test_only_these_are_excused():
    """Promotions choose their rows themselves, in the transaction that writes them.

    While a claim lasts, SQLite lets nobody else write whatever it has locked.
    """
    excused = {(name, engine) for name, mutant in MUTANTS.items() for engine in mutant.excused}
    in_batches = {name for name in MUTANTS if "in batches" in name}
    assert len(in_batches) == 24
    assert excused == {
        (f"{verb(Verb.PROMOTE)}, in the write", "sqlite"),
        ("due time: promote, in the write", "sqlite"),
        ("claim: liveness, in the write", "sqlite"),
        *itertools.product(in_batches, ("sqlite", "mariadb")),
    }


@sqlite_only
def test_nobody_comes_between_choice_and_write_of_the_one_writer(alias):
    """The excuse: whoever would win the race that those mutants lose can't write."""
    job = job_in("scheduled", run_after=job_in("waiting").run_after)
    with pause_at(alias, update_of_job) as pause, impatient(alias) as other:
        promotion = run_in_thread(dispatch.promote_due, None, 9, using=alias)
        pause.wait_until_reached()
        with pytest.raises(OperationalError, match="database is locked"), other.cursor() as cursor:
            cursor.execute("UPDATE jobqueue_job SET state = 'waiting' WHERE id = %s", [job.pk])
        pause.release()
        assert promotion.result() == 1


@pytest.mark.parametrize("form", batches.FORMS)
def test_batch_is_written_one_by_one_where_it_is_excused(alias, form):
    """The excuse: what those mutants change isn't called; elsewhere it is all that is."""
    jobs = batches.three(alias, form)
    with pytest.MonkeyPatch.context() as patch, CaptureQueriesContext(connections[alias]) as sent:
        unused = "UpdateEach" if ENGINE_OF[alias] in NO_BATCHES else "update"
        patch.delattr(db if unused == "UpdateEach" else fence, unused)
        settle_all(jobs, Completed("done"))
    updates = [query for query in sent if query["sql"].startswith("UPDATE")]
    assert len(updates) == (1 if unused == "update" else 3)


# -- The gate itself


def standing(patch):
    """Drop nothing."""


def broken_patch(patch):
    """Put something in a guard's place that can't be called like it."""
    patch.setattr(transitions, "Greatest", lambda: None)


def scene_without_a_row(patch):
    """Let a killer stumble before it can judge."""
    patch.setattr(killers, "row", lambda job: None)


def test_guard_that_is_not_needed_survives(alias):
    mutant = Mutant(standing, (killers.late_report_lowers_nothing,))
    assert survives(mutant, *mutant.killers, alias)


def scene_that_breaks_down(alias):
    """Wait for what never comes."""
    wait_until(lambda: False, "nobody came", timeout=0)


def assertion_of_production(alias):
    """Fail where production asserts, and no test."""
    SettleResult(1, Settled.APPLIED).unwrap()


NO_VERDICTS = {
    "a wait that timed out": (standing, scene_that_breaks_down, "^nobody came"),
    "an assert of production": (standing, assertion_of_production, "^$"),
    "an error of the patch": (
        broken_patch,
        killers.late_report_lowers_nothing,
        "positional argument",
    ),
    "an error of the scene": (
        scene_without_a_row,
        killers.late_report_lowers_nothing,
        "not subscriptable",
    ),
}


@sqlite_only
@pytest.mark.parametrize("case", NO_VERDICTS)
def test_whatever_else_goes_wrong_kills_nothing(alias, case):
    """It says that the scene broke down, not that a promise did."""
    drop, killer, message = NO_VERDICTS[case]
    with pytest.raises((AssertionError, pytest.fail.Exception, TypeError), match=message):
        survives(Mutant(drop, (killer,)), killer, alias)


def killer_that_always_fails(alias):
    """Fail with every guard of its own in place."""
    with pytest.MonkeyPatch.context() as patch:
        drops.last_report_wins(patch)
        killers.late_report_lowers_nothing(alias)


@sqlite_only
def test_report_tells_survivors_and_broken_killers(alias):
    """Each by its name, and the excused with their reason."""
    good = killers.late_report_lowers_nothing
    bad = killer_that_always_fails
    table = {
        "needed": (Mutant(drops.last_report_wins, (good,)),),
        "not needed": (Mutant(standing, (good,), note="at all"),),
        "ill proved": (Mutant(standing, (bad,)),),
        "elsewhere": (Mutant(standing, (good,), {"sqlite": "it can't"}),),
    }
    lines = report.lines(table, ["sqlite"], {"needed": "progress never falls"})
    fates = [(line.engines["sqlite"], line.is_killed) for line in lines]
    assert fates == [("killed", True), ("SURVIVED", False), ("BROKEN", False), ("excused", True)]
    assert report.as_text(lines, ["sqlite"]).split("\n") == [
        "guard dropped       | killed in the model by | killed in the code by      | sqlite",
        "-------------       | ---------------------- | ---------------------      | ------",
        f"needed              | progress never falls   | {good.__name__} | killed",
        f"not needed (at all) |                        | {good.__name__} | SURVIVED",
        f"ill proved          |                        | {bad.__name__}   | BROKEN",
        f"elsewhere           |                        | {good.__name__} | excused",
        "",
        "Excused on sqlite: it can't.",
    ]


def test_survivor_of_the_model_is_none_of_the_killed():
    """Whatever the engines say."""
    line = report.Line("guard", "", report.SURVIVED, ("killer",), {"sqlite": "killed"}, {})
    assert not line.is_killed
    assert report.SURVIVED == explorer_report.SURVIVED


def test_guard_against_what_the_model_has_not_is_said_to_be_missed_elsewhere():
    """The five columns are needed against writers who break the rules."""
    assert report.killed_in_the_model("fingerprint: state").startswith("outside of it: raw SQL")


def test_command_prints_one_object():
    """On databases of its own."""
    command = [sys.executable, "-m", "tests.mutation", "--json", "--engine", "sqlite"]
    environment = child_environment()
    del environment[servers.RUN_DIR_VARIABLE]
    done = subprocess.run(
        [*command, "--guard", "progress: Greatest"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    (line,) = told["mutants"]
    assert (line["guard"], line["engines"]) == ("progress: Greatest", {"sqlite": "killed"})
    assert line["model"] == "progress never falls within an attempt"
    assert told["survivors"] == 0
