"""The events of requests to an engine, until each has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localgen.backends.types import Delta, Failed, Finished, PromptProgress


@dataclass(frozen=True, slots=True)
class EngineSilent:
    """The engine has sent nothing for so long; no end of a request."""

    silent_s: float


EngineNotice = EngineSilent | PromptProgress
RequestEvent = Delta | Finished | Failed | EngineNotice
# between two reports of a prompt, and before the first one
PROGRESS_INTERVAL_S = 1.0


class RequestStream:
    """Ordered events of one or more requests. The last event of each is Finished or Failed.

    account: of their owner. abort, cancel: end one request in the engine; only after cancel an
    event follows.
    """

    __slots__ = (
        "_abort",
        "_announced_s",
        "_cancel",
        "_events",
        "_has_events",
        "_progress_s",
        "_request_ids",
        "account",
    )

    def __init__(
        self,
        request_ids: Sequence[str],
        account: str,
        *,
        abort: Callable[[str], None],
        cancel: Callable[[str], object],
    ) -> None:
        self.account, self._abort, self._cancel = account, abort, cancel
        self._request_ids = request_ids
        self._events: list[RequestEvent] = []
        self._has_events = asyncio.Event()
        self._announced_s = 0.0
        self._progress_s = time.monotonic()

    def put(self, event: RequestEvent) -> None:
        self._events.append(event)
        self._has_events.set()

    async def next_events(self) -> list[RequestEvent]:
        """Wait for and return all events since the last call, at least one."""
        await self._has_events.wait()
        self._has_events.clear()
        events, self._events = self._events, []
        return events

    async def wait(self, timeout_s: float) -> bool:
        """Wait for an event. Returns False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_events.wait()
        except TimeoutError:
            return False
        return True

    def announce_silence(self, silent_s: float) -> None:
        """Put an EngineSilent each time that the silence has doubled."""
        if silent_s >= 2 * self._announced_s:
            self._announced_s = silent_s
            self.put(EngineSilent(silent_s))

    def announce_progress(self, progress: PromptProgress) -> None:
        """Put the progress of a prompt, at most every PROGRESS_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s - self._progress_s >= PROGRESS_INTERVAL_S:
            self._progress_s = now_s
            self.put(progress)

    def abort(self) -> None:
        """Cancel the unfinished requests; no event follows."""
        for request_id in self._request_ids:
            self._abort(request_id)

    def cancel(self) -> None:
        """Cancel the unfinished requests; they finish as cancelled."""
        for request_id in self._request_ids:
            self._cancel(request_id)

    def fail(self, code: str, message: str) -> None:
        """Cancel the unfinished requests, with a Failed as the last event."""
        self.abort()
        self.put(Failed(self._request_ids[0], code, message))
