"""The operator's guide, followed command by command on two servers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django import DjangoDbBlocker

from jobqueue.models import Job
from tests import routers
from tests.documentation import DOCS, ROOT, blocks
from tests.failover import standby
from tests.failover.standby import ALIAS, PATIENCE, Node
from tests.failover.test_old_primary import SKIP_LOST_IDS, SKIP_LOST_VERSIONS, enqueue_anew
from tests.helpers import child_environment, wait_until

PAGE = DOCS / "how-to/survive-a-failover.md"
STEP = re.compile(
    r"(?:[Oo]n `(db[12])`(?:, in the place of step 2)?|Where your site runs):\n\n"
    r"```console\n(.*?)```",
    re.S,
)
SHOWN = re.compile(r"\n\n```text\n(.*?)```", re.S)


class Operator:
    """Does what a section of the page says, on the machine that it names."""

    def __init__(self, db1: Node, db2: Node) -> None:
        self.machines = {"db1": db1, "db2": db2}

    def follow(self, heading: str) -> str:
        """Run the commands below a heading; compare what the page shows; return all output."""
        (section,) = re.findall(rf"^#+ {heading}\n(.*?)(?=^##+ |\Z)", PAGE.read_text(), re.M | re.S)
        steps = list(STEP.finditer(section))
        assert len(steps) == section.count("```console"), "a step names no machine"
        printed = ""
        for step in steps:
            output = self._run(step[1], step[2])
            if shown := SHOWN.match(section, step.end()):
                self._wait_for(shown[1], step[1], step[2])
            printed += output
        return printed

    def _wait_for(self, shown: str, machine: str | None, commands: str) -> None:
        """Look again, as a person does, until a query gives what the page shows."""
        assert "ALTER" not in commands
        wait_until(
            lambda: self._run(machine, commands) == shown,
            f"{commands} does not give {shown}",
            timeout=PATIENCE,
        )

    def _run(self, machine: str | None, commands: str) -> str:
        if machine is None:
            return _sh(commands, cwd=ROOT, env=_environment())
        node, output = self.machines[machine], ""
        for part in re.split(r"^(systemctl \w+ postgresql)\n", commands, flags=re.M):
            if part == "systemctl start postgresql":
                node.start()
            elif part == "systemctl stop postgresql":
                node.shut_down()
            elif part:
                output += self._run_on(node, part)
        return output

    def _run_on(self, node: Node, commands: str) -> str:
        for name, other in self.machines.items():
            commands = commands.replace(f"{name}.internal", str(other.directory))
        commands = commands.replace("/tmp/", f"{node.directory}/")
        environment = {
            "PATH": f"{Path(node._binary('psql')).parent}{os.pathsep}{os.environ['PATH']}",
            "PGDATA": str(node.data),
            "PGHOST": str(node.directory),
            "PGUSER": "postgres",
            "PGDATABASE": standby.DATABASE,
        }
        return _sh(commands, cwd=node.directory, env=environment, **node._account())


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return child_environment(DJANGO_SETTINGS_MODULE="tests.failover.settings", PATH=path)


def _sh(commands: str, **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        ["bash", "-ec", commands],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        **options,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return str(done.stdout)


@pytest.fixture
def operator(template: Path, django_db_blocker: DjangoDbBlocker) -> Iterator[Operator]:
    """Have a primary, a machine with nothing on it, and somebody who reads."""
    db1, db2 = Node("db1", template), Node("db2")
    with standby.gone_at_the_end(db1, db2), standby.reachable(db1, db2), routers.use_alias(ALIAS):
        db1.start()
        db2.prepare()
        with django_db_blocker.unblock():
            yield Operator(db1, db2)


def test_the_settings_are_those_of_the_tests() -> None:
    """One recipe, and the one that is proved."""
    (text,) = (block.text for block in blocks(PAGE) if "DATABASES" in block.text)
    shown = ast.literal_eval(text.removeprefix("DATABASES = "))["default"]
    proved = standby.multi_host("db1.internal,db2.internal")
    assert shown == {**proved, "USER": "shop"}


def test_a_synchronous_pair_fails_over_and_back_together(operator: Operator) -> None:
    """Set up, lost, promoted, looked at, made a pair again."""
    operator.follow("Set up the standby")
    kept = enqueue_anew("kept")
    operator.machines["db1"].crash()
    operator.follow("1. Fence the old primary")
    operator.follow("2. Promote the standby")
    looked = operator.follow("3. Look whether all is well")
    assert "Queue kept: 1 waiting" in looked
    after = enqueue_anew("after")
    operator.follow("Make the old primary the new standby")
    assert list(Job.objects.order_by("pk")) == [kept, after]


def test_an_asynchronous_pair_fails_over_behind_a_closed_door(operator: Operator) -> None:
    """What was lost is found on the old primary, and its ids don't come again."""
    db1, db2 = operator.machines["db1"], operator.machines["db2"]
    operator.follow("Set up the standby")
    db1.set(synchronous_standby_names="")
    kept = enqueue_anew("kept")
    db2.stop_receiving()
    lost = enqueue_anew("lost")
    db1.crash()
    operator.follow("1. Fence the old primary")
    operator.follow("Asynchronous: what may be lost")
    after = enqueue_anew("after")
    assert after.pk > 1_000_000
    kept.refresh_from_db()
    assert kept.version >= 1_000_000
    assert operator.follow("What was lost") == f"{lost.pk}\n"
    operator.follow("Make the old primary the new standby")
    assert list(Job.objects.order_by("pk")) == [kept, after]


def test_the_statements_that_move_on_are_those_that_are_proved() -> None:
    """See ``test_old_primary``."""
    page = PAGE.read_text()
    assert SKIP_LOST_IDS in page
    assert SKIP_LOST_VERSIONS in page
