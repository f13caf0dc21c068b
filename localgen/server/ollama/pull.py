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
from localgen.hub.pull import PullPlan
from localgen.hub.repository import RemoteFile

_PERIOD_S = 0.1
_SHA256_DIGITS = 64
# an object of the stream
PullEvent = dict[str, str | int]
_Result = TypeVar("_Result")


class _ClientDisconnected(Exception):
    """Nobody waits for this pull any more."""


@dataclass(slots=True)
class _PullProgress:
    """What thread and event loop tell each other. downloaded_bytes: bytes of the whole that are
    here."""

    downloaded_bytes: int = 0
    messages: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False

    def report_bytes(self, downloaded_bytes: int) -> None:
        """Bytes have come. _ClientDisconnected: they are no longer wanted."""
        if self.cancelled:
            raise _ClientDisconnected
        self.downloaded_bytes = downloaded_bytes

    def notify(self, message: str) -> None:
        """Something that a user should know."""
        self.messages.put(message)

    def drain_messages(self) -> Iterator[PullEvent]:
        """What was said since the last call."""
        while not self.messages.empty():
            yield {"status": self.messages.get()}


async def stream_pull(name: str) -> AsyncGenerator[PullEvent, None]:
    """Fetch a model. What the hub raises, before the first line where it can be known by then.

    Closing the generator stops it at its next bytes; what came stays, for the next pull.
    """
    transfer = _PullProgress()
    plan = await _run_in_thread(lambda: pull.plan_pull(name, transfer.notify))
    yield {"status": "pulling manifest"}
    if plan.quant_reason:
        yield {"status": plan.quant_reason}
    told = -1
    if not plan.is_cached:
        working = _run_in_thread(
            lambda: pull.run_pull(plan, transfer.report_bytes, transfer.notify)
        )
        try:
            while not (await asyncio.wait({working}, timeout=_PERIOD_S))[0]:
                here = transfer.downloaded_bytes
                for line in (*transfer.drain_messages(), *_progress_events(plan, told, here)):
                    yield line
                told = here
            working.result()
        finally:
            transfer.cancelled = True
            working.cancel()
    for line in _progress_events(plan, told, plan.size_bytes):
        yield line
    yield {"status": "success"}


def _run_in_thread(function: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """The result of a thread of its own: a pull takes hours, and must not keep others from a pool
    of threads, nor the server from ending."""
    done: concurrent.futures.Future[_Result] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(done)


def _progress_events(
    plan: PullPlan, reported_bytes: int, downloaded_bytes: int
) -> Iterator[PullEvent]:
    """The files of which more is here than was told."""
    before = 0
    for file in plan.files:
        had, has = (
            min(max(of - before, -1), file.size_bytes) for of in (reported_bytes, downloaded_bytes)
        )
        before += file.size_bytes
        if has > had and has >= 0:
            yield _progress_event(file, has)


def _progress_event(file: RemoteFile, downloaded_bytes: int) -> PullEvent:
    kind = "sha256" if len(file.digest) == _SHA256_DIGITS else "sha1"
    return {
        "status": f"pulling {file.digest[:12]}",
        "digest": f"{kind}:{file.digest}",
        "total": file.size_bytes,
        "completed": downloaded_bytes,
    }
