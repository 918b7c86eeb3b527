"""The admin: every job can be seen, nothing can be edited, and a release is fenced."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from jobqueue import db, transitions
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.querysets import PAYLOAD_COLUMNS
from jobqueue.testing.factories import (
    JobEventFactory,
    JobFactory,
    QueueFactory,
    WorkerFactory,
)
from tests.asserting import stored
from tests.servers import missing_engines

JOBS = "admin:jobqueue_job_changelist"
XSS = "<script>alert('x')</script>"
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;"


@pytest.fixture
def client(alias: str) -> Client:
    """A superuser at the admin."""
    client = Client()
    client.force_login(User.objects.create_superuser("ann"))
    return client


def somebody(*permissions: str) -> Client:
    """Return the client of a member of staff with these permissions only."""
    user = User.objects.create_user("bob", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def page(client: Client, name: str = JOBS, *args: Any, **query: Any) -> str:
    response = client.get(reverse(name, args=args), query)
    assert response.status_code == 200
    return str(response.content.decode())


def listed(client: Client, **query: Any) -> list[int]:
    ids = re.findall(r'name="_selected_action" value="(\d+)"', page(client, **query))
    return [int(pk) for pk in ids]


def versions(html: str) -> dict[str, str]:
    """Return the hidden fields by which the page carries the versions that it shows."""
    return dict(re.findall(r'name="(_version_\d+)" value="(\d+)"', html))


def release(client: Client, *jobs: Job, seen: dict[str, str], query: str = "") -> list[str]:
    """Post the action as the page's form would; return what the next page tells."""
    form = {"action": "release", "index": "0", "select_across": "0"}
    form |= {"_selected_action": [str(job.pk) for job in jobs], **seen}  # type: ignore[dict-item]
    response = client.post(reverse(JOBS) + query, form, follow=True)
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


# -- what can be seen


def test_the_list_shows_the_newest_first(client: Client) -> None:
    old = JobFactory()
    new = JobFactory(running=True, queue="mail")
    assert listed(client) == [new.pk, old.pk]
    for text in (new.task, "mail", new.claimed_by, "Running"):
        assert text in page(client)


def test_the_list_can_be_filtered(client: Client) -> None:
    mail = JobFactory(queue="mail")
    done = JobFactory(completed=True)
    assert listed(client, state__exact="completed") == [done.pk]
    assert listed(client, queue="mail") == [mail.pk]
    assert listed(client, queue="mail", state__exact="completed") == []


def test_the_queues_to_choose_from_are_those_that_are_known_of(client: Client, alias: str) -> None:
    """bensheldon/good_job#1532: found without a DISTINCT over millions of jobs."""

    def offered(**query: str) -> list[str]:
        return sorted(set(re.findall(r'href="\?queue=(\w+)"', page(client, **query))))

    QueueFactory(name="configured")
    WorkerFactory(queues=["served"])
    WorkerFactory(queues=["forsaken"], dead=True)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert offered(queue="chosen") == ["chosen", "configured", "default", "served"]
    assert not [query for query in queries if "DISTINCT" in query["sql"]]
    with override_settings(JOBQUEUE={"QUEUES": ["listed"]}):
        assert offered() == ["configured", "listed", "served"]


def test_a_job_is_found_by_its_id_key_task_or_worker(client: Client) -> None:
    job = JobFactory(running=True, unique_key="key 1", claimed_by="host:1:ab", task="a.b")
    other = JobFactory(unique_key=f"{job.pk}")
    JobFactory(unique_key="Key 12")
    for term in ("key 1", "a.b", "host:1:ab", " a.b "):
        assert listed(client, q=term) == [job.pk]
    assert listed(client, q=str(job.pk)) == [other.pk, job.pk]
    for term in ("key", "a", "9" * 30, "²", "%"):
        assert listed(client, q=term) == []


