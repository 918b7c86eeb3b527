"""The admin's pages, as people and their browsers use them."""

from __future__ import annotations

import re
from typing import Any

from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from jobqueue.models import Job

JOBS = "admin:jobqueue_job_changelist"


def superuser() -> Client:
    """Return the client of somebody who may do everything."""
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
    """Return a page, the list of jobs unless another is named."""
    response = client.get(reverse(name, args=args), query)
    assert response.status_code == 200
    return str(response.content.decode())


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
