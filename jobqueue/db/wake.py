"""Wake-up: a word to sleeping workers once something is committed. PostgreSQL's LISTEN/NOTIFY.

It is a hint and never more: whoever misses one finds the work at the next poll.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import cache
from typing import Any, Final

from django.db import connections

from jobqueue import conf
from jobqueue.db.trouble import waits

CHANNEL: Final = "jobqueue"
# A transaction that notifies keeps others from sharing an fsync with it, so of many equal words in
# so short a time, in seconds, only the first is sent. Who hears it looks once more afterwards.
COALESCE: Final = 0.02
# How many words are remembered for that: those of cancel requests never come again.
REMEMBERED: Final = 1000
# How often to ask whether a silent connection still lives, and the limits of the kernel's patience
# with one of whose other end nothing is heard: libpq's options, in (milli)seconds.
CHECK_EVERY: Final = 15.0
# And for how long to wait for the answer: something between may be there and pass nothing on.
ANSWER_PATIENCE: Final = 5.0
PATIENCE: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "connect_timeout": 5,
}
# How long a listener may take to end: it is at nothing that could be lost.
STOP_PATIENCE: Final = 2.0
FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 30.0

_last_sent: Final[dict[tuple[str, str], float]] = {}


@cache
def can_wake(using: str) -> bool:
    """Say whether this database can tell workers of new work."""
    return connections[using].vendor == "postgresql"


def wake_after_commit(using: str, words: Iterable[str]) -> None:
    """Tell whoever listens each of ``words``, once the current transaction is committed.

    A trouble at that is logged and goes no further: the work itself is committed.
    """
    if not (conf.get().NOTIFY and can_wake(using)):
        return
    connection = connections[using]
    said = set(words)
    if not said:
        return
    # Who commits by hand has no hook for it, and this is a hint, not worth an error.
    if connection.in_atomic_block or (connection.autocommit and _due(using, said)):
        connection.on_commit(lambda: _wake(using, said), robust=True)


def _due(using: str, words: Iterable[str]) -> list[str]:
    """Return those of ``words`` that weren't sent just now."""
    now = time.monotonic()
    return [word for word in words if now - _last_sent.get((using, word), -1.0) >= COALESCE]


def _wake(using: str, words: Iterable[str]) -> None:
    due = sorted(_due(using, words))
    if not due:
        return
    if len(_last_sent) > REMEMBERED:
        _last_sent.clear()
    _last_sent.update(dict.fromkeys([(using, word) for word in due], time.monotonic()))
    with connections[using].cursor() as cursor:
        # Nobody waits for the disk: a transaction that writes nothing else isn't flushed.
        values = ", ".join(["(%s)"] * len(due))
        cursor.execute(
            f"SELECT pg_notify(%s, word) FROM (VALUES {values}) AS said (word)", [CHANNEL, *due]
        )


class Listener:
    """Hears words on a connection and in a thread of its own; opens another if it breaks.

    Args:
        using: database alias.
        ready: called when it begins to listen, the first time and after each break: what was said
            before went unheard. In the listener's thread, as the others; none may raise.
        hear: called with each word.
        trouble: called with the error when the connection broke or can't be opened.
    """

    def __init__(
        self,
        using: str,
        *,
        ready: Callable[[], None],
        hear: Callable[[str], None],
        trouble: Callable[[Exception], None],
    ) -> None:
        self._using = using
        self._ready = ready
        self._hear = hear
        self._trouble = trouble
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="jobqueue-listener", daemon=True)
        self._ended = False

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended = True
        self._ours.send(b"x")
        self._thread.join(STOP_PATIENCE)
        self._ours.close()

    def _run(self) -> None:
        pauses = waits(FIRST_WAIT, LONGEST_WAIT)
        with closing(self._theirs):
            while not self._ended:
                try:
                    with closing(self._connect()) as connection:
                        pauses = waits(FIRST_WAIT, LONGEST_WAIT)
                        self._ready()
                        self._listen(connection)
                except Exception as error:
                    self._trouble(error)
                    self._sleep(next(pauses))

    def _connect(self) -> Any:
        wrapper = connections[self._using].copy()
        options = wrapper.settings_dict["OPTIONS"]
        # Not one of a pool's, which others would miss for as long as this lives.
        options.pop("pool", None)
        params = {**PATIENCE, **wrapper.get_connection_params()}
        connection = wrapper.get_new_connection(params)
        try:
            connection.autocommit = True
            connection.execute(f"LISTEN {CHANNEL}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _listen(self, connection: Any) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._theirs, selectors.EVENT_READ)
            while not self._ended:
                if not selector.select(CHECK_EVERY):
                    self._ask(connection.pgconn, selector)
                for notice in connection.notifies(timeout=0):
                    self._hear(notice.payload)

    def _ask(self, connection: Any, selector: selectors.BaseSelector) -> None:
        """Make sure that the server still answers; ``connection`` is libpq's, which can wait."""
        answer_by = time.monotonic() + ANSWER_PATIENCE
        connection.send_query(b"SELECT 1")
        while connection.is_busy() and not self._ended:
            if not selector.select(max(answer_by - time.monotonic(), 0)):
                raise TimeoutError(f"no answer within {ANSWER_PATIENCE:g} s")
            connection.consume_input()
        while not self._ended and connection.get_result():
            pass

    def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            self._theirs.settimeout(seconds)
            self._theirs.recv(1)