def test_the_search_uses_the_indexes(client: Client, alias: str) -> None:
    """bensheldon/good_job#1532: no cast and no folding of case, which would read every job."""
    with CaptureQueriesContext(connections[alias]) as queries:
        listed(client, q="17")
    searches = [query["sql"] for query in queries if "unique_key" in query["sql"]]
    assert searches
    for sql in searches:
        _, _, where = sql.partition("WHERE")
        assert not re.search(r"UPPER|LIKE|CAST|::text", where)


def test_the_list_leaves_large_columns_and_asks_a_constant_number_of_queries(
    client: Client, alias: str
) -> None:
    """CERNDocumentServer/cds-rdm#904: a row's arguments may be a megabyte."""
    counts = []
    for number in (2, 30):
        JobFactory.create_batch(number, running=True)
        with CaptureQueriesContext(connections[alias]) as queries:
            listed(client)
        counts.append(len(queries))
    assert counts[0] == counts[1]
    selects = [query["sql"] for query in queries if "jobqueue_job" in query["sql"]]
    for sql in selects:
        chosen, _, _ = sql.partition("FROM")
        assert not [name for name in PAYLOAD_COLUMNS if name in chosen]


def test_the_list_does_not_count_all_jobs_when_it_is_filtered(client: Client, alias: str) -> None:
    """bensheldon/good_job#1532: "of 3,000,000" costs a second and helps nobody."""
    with CaptureQueriesContext(connections[alias]) as queries:
        page(client, state__exact="running")
    counts = [query["sql"] for query in queries if "COUNT(*)" in query["sql"].upper()]
    assert counts
    assert all("WHERE" in sql for sql in counts)


def test_the_detail_page_tells_a_job_s_history(client: Client) -> None:
    job = JobFactory(running=True, args=["argument"], kwargs={"a": "keyword"}, metadata={"m": 1})
    JobEventFactory(job=job, message="first error", detail={"traceback": "line 17"})
    JobEventFactory(job=job, message="second error")
    html = page(client, "admin:jobqueue_job_change", job.pk)
    for text in ("argument", "keyword", "line 17", job.claimed_by):
        assert text in html
    assert 0 < html.index("first error") < html.index("second error")
    _, _, form = html.partition('id="job_form"')
    fields = re.findall(r'<(?:input|textarea|select)[^>]* name="([\w-]+)"', form)
    assert {name for name in fields if not name.startswith("events-")} == {"csrfmiddlewaretoken"}


def test_workers_are_listed(client: Client) -> None:
    WorkerFactory(id="host:1:ab", queues=["mail"])
    WorkerFactory(id="host:2:cd", dead=True)
    html = page(client, "admin:jobqueue_worker_changelist")
    assert "host:1:ab" in html
    assert "host:2:cd" in html
    html = page(client, "admin:jobqueue_worker_changelist", state__exact="dead")
    assert "host:1:ab" not in html
    assert "mail" in page(client, "admin:jobqueue_worker_change", "host:1:ab")


def test_nothing_that_a_job_brings_is_taken_for_html(client: Client) -> None:
    """Parallels/rq-dashboard#526: arguments, errors, notes, and the names of everything."""
    job = JobFactory(
        running=True,
        task=XSS,
        queue=XSS,
        args=[XSS],
        kwargs={XSS: XSS},
        metadata={"m": XSS},
        checkpoint=XSS,
        progress_note=XSS,
        workspace=XSS,
        unique_key=XSS,
        claimed_by=XSS,
    )
    JobEventFactory(job=job, message=XSS, actor=XSS, detail={"traceback": XSS})
    WorkerFactory(id=XSS, queues=[XSS])
    for html in (
        page(client),
        page(client, queue=XSS, q=XSS),
        page(client, "admin:jobqueue_job_change", job.pk),
        page(client, "admin:jobqueue_worker_changelist"),
    ):
        assert XSS not in html
        assert "<script>alert" not in html
        assert ESCAPED in html


# -- who may do what

