"""The tools that the race tests stand on do what they say, on every engine."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction

from tests import helpers
from tests.helpers import (
    child_environment,
    other_connection,
    pause_at,
    run_in_thread,
    statement,
    use_connection,
    wait_until,
    wait_until_blocked,
)

UPDATE = statement("UPDATE", "auth_group")


def names() -> list[str]:
    return list(Group.objects.order_by("name").values_list("name", flat=True))


def rename(old: str, new: str) -> int:
    return Group.objects.filter(name=old).update(name=new)


def test_queries_go_to_the_engine_under_test(alias):
    group = Group.objects.create(name="a")
    assert group._state.db == alias
    assert run_in_thread(names).result() == ["a"]


def test_flushed_before(alias):
    assert names() == []


def test_transactions_are_as_in_production(alias):
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            assert connection.transaction_mode == "IMMEDIATE"
            cursor.execute("PRAGMA journal_mode")
            assert cursor.fetchone() == ("wal",)
        elif connection.vendor == "postgresql":
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchone() == ("read committed",)
        else:
            cursor.execute("SELECT @@tx_isolation")
            assert cursor.fetchone() == ("READ-COMMITTED",)


def test_other_connection_is_another_session(alias):
    with other_connection(alias) as other:
        with use_connection(other), transaction.atomic(using=alias):
            Group.objects.create(name="a")
            with use_connection(connections.create_connection(alias)):
                assert names() == []
                connections[alias].close()
        assert names() == ["a"]
        assert connections[alias] is not other
    assert other.connection is None


def test_one_thread_acts_as_two(alias):
    Group.objects.create(name="a")
    with other_connection(alias) as other, transaction.atomic(using=alias):
        rename("a", "b")
        with use_connection(other):
            assert names() == ["a"]
        assert names() == ["b"]


def test_other_connection_takes_options():
    with other_connection("default", timeout=0) as other:
        assert other.settings_dict["OPTIONS"]["timeout"] == 0
    assert connections["default"].settings_dict["OPTIONS"]["timeout"] > 0


def test_thread_has_its_own_connections_and_closes_them(alias):
    def connect():
        connections[alias].ensure_connection()
        return connections[alias]

    connection = run_in_thread(connect).result()
    assert connection is not connections[alias]
    assert connection.connection is None


def test_thread_raises_through_result():
    with pytest.raises(ValueError, match="invalid literal"):
        run_in_thread(int, "x").result()


def test_thread_that_does_not_end_fails_the_test():
    end = threading.Event()
    running = run_in_thread(end.wait)
    with pytest.raises(pytest.fail.Exception, match="has not ended"):
        running.result(timeout=0.01)
    end.set()
    assert running.result()


def test_pause_before_a_statement(alias):
    Group.objects.create(name="a")
    with pause_at(alias, UPDATE) as pause:
        loser = run_in_thread(rename, "a", "loser")
        pause.wait_until_reached()
        assert names() == ["a"]
        assert rename("a", "winner") == 1
        pause.release()
        assert loser.result() == 0
    assert names() == ["winner"]


def test_pause_after_a_statement(alias):
    Group.objects.create(name="a")
    with pause_at(alias, UPDATE, after=True) as pause:
        winner = run_in_thread(rename, "a", "winner")
        pause.wait_until_reached()
        assert rename("a", "loser") == 0
        assert not winner.done
        pause.release()
        assert winner.result() == 1


def test_pause_stops_only_the_first_statement_that_matches(alias):
    Group.objects.create(name="a")
    with pause_at(alias, UPDATE) as pause:
        first = run_in_thread(rename, "a", "first")
        pause.wait_until_reached()
        second = run_in_thread(rename, "a", "second")
        assert second.result() == 1
        assert not first.done


def test_pause_on_a_given_connection(alias):
    def stopped():
        with pause_at(connections[alias], UPDATE, after=True) as own:
            own.release()
            return rename("a", "b")

    Group.objects.create(name="a")
    assert run_in_thread(stopped).result() == 1


def test_pause_is_released_when_the_test_fails(alias):
    def fail_while_paused():
        with pause_at(alias, UPDATE) as pause:
            running.append(run_in_thread(rename, "a", "b"))
            pause.wait_until_reached()
            raise ZeroDivisionError

    running = []
    with pytest.raises(ZeroDivisionError):
        fail_while_paused()
    assert running[0].result() == 0


def test_pause_that_is_not_reached_fails_the_test(alias, monkeypatch):
    monkeypatch.setattr(helpers, "TIMEOUT", 0.01)
    with (
        pause_at(alias, UPDATE) as pause,
        pytest.raises(pytest.fail.Exception, match="nobody came"),
    ):
        pause.wait_until_reached()


def test_pause_that_is_not_released_fails_the_thread(alias, monkeypatch):
    monkeypatch.setattr(helpers, "TIMEOUT", 0.01)
    with pause_at(alias, UPDATE):
        running = run_in_thread(rename, "a", "b")
        with pytest.raises(AssertionError, match="nobody released"):
            running.result(timeout=5)


@pytest.mark.parametrize("count", [1, 3])
def test_losers_block_on_the_lock(alias, count):
    Group.objects.create(name="a")
    with transaction.atomic(using=alias):
        assert rename("a", "winner") == 1
        losers = [run_in_thread(rename, "a", "loser") for _ in range(count)]
        wait_until_blocked(alias, count)
        assert not any(loser.done for loser in losers)
    assert [loser.result() for loser in losers] == [0] * count
    assert names() == ["winner"]


def test_nobody_blocked_fails_the_test(alias, monkeypatch):
    monkeypatch.setattr(helpers.wait_until, "__kwdefaults__", {"timeout": 0.01})
    with pytest.raises(pytest.fail.Exception, match="wait for a lock"):
        wait_until_blocked(alias)


def test_wait_until_returns_the_value():
    values = iter([0, None, 7])
    assert wait_until(lambda: next(values), "never") == 7


def test_child_process_sees_the_same_database(alias):
    Group.objects.create(name="a")
    script = (
        "import django; django.setup(); from django.contrib.auth.models import Group;"
        "print(Group.objects.get().name, end='')"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (child.stdout, child.stderr) == ("a", "")
