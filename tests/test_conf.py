"""Every setting is read, checked and named when it can't be used."""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from jobqueue import conf
from jobqueue.backoff import Backoff
from tests.asserting import exactly

SECONDS = ["TIMEOUT", "TIMEOUT_GRACE", "CLAIM_TIMEOUT", "SWEEP_INTERVAL", "GRACE"]
INTEGERS = {
    "MAX_ATTEMPTS": (1, 10_000),
    "THREADS": (1, 1000),
    "BATCH": (1, 10_000),
    "MAX_PAYLOAD_BYTES": (1024, 2**30),
}


class Queues(str, enum.Enum):  # noqa: UP042  (not StrEnum: str() gives another text)
    MAIL = "mail"


def read(**given: Any) -> conf.Settings:
    found, problems = conf.read(given)
    assert problems == []
    return found


def problems(**given: Any) -> list[str]:
    return conf.read(given)[1]


def test_nothing_given_means_the_defaults() -> None:
    assert read() == conf.Settings()
    assert conf.Settings().worker_queues == ("default",)


# -- readers


def test_queues() -> None:
    assert read(QUEUES=["mail", "a.b:c-d_9"]).QUEUES == ("mail", "a.b:c-d_9")
    assert read(QUEUES=["mail"]).worker_queues == ("mail",)
    assert read(QUEUES=None).QUEUES is None
    (name,) = read(QUEUES=[Queues.MAIL]).worker_queues
    assert (name, type(name)) == ("mail", str)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("mail", "queues must be a list of names, not 'mail'"),
        ([], "queues must be a list of names or None, not empty"),
        (7, "queues must be a list of names, not 7"),
        (["a b"], "queue must be 1 to 100 letters, digits or any of _ . : -, not 'a b'"),
        ([""], "queue must be 1 to 100 letters, digits or any of _ . : -, not ''"),
        (["a\n"], "queue must be 1 to 100 letters, digits or any of _ . : -, not 'a\\n'"),
        ([None], "queue must be 1 to 100 letters, digits or any of _ . : -, not None"),
    ],
)
def test_bad_queues(value: Any, problem: str) -> None:
    assert problems(QUEUES=value) == [f"JOBQUEUE['QUEUES']: {problem}"]


def test_a_queue_name_has_100_characters_at_most() -> None:
    assert conf.check_queue_name("q" * 100) == "q" * 100
    with pytest.raises(ValueError, match=r"^queue must be 1 to 100 letters"):
        conf.check_queue_name("q" * 101)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    low, high = INTEGERS[name]
    assert getattr(read(**{name: low}), name) == low
    assert getattr(read(**{name: high}), name) == high
    for value in (low - 1, high + 1, float(low), str(low), True, None):
        wanted = f"the value must be an integer from {low} to {high}, not {value!r}"
        assert problems(**{name: value}) == [f"JOBQUEUE[{name!r}]: {wanted}"]


@pytest.mark.parametrize("name", [*SECONDS, "LEASE"])
@pytest.mark.parametrize(("value", "seconds"), [(2, 2.0), (2.5, 2.5), (timedelta(minutes=1), 60.0)])
def test_seconds(name: str, value: Any, seconds: float) -> None:
    assert getattr(read(**{name: value}), name) == seconds


@pytest.mark.parametrize("name", [*SECONDS, "LEASE", "POLL"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0, "must be more than zero, not 0 seconds"),
        (-1.5, "must be more than zero, not -1.5 seconds"),
        (timedelta(0), "must be more than zero, not 0 seconds"),
        (float("nan"), "must be a finite number of seconds, not nan"),
        (float("inf"), "must be a finite number of seconds, not inf"),
        (1e300, "must be a finite number of seconds, not 1e+300"),
        (timedelta.max, "must be at most 36,500 days, not 999999999 days, 23:59:59.999999"),
        ("30", "must be seconds or a timedelta, not '30'"),
        (True, "must be seconds or a timedelta, not True"),
    ],
)
def test_bad_seconds(name: str, value: Any, problem: str) -> None:
    assert problems(**{name: value}) == [f"JOBQUEUE[{name!r}]: the value {problem}"]


def test_only_the_timeout_may_be_none() -> None:
    assert read(TIMEOUT=None).TIMEOUT is None
    assert problems(GRACE=None) == [
        "JOBQUEUE['GRACE']: the value must be seconds or a timedelta, not None"
    ]


