"""``manage.py demo``: the queue at work while its workers are killed and frozen."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, connections

from example_project.crew import Crew, DemoError
from example_project.files import NOT_STANDARD, UnusableTree, find_files, standard_library
from example_project.report import Report, report_on
from example_project.scenario import Play, Run, worker_arguments
from jobqueue.exceptions import JobQueueError
from jobqueue.management.base import JobQueueCommand

tqdm: Any
try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

INTERRUPTED = 128 + signal.SIGINT


class Command(JobQueueCommand):
    """Checksum a tree by jobs, strike the workers, and check what the database then holds."""

    help = (
        "Checksum the files of a directory, one job per file, while one worker process is killed "
        "and another frozen past its lease; then prove that no file was lost and none recorded "
        "twice. Takes about half a minute, and creates the tables where they are missing."
    )

    # They ask the database, so they come when one that can't be reached is told of.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add ``--path``."""
        super().add_arguments(parser)
        self.add_json_argument(parser)
        parser.add_argument(
            "--path",
            type=Path,
            metavar="DIRECTORY",
            help="The tree to work on; default: the running interpreter's standard library.",
        )

    def handle(self, **options: Any) -> None:
        """Run the demo and print its report."""
        if not hasattr(signal, "SIGSTOP"):
            raise CommandError("The demo freezes a process, which needs a POSIX system.")
        using = self.database(options)
        try:
            with _interrupted_by_signals():
                report = self._run(using, options["path"])
        except (DemoError, JobQueueError, UnusableTree) as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            name = str(connections[using].settings_dict["NAME"])
            raise CommandError(f"Database {name!r} failed: {error}") from error
        except KeyboardInterrupt:
            raise CommandError(
                "Interrupted: the workers have been ended, and what was left called off.",
                returncode=INTERRUPTED,
            ) from None
        self._print(report, as_json=options["as_json"])

    def _run(self, using: str, path: Path | None) -> Report:
        files = self._find_files(path, using)
        connections[using].ensure_connection()
        self.check()
        call_command("migrate", database=using, interactive=False, verbosity=0)
        run = Run.enqueue(files, using)
        try:
            self._play(run)
            return report_on(run)
        except BaseException:
            # A connection that was interrupted can't be used again.
            connections[using].close()
            with suppress(DatabaseError):
                run.call_off()
            raise

    def _find_files(self, path: Path | None, using: str) -> list[Path]:
        if path is None:
            root = standard_library()
            files = find_files(root, skip_directories=NOT_STANDARD)
        else:
            root = path
            files = find_files(root, skip_files=_files_of_database(using))
        count = "1 file" if len(files) == 1 else f"{len(files):,} files"
        self._say(f"{count} below {root}, one job each.")
        return files

    def _play(self, run: Run) -> None:
        self._say(f"Queue {run.name} on {connections[run.using].display_name}.")
        with (
            self.progress(lambda: len(run.files)) as tick,
            tempfile.TemporaryDirectory(prefix="jobqueue-demo-") as logs,
            Crew(worker_arguments(run), Path(logs)) as crew,
        ):
            Play(run, crew, _Narrator(self._say, tick)).perform()

    def _print(self, report: Report, *, as_json: bool) -> None:
        if as_json:
            self.print_report(report.as_dict(), as_json=True)
        else:
            self.stdout.write(report.as_table())
        if report.verdict.problems:
            problems = "\n".join(f"- {problem}" for problem in report.verdict.problems)
            raise CommandError(f"The demo did not hold what it promises:\n{problems}")
        self._say("Every file's checksum was computed again, is right, and was recorded once.")

    def _say(self, line: str) -> None:
        self.stderr.write(line, style_func=str)


class _Narrator:
    """Tells on stderr, past the progress bar if there is one."""

    def __init__(self, write: Callable[[str], None], tick: Callable[[int], object] | None) -> None:
        self._write = write
        self._tick = tick
        self._done = 0

    def say(self, line: str) -> None:
        """Tell what has just happened."""
        if self._tick is None:
            self._write(line)
        else:
            tqdm.write(line, file=sys.stderr)

    def show(self, done: int) -> None:
        """Show how many jobs have ended."""
        if self._tick is not None:
            self._tick(done - self._done)
            self._done = done


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does: clean up."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _files_of_database(using: str) -> list[Path]:
    """Return the files that change while the demo runs, should they lie in its tree."""
    if connections[using].vendor != "sqlite":
        return []
    name = Path(connections[using].settings_dict["NAME"]).absolute()
    return [name.with_name(name.name + suffix) for suffix in ("", "-journal", "-shm", "-wal")]
