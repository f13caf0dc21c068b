"""/api/pull: download in a thread, stream progress, cancel when the client disconnects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from localgen.backends.errors import ModelNotFound
from localgen.hub import pull
from localgen.hub.download import PullPlan
from localgen.hub.packaged import PACKAGED_MODELS
from localgen.hub.reference import resolve_reference
from localgen.hub.repository import RemoteFile
from localgen.hub.resolve import find_target, resolve_model

_PERIOD_S = 0.1
_SHA256_DIGITS = 64
# one JSON object of the stream
PullEvent = dict[str, str | int]
_Result = TypeVar("_Result")


class _ClientDisconnected(Exception):
    """The client of this pull has disconnected."""


@dataclass(slots=True)
class _PullProgress:
    """State shared between the download thread and the event loop.

    downloaded_bytes: total over all files of the plan.
    """

    downloaded_bytes: int = 0
    messages: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False

    def report_bytes(self, downloaded_bytes: int) -> None:
        """Set the progress. Raises _ClientDisconnected to stop the download."""
        if self.cancelled:
            raise _ClientDisconnected
        self.downloaded_bytes = downloaded_bytes

    def notify(self, message: str) -> None:
        self.messages.put(message)

    def drain_messages(self) -> Iterator[PullEvent]:
        """Yield the messages since the last call as status events."""
        while not self.messages.empty():
            yield {"status": self.messages.get()}


async def stream_pull(name: str) -> AsyncGenerator[PullEvent, None]:
    """Download a model and yield status and progress events.

    Raises hub errors, before the first event if planning fails. Closing the generator stops the
    download at the next chunk; the partial download is kept for resuming.
    """
    if await asyncio.to_thread(_is_complete, name):
        yield {"status": "success"}
        return
    transfer = _PullProgress()
    plan = await _run_in_thread(lambda: pull.plan_pull(name, transfer.notify, allow_paths=False))
    yield {"status": "pulling manifest"}
    if plan.quant_reason:
        yield {"status": plan.quant_reason}
    for line in transfer.drain_messages():
        yield line
    reported_bytes = -1
    if not plan.is_cached:
        working = _run_in_thread(
            lambda: pull.run_pull(plan, transfer.report_bytes, transfer.notify)
        )
        try:
            while not (await asyncio.wait({working}, timeout=_PERIOD_S))[0]:
                here = transfer.downloaded_bytes
                for line in (
                    *transfer.drain_messages(),
                    *_progress_events(plan, reported_bytes, here),
                ):
                    yield line
                reported_bytes = here
            working.result()
        finally:
            transfer.cancelled = True
            working.cancel()
    for line in (
        *transfer.drain_messages(),
        *_progress_events(plan, reported_bytes, plan.size_bytes),
    ):
        yield line
    yield {"status": "success"}


def _is_complete(name: str) -> bool:
    """Return True for an installed model that is not on the hub: built in, or the user's file."""
    target = find_target(name, allow_paths=False)
    is_own = target.is_path or target.text in PACKAGED_MODELS
    if not is_own and resolve_reference(target.text) is not None:
        return False
    try:
        resolve_model(name, allow_paths=False)
    except ModelNotFound:
        return False
    return True


def _run_in_thread(function: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Run a function in a new daemon thread.

    A pull may take hours: it must not occupy the thread pool or delay the server's exit.
    """
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
    """Yield an event for each file with progress since the last report."""
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
