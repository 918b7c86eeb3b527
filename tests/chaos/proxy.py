"""A TCP proxy before a server's Unix socket: it cuts, stalls, and loses the replies to COMMITs."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

CHUNK = 65536
COMMIT = b"COMMIT"


class Proxy:
    """Runs in a thread of its own, on a free port of the loopback address.

    Attributes:
        replies_lost: COMMITs that the server was given and answered, and whose client was cut off
            before it heard so.
        cuts: connections that were cut.
    """

    def __init__(self, target: Path) -> None:
        self._target = str(target)
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._links: set[_Link] = set()
        self._armed = 0
        self.replies_lost = 0
        self.cuts = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(asyncio.start_server(self._serve, sock=self._socket))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._socket.close()

    # -- What is done to it, from any thread

    def lose_replies(self, count: int) -> None:
        """Lose the replies to the next COMMITs."""
        self._call(self._arm, count)

    def cut(self, share: float, seed: int) -> None:
        """Cut a share of all connections, one at least."""
        self._call(self._cut, share, seed)

    def stall(self) -> None:
        """Deliver nothing any more, either way, until ``flow``: all connections are half open."""
        self._call(self._flowing.clear)

    def flow(self) -> None:
        """Deliver again; what had been sent meanwhile comes first."""
        self._call(self._flowing.set)

    def disarm(self) -> None:
        """Do nothing more to anybody."""
        self._call(self._arm, 0)
        self.flow()

    # -- In its own thread

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _call(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    def _arm(self, count: int) -> None:
        self._armed = count

    def _cut(self, share: float, seed: int) -> None:
        links = sorted(self._links, key=lambda link: link.number)
        if links:
            for link in random.Random(seed).sample(links, max(1, int(share * len(links)))):
                self.cuts += 1
                link.cut()

    async def _end(self) -> None:
        for link in list(self._links):
            link.cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            above = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(self, (reader, writer), above)
        self._links.add(link)
        try:
            with suppress(OSError):
                await asyncio.gather(link.ask(), link.answer())
        finally:
            link.cut()
            self._links.discard(link)

    async def may_flow(self) -> None:
        """Return once nothing is stalled."""
        await self._flowing.wait()

    def takes_reply_of(self, data: bytes) -> bool:
        """Say whether this COMMIT is one of those whose reply is to be lost."""
        if not self._armed or COMMIT not in data:
            return False
        self._armed -= 1
        return True


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One client's connection and the one that stands for it at the server."""

    _count = 0

    def __init__(self, proxy: Proxy, below: Stream, above: Stream) -> None:
        _Link._count += 1
        self.number = _Link._count
        self._proxy = proxy
        self._reader, self._writer = below
        self._server_reader, self._server_writer = above
        self._loses_reply = False

    async def ask(self) -> None:
        """Carry what the client sends."""
        while data := await self._reader.read(CHUNK):
            await self._proxy.may_flow()
            self._loses_reply = self._loses_reply or self._proxy.takes_reply_of(data)
            self._server_writer.write(data)
            await self._server_writer.drain()
        self.cut()

    async def answer(self) -> None:
        """Carry what the server sends; once it has answered a chosen COMMIT, cut instead."""
        while data := await self._server_reader.read(CHUNK):
            if self._loses_reply:
                self._proxy.replies_lost += 1
                break
            await self._proxy.may_flow()
            self._writer.write(data)
            await self._writer.drain()
        self.cut()

    def cut(self) -> None:
        """Close both sides at once; what is under way is lost."""
        self._writer.transport.abort()
        self._server_writer.transport.abort()