def test_backoff() -> None:
    for given, policy in ((3, Backoff(3, 1, 3, 0)), ({"cap": 60}, Backoff(cap=60))):
        assert read(BACKOFF=given).BACKOFF == policy  # noqa: SIM300  (it is no constant)
    assert problems(BACKOFF={"cap": -1}) == [
        "JOBQUEUE['BACKOFF']: backoff cap must be 0 to 31,536,000, not -1"
    ]
    assert problems(BACKOFF={7: 1, "x": 1}) == ["JOBQUEUE['BACKOFF']: backoff has no figure 'x', 7"]


def test_validate_tasks() -> None:
    assert read(VALIDATE_TASKS=False).VALIDATE_TASKS is False
    assert problems(VALIDATE_TASKS="no") == [
        "JOBQUEUE['VALIDATE_TASKS']: must be True or False, not 'no'"
    ]


# -- the whole


def test_every_problem_is_told_and_the_rest_is_read() -> None:
    read_all_the_same, found = conf.read({"THREAD": 1, "THREADS": 0, "POLL": 0.5})
    known = ", ".join(conf.Settings.__dataclass_fields__)
    assert found == [
        f"JOBQUEUE has no setting 'THREAD'; known: {known}",
        "JOBQUEUE['THREADS']: the value must be an integer from 1 to 1000, not 0",
    ]
    assert read_all_the_same == conf.Settings(POLL=0.5)


@pytest.mark.parametrize("given", [None, [], "x"], ids=repr)
def test_it_must_be_a_dict(given: Any) -> None:
    assert conf.read(given) == (conf.Settings(), [f"JOBQUEUE must be a dict, not {given!r}"])


@pytest.mark.parametrize(("poll", "lease"), [(30, 30), (31, 30), (1, 1)])
def test_a_poll_as_long_as_the_lease_is_a_contradiction(poll: float, lease: float) -> None:
    """A lease is only renewed while the loop ticks, and that it does once a poll."""
    message = f"JOBQUEUE['POLL'] ({poll} s) must be shorter than JOBQUEUE['LEASE'] ({lease} s)"
    assert problems(POLL=poll, LEASE=lease) == [message]
    assert problems(POLL=lease / 2, LEASE=lease) == []


def test_a_default_takes_part_in_contradictions() -> None:
    assert problems(LEASE=1) == [
        "JOBQUEUE['POLL'] (1 s) must be shorter than JOBQUEUE['LEASE'] (1 s)"
    ]


# -- in force


def test_a_changed_setting_is_in_force_at_once() -> None:
    assert conf.get().THREADS == 4
    with override_settings(JOBQUEUE={"THREADS": 9}):
        assert conf.get().THREADS == 9
        assert conf.get() is conf.get()
    assert conf.get().THREADS == 4


def test_a_project_without_the_setting_has_the_defaults() -> None:
    with override_settings(JOBQUEUE={"THREADS": 9}):
        del settings.JOBQUEUE
        conf.get.cache_clear()
        assert conf.get() == conf.Settings()


@override_settings(JOBQUEUE={"THREADS": 0, "LEASE": -1})
def test_settings_that_are_wrong_are_not_worked_with() -> None:
    message = (
        "JOBQUEUE['THREADS']: the value must be an integer from 1 to 1000, not 0; "
        "JOBQUEUE['LEASE']: the value must be more than zero, not -1 seconds"
    )
    with pytest.raises(ImproperlyConfigured, match=exactly(message)):
        conf.get()


def test_a_queue_is_known_if_it_is_listed_or_nothing_is() -> None:
    assert conf.check_known_queue("any") == "any"
    with override_settings(JOBQUEUE={"QUEUES": ["mail", "default"]}):
        assert conf.check_known_queue("mail") == "mail"
        message = "there is no queue 'any' in JOBQUEUE['QUEUES']: mail, default"
        with pytest.raises(ValueError, match=exactly(message)):
            conf.check_known_queue("any")


def test_zero_is_allowed_where_it_is_said_to_be() -> None:
    assert conf.check_seconds(0, "delay", zero=True) == timedelta(0)
    message = "delay must be zero or more, not -1 seconds"
    with pytest.raises(ValueError, match=exactly(message)):
        conf.check_seconds(-1, "delay", zero=True)