URLS = [
    ("admin:jobqueue_job_add", False),
    ("admin:jobqueue_job_delete", True),
    ("admin:jobqueue_job_change", True),
    ("admin:jobqueue_worker_add", False),
    ("admin:jobqueue_worker_delete", True),
    ("admin:jobqueue_worker_change", True),
]


@pytest.mark.parametrize(("name", "of_a_row"), URLS)
def test_nothing_is_added_changed_or_deleted_by_a_form(
    client: Client, name: str, of_a_row: bool
) -> None:
    """Not even by a superuser: a form saves what it read long ago."""
    job, worker = JobFactory(running=True), WorkerFactory()
    row = {"job": job, "worker": worker}[name.split("_")[1]]
    url = reverse(name, args=[row.pk] if of_a_row else [])
    before = (stored(job), Worker.objects.values().get())

    for form in ({}, {"post": "yes"}, {"state": "completed", "id": "x", "_save": "Save"}):
        assert client.post(url, form).status_code == 403
    if not name.endswith("change"):
        assert client.get(url).status_code == 403

    assert (stored(job), Worker.objects.values().get()) == before
    assert Job.objects.count() == 1


def test_the_only_action_is_release(client: Client) -> None:
    job = JobFactory(completed=True)
    html = page(client)
    assert re.findall(r'<option value="(\w+)"', html) == ["release"]
    form = {"action": "delete_selected", "_selected_action": [job.pk], "post": "yes", "index": 0}
    assert client.post(reverse(JOBS), form).status_code == 403
    assert Job.objects.exists()


def test_who_may_only_look_can_t_release(alias: str) -> None:
    """quartznet/quartznet#3678: the action is refused, not merely left out of the page."""
    job = JobFactory(claimed=True)
    before = stored(job)
    client = somebody("view_job", "view_jobevent")

    html = page(client)
    assert job.task in html
    assert "release" not in html
    form = {"action": "release", "_selected_action": [job.pk], "index": 0, f"_version_{job.pk}": 1}
    assert client.post(reverse(JOBS), form).status_code == 403
    assert stored(job) == before
    assert not job.events.exists()


def test_who_may_change_jobs_can_release(alias: str) -> None:
    job = JobFactory(claimed=True)
    client = somebody("change_job")
    assert release(client, job, seen=versions(page(client))) == ["1 job was released."]


def test_who_may_do_nothing_sees_nothing(alias: str) -> None:
    job = JobFactory()
    client = somebody("view_worker")
    for url in (reverse(JOBS), reverse("admin:jobqueue_job_change", args=[job.pk])):
        assert client.get(url).status_code == 403
    form = {"action": "release", "_selected_action": [job.pk], "index": 0}
    assert client.post(reverse(JOBS), form).status_code == 403


def test_a_post_from_elsewhere_is_refused(client: Client) -> None:
    job = JobFactory(claimed=True)
    client.handler.enforce_csrf_checks = True
    form = {"action": "release", "_selected_action": [job.pk], "index": 0}
    assert client.post(reverse(JOBS), form).status_code == 403
    assert stored(job)["state"] == "claimed"


# -- release


def test_claimed_and_stale_running_jobs_are_released(client: Client, alias: str) -> None:
    claimed = JobFactory(claimed=True)
    orphan = JobFactory(running=True)
    WorkerFactory(id="alive")
    overdue = JobFactory(
        running=True,
        claimed_by="alive",
        timeout=timedelta(seconds=1),
        attempted_at=db.now(alias) - timedelta(hours=1),
    )

    told = release(client, claimed, orphan, overdue, seen=versions(page(client)))

    assert told == ["3 jobs were released."]
    for job in (claimed, orphan, overdue):
        row = Job.objects.get(pk=job.pk)
        assert (row.state, row.claimed_by) == ("waiting", None)
        event = row.events.get()
        assert (event.kind, event.actor) == (EventKind.RELEASED, "admin ann")
        assert event.message == "released in the admin"


