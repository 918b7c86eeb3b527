"""The admin: every job can be seen, nothing can be edited, and a release is fenced."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connections
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from jobqueue.models import Job, Worker
from jobqueue.querysets import PAYLOAD_COLUMNS
from jobqueue.testing.factories import (
    JobEventFactory,
    JobFactory,
    QueueFactory,
    WorkerFactory,
)
from tests.asserting import stored
from tests.site import JOBS, page, release, somebody, superuser, versions

XSS = "<script>alert('x')</script>"
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;"


@pytest.fixture
def client(alias: str) -> Client:
    return superuser()


def listed(client: Client, **query: Any) -> list[int]:
    ids = re.findall(r'name="_selected_action" value="(\d+)"', page(client, **query))
    return [int(pk) for pk in ids]


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


def test_the_detail_page_asks_no_query_per_event(client: Client, alias: str) -> None:
    job, counts = JobFactory(running=True), []
    page(client, "admin:jobqueue_job_change", job.pk)  # content types are known from now on
    for number in (1, 20):
        JobEventFactory.create_batch(number, job=job)
        with CaptureQueriesContext(connections[alias]) as queries:
            page(client, "admin:jobqueue_job_change", job.pk)
        counts.append(len(queries))
    assert counts[0] == counts[1]


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
