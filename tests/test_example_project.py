"""The example project: its handler, the walk over a tree, its settings and its admin."""

from __future__ import annotations

import hashlib
import http.cookiejar
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from example_project.files import (
    CHUNK,
    NOT_STANDARD,
    UnusableTree,
    checksum,
    find_files,
    recompute,
    standard_library,
)
from tests.asserting import exactly
from tests.helpers import child_environment, wait_until

MANAGE = str(Path(__file__).resolve().parent.parent / "manage.py")
NOBODY = 65534


def manage(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the example project."""
    environment = child_environment(DJANGO_SETTINGS_MODULE="example_project.settings", **variables)
    command = [sys.executable, MANAGE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# -- The handler


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", 0),
        (b"one", 0),
        (b"one\ntwo\n", 2),
        (b"one\r\n\r\ntwo\rthree", 2),
        (b"\x00\n" * CHUNK + b"more than a chunk", CHUNK),
    ],
    ids=["empty", "no line end", "two lines", "other line ends", "several chunks"],
)
@pytest.mark.parametrize("find_out", [checksum, recompute])
def test_checksum_and_counts(tmp_path, find_out, content, lines):
    """The handler and the check on it find the same, each in its own way."""
    file = tmp_path / "file"
    file.write_bytes(content)
    assert find_out(str(file)) == {
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "lines": lines,
    }


def test_pace_makes_the_job_last(tmp_path):
    file = tmp_path / "file"
    file.touch()
    began = time.monotonic()
    checksum(str(file), pace=0.05)
    assert time.monotonic() - began >= 0.05


def test_file_that_is_gone_fails_the_job_and_has_no_truth(tmp_path):
    gone = str(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        checksum(gone)
    assert recompute(gone) == {"error": f"[Errno 2] No such file or directory: {gone!r}"}


# -- The walk


def test_every_regular_file_is_found_once_in_order(tmp_path):
    """Links would lead out of the tree or round in it, and reading a pipe would never end."""
    for name in ("b", "a/z", "a/.hidden", "c/d/e"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link to file").symlink_to(tmp_path / "b")
    (tmp_path / "link to directory").symlink_to(tmp_path / "a")
    (tmp_path / "link to nothing").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    found = [str(file.relative_to(tmp_path)) for file in find_files(tmp_path)]
    assert found == ["a/.hidden", "a/z", "b", "c/d/e"]


def test_skipped_directories_and_files_are_not_found(tmp_path):
    for name in ("kept/file", "kept/site-packages/file", "__pycache__/file", "queue.sqlite3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_files(
        tmp_path, skip_directories=NOT_STANDARD, skip_files=[tmp_path / "queue.sqlite3"]
    )
    assert found == [tmp_path / "kept/file"]


def test_relative_path_is_made_absolute(tmp_path, monkeypatch):
    """The workers need not run in the same directory."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert find_files(Path()) == [tmp_path / "file"]


def test_standard_library_is_a_real_tree():
    files = find_files(standard_library(), skip_directories=NOT_STANDARD)
    assert standard_library() / "os.py" in files
    assert len(files) > 500
    assert not [file for file in files if NOT_STANDARD & set(file.parts)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "There is no directory '{}'."),
        ("file", "'{}' is not a directory."),
        ("empty", "There are no files below '{}'."),
    ],
)
def test_tree_that_has_no_files_is_refused(tmp_path, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "empty" / "also empty").mkdir(parents=True)
    with pytest.raises(UnusableTree, match=exactly(message.format(tmp_path / name))):
        find_files(tmp_path / name)