def test_a_job_that_runs_on_a_worker_that_lives_is_left_alone(client: Client) -> None:
    WorkerFactory(id="alive")
    jobs = JobFactory.create_batch(2, running=True, claimed_by="alive")
    before = [stored(job) for job in jobs]

    told = release(client, *jobs, seen=versions(page(client)))

    assert told == ["2 jobs are running on workers that live, and were left alone."]
    assert [stored(job) for job in jobs] == before


@pytest.mark.parametrize("state", ["scheduled", "waiting", "completed", "failed", "cancelled"])
def test_a_job_that_nobody_holds_is_left_alone(client: Client, state: str) -> None:
    job = JobFactory(**({} if state == "waiting" else {state: True}))
    before = stored(job)
    told = release(client, job, seen=versions(page(client)))
    assert told == ["1 job had moved on and was left alone."]
    assert stored(job) == before


def test_a_stale_page_releases_nothing_that_moved_on(client: Client) -> None:
    """statianzo/que-web#28: between the page and the click, one finished and one was re-claimed."""
    finished, reclaimed, deleted, still = JobFactory.create_batch(4, running=True)
    seen = versions(page(client))
    transitions.complete(finished, "done")
    again = transitions.release(reclaimed)
    transitions.claim(
        [again.pk], "default", "other", db.now(again._state.db), start=True, using=again._state.db
    )
    Job.objects.filter(pk=deleted.pk).delete()
    before = [stored(finished), stored(reclaimed)]

    told = release(client, finished, reclaimed, deleted, still, seen=seen)

    assert told == ["1 job was released.", "3 jobs had moved on and were left alone."]
    assert [stored(finished), stored(reclaimed)] == before
    assert stored(still)["state"] == "waiting"


def test_a_job_that_left_the_page_s_filter_is_told_of(client: Client) -> None:
    job = JobFactory(running=True)
    query = "?state__exact=running"
    seen = versions(page(client, state__exact="running"))
    transitions.complete(job)
    assert release(client, job, seen=seen, query=query) == [
        "1 job had moved on and was left alone."
    ]


def test_all_jobs_of_all_pages_can_be_released(client: Client) -> None:
    """The versions of those on other pages are unknown; these go by what is found."""
    jobs = JobFactory.create_batch(55, claimed=True)
    seen = versions(page(client))
    assert len(seen) == 50

    told = release(client, *jobs[5:], seen=seen | {"select_across": "1"})

    assert told == ["55 jobs were released."]
    assert not Job.objects.exclude(state="waiting").exists()


@pytest.mark.parametrize("version", ["", "x", "²", "9" * 5000, "-1"])
def test_a_version_that_is_nonsense_is_no_version(client: Client, version: str) -> None:
    job = JobFactory(claimed=True)
    told = release(client, job, seen={f"_version_{job.pk}": version})
    assert told == ["1 job was released."]


class ReplicaRouter:
    """Reads from a replica, writes jobs to the primary."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        return "default"

    def db_for_write(self, model: type, **hints: Any) -> str:
        return "postgresql" if model in (Job, JobEvent) else "default"

    def allow_relation(self, *args: Any, **hints: Any) -> bool:
        return True


@pytest.mark.skipif("postgresql" in missing_engines(), reason="it takes two databases")
@pytest.mark.django_db(transaction=True, databases=["default", "postgresql"])
@override_settings(DATABASE_ROUTERS=[ReplicaRouter()])
def test_a_release_goes_to_where_jobs_are_written() -> None:
    """Not to the replica that the list was read from."""
    replica, primary = (
        JobFactory(using=using, id=7, claimed=True) for using in ("default", "postgresql")
    )
    client = Client()
    client.force_login(User.objects.create_superuser("ann"))

    assert release(client, replica, seen=versions(page(client))) == ["1 job was released."]

    assert Job.objects.using("postgresql").get(pk=primary.pk).state == "waiting"
    assert Job.objects.using("default").get(pk=replica.pk).state == "claimed"
