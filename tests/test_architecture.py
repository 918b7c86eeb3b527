"""The rules of the house hold; and each would be seen to be broken."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import jobqueue
from jobqueue import conf
from tests.architecture import MAX_FUNCTION, MAX_LINES, RULES

PACKAGE = Path(jobqueue.__file__).parent
MODULES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if "migrations" not in path.parts
}

# What a module may do all the same, as a pattern for what is found there.
ALLOWED = {
    "writes": {
        "fence.py": r"",  # the one compare-and-update
        "groups.py": r"",  # the same for many jobs
        "transitions.py": r"",  # the verbs
        "dispatch.py": r"",  # promotions and claims
        "models.py": r"\.save\(\) on super$",  # the one that refuses all but births
        "enqueue.py": r"\.save\(\) on jobs$",
        "db/chosen.py": r"\.update\(\) on still$",
        # Of an object's own dictionary.
        "db/convert.py": r"\.update\(\) on dict$",
        "db/insert.py": r"\.update\(\) on rows$",
    },
    "settings_reads": {"conf.py": r""},
    "vendor_knowledge": {
        "db/__init__.py": r"",
        **{f"db/{name}.py": r"" for name in ("batch", "horizon", "wake")},
        "checks.py": r"",
    },
    "lazy_imports": {"apps.py": r"^\d+: ready: from jobqueue import checks$"},
    "sent_signals": {"signals.py": r""},
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule: str) -> None:
    broken = {}
    for name, source in MODULES.items():
        allowed = ALLOWED.get(rule, {}).get(name)
        found = [
            text for text in RULES[rule](source) if allowed is None or not re.search(allowed, text)
        ]
        if found:
            broken[name] = found
    assert broken == {}


def test_no_file_of_the_tests_is_too_long() -> None:
    counts = {path: path.read_text().count("\n") for path in Path(__file__).parent.rglob("*.py")}
    assert {str(path): count for path, count in counts.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule in ALLOWED for name in ALLOWED[rule]]
)
def test_every_exception_is_used(rule: str, name: str) -> None:
    assert [text for text in RULES[rule](MODULES[name]) if re.search(ALLOWED[rule][name], text)]


OFFENDERS = {
    "writes": [
        "Job.objects.filter(pk=1).update(state='waiting')",
        "db.Update(Job.objects.all(), {'state': 'waiting'})",
        "jobs = Job.objects.all()\njobs.filter(pk=1).delete()",
        "def f():\n    jobs = rows = Job.objects.all()\n    rows._raw_delete('default')",
        "def f(job):\n    job.save()",
        "async def f(job):\n    await job.asave(update_fields=['state'])",
        "def f(self, request, queryset):\n    queryset.update(state='waiting')",
        "Job.objects.bulk_update(jobs, ['state'])",
        "Job.objects.update_or_create(pk=1, defaults={})",
        "jobs = Job.objects.all()\njobs = jobs.filter(pk=1)\njobs.update(state='waiting')",
        "for job in Job.objects.all():\n    job.delete()",
        "Worker = 1\ndef f(Worker):\n    Worker.objects.update(state='dead')\nJob.objects.update()",
        "jobs = {}\ndef f(jobs):\n    jobs.update(state='waiting')",
        "work = lambda: self.jobs.update(state='waiting')",
        "cursor.execute('UPDATE \"jobqueue_job\" SET state = %s')",
        "cursor.execute('delete from jobqueue_job')",
        "SQL = f'UPDATE jobqueue_job SET {column} = 1'",
    ],
    "queries_as_ids": [
        "Job.objects.filter(pk__in=Job.objects.filter(state='waiting')).update(state='claimed')",
        "stale = Job.objects.filter(state='running')\nJob.objects.filter(id__in=stale)",
        "Job.objects.filter(pk__in=stale.values('pk')[:10])",
        "def f(ids):\n    Job.objects.filter(pk__in=ids)",
        "ids = sorted(x)\ndef f(ids):\n    Job.objects.filter(pk__in=ids)",
        "JobEvent.objects.filter(job_id__in=Subquery(jobs)).delete()",
    ],
    "settings_reads": ["settings.JOBQUEUE['LEASE']", "getattr(settings, 'JOBQUEUE', {})"],
    "vendor_knowledge": [
        "if connection.vendor == x: ...",
        "if engine == 'postgresql': ...",
        "def f():\n    '''MySQL.'''\n    return f'SQLite {1}'",
        "import psycopg",
        "from django.db.backends.mysql import base",
        "error.__cause__.sqlstate",
    ],
    "lazy_imports": [
        "def f():\n    import json",
        "class C:\n    async def f(self):\n        if x:\n            from jobqueue import db",
    ],
    "sent_signals": [
        "worker_in_trouble.send_robust(type(self), error=error)",
        "def f():\n    return partial(signal.asend_robust, Job)",
        "signals.job_transitioned.send(Job, job=job)",
    ],
    "missing_docstrings": [
        "x = 1",
        "'''A module.'''\ndef f(): ...",
        "'''A module.'''\nclass C:\n    x = 1",
        "'''A module.'''\nasync def f(): ...",
    ],
    "too_long": [
        "\n" * (MAX_LINES + 1),
        "def f():\n" + "    x = 1\n" * MAX_FUNCTION,
        "class C:\n    def f():\n        '''Do.\n\n        So.\n        '''\n"
        + "        x = 1\n" * MAX_FUNCTION,
    ],
}
INNOCENTS = {
    "writes": [
        "Worker.objects.alive().filter(pk=1).update(state='dead')",
        "def f():\n    alive = Worker.objects.alive()\n    retry(lambda: alive.update(x=1))",
        "gone = Worker.objects.exclude(state='alive')\ngone.filter(pk=1).delete()",
        "names = {*known}\nnames.update(more)",
        "JobEvent.objects.filter(job_id=1)._raw_delete('default')",
        "Job.objects.create(task='a.b')",
        "cursor.execute('DELETE FROM jobqueue_jobevent')",
    ],
    "queries_as_ids": [
        "Job.objects.filter(pk__in=sorted(ids)).update(state='waiting')",
        "locked = list(rows.values_list('pk', flat=True))\nJob.objects.filter(pk__in=locked)",
        "Job.objects.filter(pk__in=[1, 2])",
    ],
    "settings_reads": ["raise ValueError('JOBQUEUE[...] is wrong')", "settings.USE_TZ"],
    "vendor_knowledge": ["'''As on PostgreSQL.'''\nclass C:\n    '''MySQL.'''\nx = 1  # SQLite"],
    "lazy_imports": ["if TYPE_CHECKING:\n    from jobqueue.models import Job"],
    "sent_signals": ["link.send(buried=True)", "signals.send_after_commit(signal, Job, using)"],
    "missing_docstrings": ["", "'''A module.'''\ndef _f(): ...\nclass C:\n    '''A class.'''"],
    "too_long": ["def f():\n    '''Do.\n\n    So.\n    '''\n" + "    x = 1\n" * (MAX_FUNCTION - 1)],
}


def cases(sources: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(rule, source) for rule, listed in sources.items() for source in listed]


@pytest.mark.parametrize(("rule", "source"), cases(OFFENDERS))
def test_an_offender_is_found(rule: str, source: str) -> None:
    assert len(list(RULES[rule](source))) == 1


@pytest.mark.parametrize(("rule", "source"), cases(INNOCENTS))
def test_an_innocent_is_let_go(rule: str, source: str) -> None:
    assert list(RULES[rule](source)) == []


def test_every_rule_has_both() -> None:
    assert set(OFFENDERS) == set(INNOCENTS) == set(RULES)


def test_every_setting_is_documented() -> None:
    """Where it is declared: the reference of the docs is made from that."""
    text = inspect.getdoc(conf.Settings) or ""
    documented = re.findall(r"^ {4}([A-Z_]+): \w", text, re.MULTILINE)
    assert documented == list(conf.Settings.__dataclass_fields__)
