"""A pull for a client: in a thread, told line by line, and given up when the client leaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from localgen.hub import pull
from localgen.hub.pull import Plan
from localgen.hub.repository import RemoteFile

_PERIOD_S = 0.1
_SHA256_DIGITS = 64
# an object of the stream
Line = dict[str, str | int]
_Result = TypeVar("_Result")


class _Left(Exception):
    """Nobody waits for this pull any more."""


@dataclass(slots=True)
class _Transfer:
    """What thread and event loop tell each other. here: bytes of the whole that are here."""

    here: int = 0
    said: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    left: bool = False

    def count(self, here: int) -> None:
        """Bytes have come. _Left: they are no longer wanted."""
        if self.left:
            raise _Left
        self.here = here

    def say(self, line: str) -> None:
        """Something that a user should know."""
        self.said.put(line)

    def lines(self) -> Iterator[Line]:
        """What was said since the last call."""
        while not self.said.empty():
            yield {"status": self.said.get()}


async def pulled(name: str) -> AsyncGenerator[Line, None]:
    """Fetch a model. What the hub raises, before the first line where it can be known by then.

    Closing the generator stops it at its next bytes; what came stays, for the next pull.
    """
    transfer = _Transfer()
    plan = await _in_thread(lambda: pull.plan(name, transfer.say))
    yield {"status": "pulling manifest"}
    if plan.why:
        yield {"status": plan.why}
    told = -1
    if not plan.is_here:
        working = _in_thread(lambda: pull.execute(plan, transfer.count, transfer.say))
        try:
            while not (await asyncio.wait({working}, timeout=_PERIOD_S))[0]:
                here = transfer.here
                for line in (*transfer.lines(), *_progress(plan, told, here)):
                    yield line
                told = here
            working.result()
        finally:
            transfer.left = True
            working.cancel()
    for line in _progress(plan, told, plan.size_bytes):
        yield line
    yield {"status": "success"}


def _in_thread(work: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """The result of a thread of its own: a pull takes hours, and must not keep others from a pool
    of threads, nor the server from ending."""
    done: concurrent.futures.Future[_Result] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)


def _progress(plan: Plan, told: int, here: int) -> Iterator[Line]:
    """The files of which more is here than was told."""
    before = 0
    for file in plan.files:
        had, has = (min(max(of - before, -1), file.size_bytes) for of in (told, here))
        before += file.size_bytes
        if has > had and has >= 0:
            yield _line(file, has)


def _line(file: RemoteFile, here: int) -> Line:
    kind = "sha256" if len(file.digest) == _SHA256_DIGITS else "sha1"
    return {
        "status": f"pulling {file.digest[:12]}",
        "digest": f"{kind}:{file.digest}",
        "total": file.size_bytes,
        "completed": here,
    }