def test_name_that_is_not_text_is_refused(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(os.fsdecode(name)).touch()
    with pytest.raises(
        UnusableTree,
        match=exactly(f"The name of {name!r} is not Unicode text, and no job can carry it."),
    ):
        find_files(tmp_path)


@pytest.mark.parametrize(
    ("create", "start"),
    [(Path.touch, "tree"), (Path.mkdir, "tree"), (Path.mkdir, "tree/locked")],
    ids=["file", "directory", "the tree itself"],
)
def test_what_cannot_be_read_is_refused_by_name(open_directory, create, start):
    locked = open_directory / "tree" / "locked"
    locked.parent.mkdir()
    (locked.parent / "file").touch()
    create(locked)
    locked.chmod(0)
    message = exactly(f"'{locked}' can't be read: Permission denied.")
    with as_ordinary_account(), pytest.raises(UnusableTree, match=message):
        find_files(open_directory / start)
    locked.chmod(0o700)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every account may enter, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory(prefix="jobqueue-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def as_ordinary_account() -> Iterator[None]:
    """Give up root's right to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# -- The site


def test_project_passes_every_check_without_a_warning(tmp_path):
    """SQLite as the project sets it up meets none of the queue's own warnings."""
    url = f"sqlite:///{tmp_path}/db.sqlite3"
    done = manage("check", "--fail-level", "WARNING", "--database", "default", DATABASE_URL=url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "System check identified no issues (0 silenced).\n"


@pytest.mark.parametrize("command", ["demo", "run_worker", "migrate"])
def test_malformed_database_url_stops_every_command(command):
    done = manage(command, DATABASE_URL="postgres://me:s3cret@db.example:port/queue")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "django.core.exceptions.ImproperlyConfigured: DATABASE_URL is malformed: "
        "'postgres://me:***@db.example:port/queue': "
        "check the port, and percent-encode special characters in user and password."
    )
    assert "s3cret" not in done.stderr + done.stdout


def test_admin_shows_the_jobs(tmp_path):
    """``runserver`` serves the admin, and a person who logs in sees a job."""
    variables = {"DATABASE_URL": f"sqlite:///{tmp_path}/db.sqlite3"}
    superuser = {
        "DJANGO_SUPERUSER_USERNAME": "me",
        "DJANGO_SUPERUSER_PASSWORD": "pass",
        "DJANGO_SUPERUSER_EMAIL": "me@example.org",
    }
    assert manage("migrate", "-v0", **variables).returncode == 0
    assert manage("createsuperuser", "--noinput", **variables, **superuser).returncode == 0
    job = "from jobqueue.enqueue import enqueue; enqueue('example_project.files.checksum', ['/x'])"
    assert manage("shell", "-c", job, **variables).returncode == 0
    with serving(**variables) as browser:
        page = browser.get("/")
        assert "Log in | Django site admin" in page
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)[1]
        fields = {"username": "me", "password": "pass", "csrfmiddlewaretoken": token}
        assert "Job queue" in browser.post("/admin/login/?next=/admin/", fields)
        assert "example_project.files.checksum" in browser.get("/admin/jobqueue/job/")
        assert "example_project.files.checksum" in browser.get("/admin/jobqueue/job/1/change/")
        assert "0 workers" in browser.get("/admin/jobqueue/worker/")
        assert "--primary:" in browser.get("/static/admin/css/base.css")


class Browser:
    """Fetches pages of one site and keeps its cookies."""

    def __init__(self, site: str) -> None:
        self._site = site
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)

    def get(self, path: str) -> str:
        return self._fetch(path, None)

    def post(self, path: str, fields: dict[str, str]) -> str:
        return self._fetch(path, urllib.parse.urlencode(fields).encode())

    def _fetch(self, path: str, data: bytes | None) -> str:
        with self._opener.open(self._site + path, data, timeout=20) as response:
            return response.read().decode()


@contextmanager
def serving(**variables: str) -> Iterator[Browser]:
    """Run ``runserver`` until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = child_environment(DJANGO_SETTINGS_MODULE="example_project.settings", **variables)
    command = [sys.executable, MANAGE, "runserver", "--noreload", address]
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: answers(address) or server.poll() is not None, "no server")
        assert server.poll() is None, server.stderr.read().decode()
        yield Browser(f"http://{address}")
    finally:
        server.kill()
        server.communicate()


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0
