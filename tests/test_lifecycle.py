"""A job's life: the table of verbs is the design's, and nothing else is allowed."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime

import pytest

from jobqueue.lifecycle import (
    FINAL,
    HELD,
    QUEUED,
    RULES,
    ExecutionFingerprint,
    State,
    Verb,
    is_allowed,
)

# From the design, written out once more: a change of the table has to be made twice.
TABLE = {
    "promote": ("scheduled", "waiting"),
    "claim": ("waiting", "claimed"),
    "start": ("claimed", "running"),
    "complete": ("running", "completed"),
    "fail": ("running", "failed"),
    "retry": ("running", "scheduled"),
    "snooze": ("running", "scheduled"),
    "release": ("claimed running", "waiting"),
    "cancel": ("scheduled waiting claimed running", "cancelled"),
    "rerun": ("completed failed cancelled", "waiting"),
    "edit": ("scheduled waiting", None),
    "delete": ("completed failed cancelled", None),
}


def test_the_table_is_the_design_s() -> None:
    table = {verb: (set(rule.sources), rule.target) for verb, rule in RULES.items()}
    assert table == {verb: (set(sources.split()), to) for verb, (sources, to) in TABLE.items()}
    assert set(RULES) == set(Verb)


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("state", State)
def test_a_verb_is_allowed_from_its_sources_only(verb: Verb, state: State) -> None:
    assert is_allowed(verb, state) is (state in TABLE[verb][0].split())
    assert is_allowed(verb, str(state)) is is_allowed(verb, state)


def test_no_verb_is_allowed_from_a_state_that_does_not_exist() -> None:
    assert not any(is_allowed(verb, "asleep") for verb in Verb)


def test_every_state_is_queued_held_or_final() -> None:
    assert sorted([*QUEUED, *HELD, *FINAL]) == sorted(State)


def test_a_cancel_request_wins_over_every_setback_and_over_no_success() -> None:
    yielding = {verb for verb, rule in RULES.items() if rule.yields_to_cancel}
    assert yielding == {Verb.FAIL, Verb.RETRY, Verb.SNOOZE, Verb.RELEASE}


def test_only_a_rerun_leaves_a_final_state() -> None:
    leaving = {verb for verb, rule in RULES.items() if rule.target and rule.sources & FINAL}
    assert leaving == {Verb.RERUN}


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
RUNNING = ExecutionFingerprint("running", 2, "host:1:ab", NOON, NOON, 7)


def test_a_fingerprint_is_told_to_people_and_to_json() -> None:
    assert str(RUNNING) == "running by host:1:ab, attempt 2, version 7"
    waiting = ExecutionFingerprint("waiting", 0, None, None, None, 0)
    assert str(waiting) == "waiting, attempt 0, version 0"
    assert json.loads(json.dumps(RUNNING.as_dict())) == {
        "state": "running",
        "attempt": 2,
        "claimed_by": "host:1:ab",
        "claimed_at": "2026-01-01T12:00:00+00:00",
        "attempted_at": "2026-01-01T12:00:00+00:00",
        "version": 7,
    }


@pytest.mark.parametrize("name", ExecutionFingerprint.__dataclass_fields__)
def test_fingerprints_differ_where_any_field_does(name: str) -> None:
    assert dataclasses.replace(RUNNING, **{name: None}) != RUNNING
    assert dataclasses.replace(RUNNING) == RUNNING
