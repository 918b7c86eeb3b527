"""Whatever is done in whatever order, by whatever clock, the tables are what the model says."""

from __future__ import annotations

import inspect
import json
import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from jobqueue import claim, conf, coordinator
from jobqueue.enqueue import enqueue
from jobqueue.exceptions import InvalidJob, JobNotFound
from jobqueue.lifecycle import ExecutionFingerprint, Report, State
from jobqueue.models import Job
from jobqueue.testing.factories import TASK
from tests import properties
from tests.asserting import stored
from tests.explorer.model import Answer
from tests.properties.answers import INVALID
from tests.properties.clock import Clock
from tests.properties.machine import QueueMachine

COLUMNS = [field.attname for field in Job._meta.concrete_fields]
BIRTH = {*inspect.signature(enqueue).parameters} - {"task", "using"}


@pytest.mark.timeout(properties.TIMEOUT)
def test_the_public_api_keeps_to_the_model(
    alias: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Many users at once, old copies, lost replies and clocks that step back."""
    caplog.set_level(logging.CRITICAL, "jobqueue")
    clock = Clock()
    clock.install(monkeypatch)
    # The mirror looks before each claim. What one does without is in test_claim_memory.py.
    monkeypatch.setattr(claim, "_recall", lambda worker_id, using: None)
    number = properties.choose_seed(request.config.getoption("--hypothesis-seed"))
    machine = QueueMachine.on(alias, clock)
    try:
        run_state_machine_as_test(seed(number)(machine), settings=properties.chosen_settings())
    except BaseException as error:
        error.add_note(properties.how_to_repeat(request.node.nodeid, number))
        raise
    told: Counter[str] = Counter()
    for (_, answer), count in machine.answers.items():
        told[answer] += count
    # What comes only where the machine gets about: it is no proof that nothing ever happened.
    assert {*Answer, INVALID} - {*told} == {Answer.NOTHING}


# -- Functions alone, and calls with anything at all


times = st.datetimes(timezones=st.just(UTC))


@properties.pure
@given(
    st.builds(
        ExecutionFingerprint,
        state=st.sampled_from(State).map(str),
        attempt=st.integers(0),
        claimed_by=st.none() | st.text(),
        claimed_at=st.none() | times,
        attempted_at=st.none() | times,
        version=st.integers(0),
    )
)
def test_a_fingerprint_survives_json(fingerprint: ExecutionFingerprint) -> None:
    told = json.loads(json.dumps(fingerprint.as_dict()))
    for name in ("claimed_at", "attempted_at"):
        told[name] = told[name] and datetime.fromisoformat(told[name])
    assert ExecutionFingerprint(**told) == fingerprint


figures = st.builds(Report, st.integers(0, 100), st.text(max_size=3))
checkpoints = st.builds(Report, checkpoint=st.integers(), has_checkpoint=st.just(True))
reports = st.just(Report()) | figures | checkpoints | st.builds(Report.over, figures, checkpoints)


@properties.pure
@given(reports, reports, reports)
def test_reports_may_be_merged_in_any_grouping(first: Report, then: Report, last: Report) -> None:
    """However a worker gathers what was said, the same is written, and no figure falls."""
    merged = last.over(then).over(first)
    assert merged == last.over(then.over(first))
    assert merged.percent == max(
        (said.percent for said in (first, then, last) if said.percent is not None), default=None
    )


numbers = st.integers() | st.floats() | st.booleans() | st.decimals() | st.fractions()
keys = st.text() | st.integers() | st.floats(allow_nan=False) | st.none()
anything = st.recursive(
    st.none()
    | numbers
    | st.text(st.characters() | st.characters(categories=["Cs"]))
    | st.binary()
    | st.timedeltas()
    | st.datetimes(timezones=st.none() | st.timezones()),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(keys, inner),
    max_leaves=5,
)


@properties.pure
@given(numbers | st.timedeltas() | anything, st.booleans())
def test_any_value_is_seconds_or_is_refused(value: Any, zero: bool) -> None:
    try:
        length = conf.check_seconds(value, "delay", zero=zero)
    except ValueError:
        return
    assert timedelta(0) <= length <= conf.MAX_DURATION
    assert length or zero


@properties.on_an_engine
@given(name=st.sampled_from(sorted(BIRTH)), value=anything, like=st.integers(0, 2))
def test_any_argument_is_stored_or_refused(alias: str, name: str, value: Any, like: int) -> None:
    """No value gets past ``enqueue`` that a database chokes on, or gives back as another."""
    wrapped = [value, [value], {"key": value}][like]
    try:
        job = enqueue(**{"task": TASK, name: wrapped})
    except InvalidJob:
        return
    assert {name: getattr(job, name) for name in COLUMNS} == stored(job)


@properties.on_an_engine
@given(job_id=anything, expected_version=st.none() | st.integers() | anything)
def test_any_id_and_version_get_a_typed_answer(
    alias: str, job_id: Any, expected_version: Any
) -> None:
    with pytest.raises((InvalidJob, JobNotFound)):
        coordinator.rerun(job_id, actor="operator", expected_version=expected_version)
